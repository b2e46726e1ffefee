"""A model larger than memory: a sweep with the weights on disk against the same sweep in memory.

    python benchmarks/streaming.py mamba2-2.7b --folder /tmp/shape --memory-budget 3GB --windows 4 --every 32
    python benchmarks/streaming.py mamba2-2.7b --folder /tmp/shape --device cuda --card 8GB --windows 32 --every 16
    python benchmarks/streaming.py mamba2-2.7b --folder /tmp/half --stored float16 --device cuda --card 16GB
    python benchmarks/streaming.py mamba-130m --folder /tmp/small --device cuda --card 4GB --only memory

The shape's checkpoint (random weights, random tokens) is written to the folder unless it is there. Each sweep is a
process of its own: `kl_lens.load`, then `Sweep.measure` with everything that belongs to it (identity, noise floor,
teacher, journal). `--card` is what the process on disk may take of the GPU's memory; in memory it may take all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import machine, shape  # isort: skip  (first: it sets the environment that torch reads)

import torch

from kl_lens.checkpoints import load
from kl_lens.environment import peak_memory
from kl_lens.recipes import Recipe
from kl_lens.runs import CALIBRATION, Run
from kl_lens.sensitivity.engines import DEFAULT_MEMORY
from kl_lens.sensitivity.perturbation import Candidate, find_candidates
from kl_lens.sensitivity.sweep import Sweep
from kl_lens.text import Windows
from kl_lens.text.windows import UsedDocument
from kl_lens.units import parse_bytes

Numbers = dict[tuple[str, str], list[tuple[float, ...]]]


def write(name: str, folder: Path, stored: str) -> None:
    if (folder / "config.json").exists():
        return
    begin = time.perf_counter()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = shape(name).model
    model.to(getattr(torch, stored)).cpu().save_pretrained(folder, max_shard_size="1GB")  # type: ignore[operator]
    print(f"{name} in {stored} written to {folder} in {time.perf_counter() - begin:.0f} s", flush=True)


def some_windows(count: int, length: int) -> Windows:
    ids = torch.randint(0, 50000, (count, length), generator=torch.Generator().manual_seed(0))
    return Windows(
        ids=ids, source="random", split=None, order="drawn", seed=0, stride=None,
        starts=tuple(length * k for k in range(count)), documents=((UsedDocument("random", "0"),),) * count,
        stream_tokens=10**6,
    )  # fmt: skip


def child(arguments: argparse.Namespace) -> None:
    """One sweep; prints its time and memory as JSON and leaves its numbers in the run."""
    card = arguments.device == "cuda"
    if card:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, arguments.card / total) if arguments.card else 1.0
        )
    begin = time.perf_counter()
    budget = arguments.memory_budget
    model = load(
        arguments.folder,
        device=arguments.device,
        weights=arguments.child,
        memory_budget=None if budget == DEFAULT_MEMORY else budget,
    )
    candidates: list[Candidate] = find_candidates(model.anatomy, [Recipe("int4")])[0][:: arguments.every]
    opened = time.perf_counter()
    said: list[str] = []
    with Run.create(arguments.run) as run:
        sweep = Sweep(model, run, memory_budget=budget, precision=arguments.precision)
        sweep.progress.message = said.append
        if card:  # the kernels are compiled before anything is timed
            warm = Sweep(model, Run.create(arguments.run / "warm"), precision=arguments.precision)
            warm.measure(candidates[-1:], some_windows(2, arguments.length))
            del warm  # and its copies of weights and states on the card
        before = time.perf_counter()
        result = sweep.measure(candidates, some_windows(arguments.windows, arguments.length))
        if card:
            torch.cuda.synchronize()
    taken = time.perf_counter() - before
    print(
        json.dumps(
            {
                "open": opened - begin, "sweep": taken, "candidates": len(candidates), "precision": result.precision,
                "resident": peak_memory(), "said": said[:3],
                "card": torch.cuda.max_memory_reserved() if card else 0,
            }
        )
    )  # fmt: skip


def numbers(folder: Path) -> Numbers:
    with Run.open(folder) as run:
        return {
            key: [
                (s.kl_teacher_to_student, s.kl_student_to_teacher, s.squared_error, s.delta_cross_entropy)
                for s in run.samples(CALIBRATION, *key)
            ]
            for key in run.measured_windows(CALIBRATION)
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stored", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--card", type=parse_bytes, default=0)
    parser.add_argument("--memory-budget", type=parse_bytes, default=DEFAULT_MEMORY)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--every", type=int, default=32, help="every Nth candidate of the menu")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--only", choices=("disk", "memory"), default=None)
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    write(arguments.shape, arguments.folder, arguments.stored)
    print(machine() if arguments.device == "cpu" else torch.cuda.get_device_name(), flush=True)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder.parent) as runs:
        for place in (arguments.only,) if arguments.only else ("disk", "memory"):
            run = Path(runs) / place
            words = [sys.executable, __file__, *sys.argv[1:], "--child", place, "--run", str(run)]
            if place == "memory" and not arguments.only:  # as much memory as it likes
                words += ["--card", "0", "--memory-budget", "8GB"]
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
            found[place] = json.loads(done.stdout.splitlines()[-1])
            print(place, json.dumps(found[place]), flush=True)
        if len(found) == 2:
            disk, memory = numbers(Path(runs) / "disk"), numbers(Path(runs) / "memory")
            pairs = [(a, b) for key in memory for a, b in zip(memory[key], disk[key], strict=True)]
            kl = [abs(b[0] / a[0] - 1) for a, b in pairs if a[0]]
            print(
                f"{len(pairs)} candidate-windows: {sum(a == b for a, b in pairs)} the same to the last bit; KL off by "
                f"at most {max(kl):.1e}; disk / memory: sweep {found['disk']['sweep'] / found['memory']['sweep']:.2f}, "
                f"resident {found['disk']['resident'] / found['memory']['resident']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
