"""`kl-lens run` at published sizes: seconds of each stage, of the whole with the start of Python, and memory.

    python benchmarks/whole_run.py mamba-130m,mamba2-2.7b [--device cuda] [--card 16GB]
                                   [--write docs/results/speed.csv]

Weights are random, as the architecture's authors initialise them. `--card` limits torch to so much of the GPU's memory.
The job is `kl-lens run MODEL --target gguf --without benchmark`, each model in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from result_files import options, write_speed

_STAGE = re.compile(
    r"(\w[^%]*?) {2,}(?:(\d+):)?(\d+):(\d\d)( .*)?"
)  # "Planning, llama.cpp    1:12  about 2:44 left"


def job(words: list[str], card: str | None) -> int:
    """`kl-lens`, then a line with the memory that it took."""
    import torch

    from kl_lens.base.units import parse_bytes
    from kl_lens.cli.main import main

    if card is not None:
        room = parse_bytes(card)
        (_, whole) = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(room / whole)
        torch.cuda.mem_get_info = lambda device=None: (
            room - torch.cuda.memory_reserved(),
            room,
        )
        torch.cuda.get_per_process_memory_fraction = lambda device=None: 1.0
    code = main(words)
    memory = {
        "host memory, GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    }
    if torch.cuda.is_initialized():
        memory["GPU memory, GB"] = torch.cuda.max_memory_reserved() / 1e9
    print(json.dumps(memory))
    return code


def write_model(name: str, folder: Path, device: str) -> None:
    from common import opened  # isort: skip  (first: it sets the environment that torch reads)
    import torch
    import transformers

    from kl_lens.base.files import reference_path

    opened(name, device).model.half().cpu().save_pretrained(folder)
    torch.cuda.empty_cache()  # for the job
    transformers.AutoTokenizer.from_pretrained(reference_path("mamba")).save_pretrained(
        folder
    )


def measured(words: list[str], card: str | None) -> dict[str, float]:
    """Seconds and gigabytes of the job; its output is shown."""
    begin = time.perf_counter()
    times = dict[str, float]()
    command = [
        sys.executable,
        __file__,
        *(["--card", card] if card else []),
        "--job",
        *words,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if stage := _STAGE.fullmatch(line.rstrip()):
                name = f"{stage[1].partition(',')[0].lower()}, s"
                seconds = 3600 * int(stage[2] or 0) + 60 * int(stage[3]) + int(stage[4])
                times[name] = times.get(name, 0) + seconds
            last = line
    # 1: a file of random weights may differ from PyTorch.
    if process.returncode not in (0, 1) or "evaluating, s" not in times:
        raise SystemExit(process.returncode or 1)
    return {"whole, s": time.perf_counter() - begin, **times, **json.loads(last)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("models", nargs="?", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--card", metavar="SIZE")
    parser.add_argument("--job", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        raise SystemExit(job(arguments.job, arguments.card))
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / name
            write_model(name, model, arguments.device)
            flags = [
                "--device",
                arguments.device,
                "--target",
                "gguf",
                "--without",
                "benchmark",
            ]
            quantities = measured(
                ["run", str(model), "--run", f"{folder}/run", *flags], arguments.card
            )
        variant = " ".join(filter(None, (arguments.device, arguments.card)))
        print(
            name,
            variant,
            *(f"{quantity} {number:.1f}" for quantity, number in quantities.items()),
            sep="; ",
        )
        case = {"benchmark": "whole run", "model": name, "threads": str(os.cpu_count())}
        write_speed(
            arguments.write,
            case,
            {(variant, q): f"{number:.1f}" for q, number in quantities.items()},
        )


if __name__ == "__main__":
    main()
