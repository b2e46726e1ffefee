"""OpenVINO against transformers eager on PyTorch, side by side in one run, on the 130m shapes.

    python benchmarks/openvino.py                      # mamba-130m and mamba2-130m shapes, random weights
    python benchmarks/openvino.py --quick              # four layers and a small vocabulary: does it run?
    python benchmarks/openvino.py --threads 1 --rounds 5

Every contender is measured in a process of its own (for its peak memory), in turn, over several rounds; the figures
are the best of the rounds, the ratios are to PyTorch in the same run. Random weights: good for speed, not for quality.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# This file has the name of the package that it measures: installed packages come first.
HERE = Path(__file__).resolve().parent
sys.path[:] = [*(entry for entry in sys.path if Path(entry or ".").resolve() != HERE), str(HERE)]

import numpy as np  # noqa: E402

from result_files import add_option, write_speed  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "mamba": {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16},
    "mamba2": {
        "vocab_size": 50288,
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "state_size": 128,
        "num_heads": 24,
        "head_dim": 64,
        "n_groups": 1,
        "tie_word_embeddings": True,
    },
}
PLANS = ("fp16", "int8", "int4", "mixed")


def random_model(family: str, quick: bool) -> Any:
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    settings = dict(SHAPES[family])
    if quick:
        settings.update(vocab_size=1024, num_hidden_layers=4)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model.eval().requires_grad_(False)


def assignment(name: str, anatomy: Any) -> dict[str, str]:
    """The mixed plan has the shape of a good one: head in INT8, first and last blocks in FP16, INT4 between."""
    if name == "fp16":
        return {}
    if name != "mixed":
        return {c.name: name for c in anatomy.candidates}
    last = anatomy.blocks - 1
    return {
        c.name: "int8" if c.block is None else "fp16" if c.block in (0, last) else "int4"
        for c in anatomy.candidates
    }


def export_all(family: str, quick: bool, folder: Path) -> None:
    """Runs in a process of its own, so that the peak is that of exporting."""
    from kl_lens.checkpoints import LoadedModel
    from kl_lens.records import Plan
    from kl_lens.targets.openvino import export

    model = LoadedModel(family, Path(), random_model(family, quick), None)
    for name in PLANS:
        started = time.perf_counter()
        plan = Plan(name, assignment(name, model.anatomy), made_by="benchmark")
        artifact = export(model, plan, folder / name)
        report = {
            "plan": name,
            "seconds": time.perf_counter() - started,
            "bytes": artifact.realised_bytes,
            "peak_bytes": peak_bytes(),
        }
        print(json.dumps(report), flush=True)


def measure(
    contender: str, family: str, quick: bool, folder: Path, threads: int, prompt: int, steps: int
) -> None:
    """One contender: prefill of the prompt, then decoding; prints one line of JSON."""
    ids = np.random.default_rng(0).integers(0, 1000, prompt).tolist()
    runner = (
        pytorch_runner(family, quick, threads)
        if contender == "pytorch"
        else ov_runner(folder / contender, threads)
    )
    run_prefill, run_step, description = runner
    prefill = timed(lambda: run_prefill(ids), 2 if contender == "pytorch" else 4)
    decode = []
    for token in ids[:steps]:
        started = time.perf_counter()
        run_step(token)
        decode.append(time.perf_counter() - started)
    result = {
        "prefill_s": prefill,
        "decode_s": float(np.median(decode[2:])),
        "peak_bytes": peak_bytes(),
        "description": description,
    }
    print(json.dumps(result))


def ov_runner(folder: Path, threads: int) -> tuple[Any, Any, dict[str, Any]]:
    from kl_lens.targets.openvino import open_session

    session = open_session(folder, threads=threads, cache=False)

    def prefill(ids: list[int]) -> None:
        session.reset()
        session.prefill(ids)

    return prefill, session.step, session.description


def pytorch_runner(family: str, quick: bool, threads: int) -> tuple[Any, Any, dict[str, Any]]:
    """transformers as it comes: eager, float32, its own cache."""
    import torch

    torch.set_num_threads(threads)
    model = random_model(family, quick)
    cache: list[Any] = [None]

    def prefill(ids: list[int]) -> None:
        with torch.no_grad():
            output = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        cache[0] = output.cache_params

    def step(token: int) -> None:
        with torch.no_grad():
            cache[0] = model(torch.tensor([[token]]), cache_params=cache[0], use_cache=True).cache_params

    return prefill, step, {"library": "torch", "version": torch.__version__}


def timed(function: Any, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return best


def peak_bytes() -> int:
    from kl_lens.profiling.memory import resident

    return resident("VmHWM")


def in_a_process(arguments: list[str]) -> list[dict[str, Any]]:
    run = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{run.stderr[-2000:]}")
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=tuple(SHAPES), action="append")
    parser.add_argument("--quick", action="store_true", help="four layers, a small vocabulary, one round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--keep", type=Path, help="folder for the exported models (default: a temporary one)")
    add_option(parser)
    parser.add_argument(
        "--worker", nargs=3, metavar=("CONTENDER", "FAMILY", "FOLDER"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.prompt, options.steps = 1, min(options.prompt, 32), min(options.steps, 10)
    if options.worker:
        contender, family, folder = options.worker
        if contender == "export":
            export_all(family, options.quick, Path(folder))
        else:
            measure(
                contender, family, options.quick, Path(folder), options.threads, options.prompt, options.steps
            )
        return
    with tempfile.TemporaryDirectory() as temporary:
        base = options.keep or Path(temporary)
        for family in options.family or list(SHAPES):
            benchmark(family, options, base / family)


def benchmark(family: str, options: argparse.Namespace, folder: Path) -> None:
    common = [
        "--threads",
        str(options.threads),
        "--prompt",
        str(options.prompt),
        "--steps",
        str(options.steps),
    ]
    common += ["--quick"] if options.quick else []
    exports = {row["plan"]: row for row in in_a_process([*common, "--worker", "export", family, str(folder)])}
    best: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for contender in ("pytorch", *PLANS):
            row = in_a_process([*common, "--worker", contender, family, str(folder)])[0]
            kept = best.setdefault(contender, row)
            for key in ("prefill_s", "decode_s", "peak_bytes"):
                kept[key] = min(kept[key], row[key])
    base = best["pytorch"]
    numbers = {}
    for name, row in best.items():
        variant = (
            "PyTorch eager (transformers)" if name == "pytorch" else name.upper() if name != "mixed" else name
        )
        numbers |= {
            (variant, "decode ms"): f"{row['decode_s'] * 1e3:.2f}",
            (variant, "decode, times PyTorch"): f"{base['decode_s'] / row['decode_s']:.2f}",
            (variant, "prefill ms"): f"{row['prefill_s'] * 1e3:.0f}",
            (variant, "prefill, times PyTorch"): f"{base['prefill_s'] / row['prefill_s']:.2f}",
            (variant, "peak MB"): f"{row['peak_bytes'] / 1e6:.0f}",
        }
        if made := exports.get(name):
            numbers[variant, "file MB"] = f"{made['bytes'] / 1e6:.1f}"
            numbers[variant, "export s"] = f"{made['seconds']:.1f}"
    shape = f"{family}-quick" if options.quick else f"{family}-130m"
    print(f"{shape}: prompt {options.prompt}, {options.threads} thread(s), best of {options.rounds}")
    for (variant, quantity), number in numbers.items():
        print(f"  {variant:29} {quantity:24} {number:>8}")
    case = {"benchmark": "openvino", "model": shape, "threads": str(options.threads)}
    write_speed(options.write, case, numbers)
    print(f"peak while exporting: {max(row['peak_bytes'] for row in exports.values()) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
