"""Speed of files at published shapes: formats side by side, and builds of llama.cpp; PyTorch beside OpenVINO.

    python benchmarks/runtimes.py gguf mamba-130m,mamba2-2.7b [--threads 1,2] [--libraries wheel=,native=FOLDER]
    python benchmarks/runtimes.py openvino mamba-130m,mamba2-130m [--threads 2]   # [--write docs/results/speed.csv]

Weights are random: speed does not depend on them. Files are timed by `kl-lens benchmark`, which makes them take turns.
PyTorch is transformers as it comes: eager, float32, its own cache; the best of some rounds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import machine, shape  # isort: skip  (first: it sets the environment that torch reads)

import torch

from kl_lens.model import LoadedModel
from kl_lens.run.records import Plan
from kl_lens.targets import get_target
from kl_lens.weights.recipes import Recipe, fitting_recipe
from result_files import options, write_speed

FORMATS = {"gguf": ("fp16", "q8_0", "q4_0", "q4_k"), "openvino": ("fp16", "int8", "int4")}
PROMPT = 128
TOKENS = 64
REPEATS = 5
Numbers = dict[tuple[str, str], str]


def exported(model: LoadedModel, target: str, folder: Path) -> dict[str, Path]:
    """The whole model in each format."""
    for name in FORMATS[target]:
        recipes = {
            c.name: fitting_recipe(Recipe(name), c.shape)[0]
            for c in model.anatomy.candidates
        }
        get_target(target).export(
            model, Plan(name, dict(recipes), "benchmark"), folder / name
        )
    return {name: folder / name for name in FORMATS[target]}


def timed(files: dict[str, Path], threads: int, library: str) -> dict[str, Any]:
    """Format → its profile, as `kl-lens benchmark --json` prints it."""
    words = ["--json", "--threads", str(threads), "--repeats", str(REPEATS)]
    words += ["--prompt-lengths", str(PROMPT), "--new-tokens", str(TOKENS)]
    first = ["--llama-cpp", library] if library else []
    command = [
        sys.executable,
        "-m",
        "kl_lens.cli.main",
        *first,
        "benchmark",
        *map(str, files.values()),
        *words,
    ]
    result = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return {Path(profile["subject"]).name: profile for profile in result["profiles"]}


def numbers_of(variant: str, profile: dict[str, Any]) -> Numbers:
    timings = profile["timings"]
    speed = timings["tokens_per_second"]
    first = timings[f"first_token_seconds@{PROMPT}"]
    return {
        (variant, "MB"): f"{profile['file_bytes'] / 1e6:.1f}",
        (
            variant,
            "decode tokens/s",
        ): f"{speed['median']:.2f} ± {(speed['high'] - speed['low']) / 2:.2f}",
        (variant, "prefill ms"): f"{1e3 * first['median']:.0f}",
        (variant, "peak MB"): f"{profile['peak_memory_bytes'] / 1e6:.0f}",
        (variant, "share of bandwidth"): f"{profile['bound']['share']:.2f}",
    }


@torch.no_grad()
def eager(model: torch.nn.Module, threads: int) -> Numbers:
    torch.set_num_threads(threads)
    ids = torch.arange(PROMPT)[None]
    best = {"decode": float("inf"), "prefill": float("inf")}
    for _ in range(REPEATS):
        begin = time.perf_counter()
        cache = model(ids, use_cache=True, logits_to_keep=1).cache_params
        read = time.perf_counter()
        for token in ids[0, :TOKENS, None, None]:
            cache = model(token, cache_params=cache, use_cache=True).cache_params
        decode = (time.perf_counter() - read) / TOKENS
        best = {
            "decode": min(best["decode"], decode),
            "prefill": min(best["prefill"], read - begin),
        }
    variant = "PyTorch eager (transformers)"
    return {
        (variant, "decode tokens/s"): f"{1 / best['decode']:.2f}",
        (variant, "prefill ms"): f"{1e3 * best['prefill']:.0f}",
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("target", choices=tuple(FORMATS))
    parser.add_argument("shapes")
    parser.add_argument("--threads", default="1", help="for example 1,2")
    parser.add_argument(
        "--libraries",
        default="wheel=",
        help="NAME=PATH,…; without a path, what is installed",
    )
    arguments = parser.parse_args()
    print(machine())
    for name in arguments.shapes.split(","):
        model = shape(name)
        with tempfile.TemporaryDirectory() as folder:
            files = exported(model, arguments.target, Path(folder))
            for threads in map(int, arguments.threads.split(",")):
                numbers: Numbers = {}
                if arguments.target == "openvino":
                    numbers |= eager(model.model, threads)
                for runtime in (
                    arguments.libraries.split(",") if arguments.target == "gguf" else [""]
                ):
                    label, _, library = runtime.partition("=")
                    for fmt, profile in timed(files, threads, library).items():
                        variant = f"{fmt.upper()}, {label}" if label else fmt.upper()
                        numbers |= numbers_of(variant, profile)
                print(
                    name,
                    threads,
                    *(f"{v} {q} {n}" for (v, q), n in numbers.items()),
                    sep="\n  ",
                    flush=True,
                )
                case = {
                    "benchmark": arguments.target,
                    "model": name,
                    "threads": str(threads),
                }
                write_speed(arguments.write, case, numbers)


if __name__ == "__main__":
    main()
