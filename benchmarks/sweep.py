"""The sweep, three ways in one run: as published, our plain engine, our fast engine; with the floor of the arithmetic.

    python benchmarks/sweep.py [--models reference:mamba,…,mamba-130m,mamba2-130m] [--write docs/results/speed.csv]

The fast engine measures every component of a reference checkpoint on 4,096 tokens, and thirteen of a published shape,
spread evenly over the network, on 1,024; its seconds are the mean. The work of the other two ways does not depend on
the component; a few stand for all. "As published" (published.py) runs in a process of its own, without our settings of
the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import machine, matmul_rate, opened  # isort: skip  (first: it sets the environment that torch reads)

import torch

from kl_lens.base.environment import DEFAULTS
from kl_lens.measuring.engines import Engine, FastEngine, PlainEngine
from kl_lens.measuring.perturbation import Candidate, find_candidates, first_block
from kl_lens.model import LoadedModel
from kl_lens.weights.recipes import Recipe
from result_files import options, write_speed

MODELS = "reference:mamba,reference:mamba2,reference:hybrid,mamba-130m,mamba2-130m"


def spread(candidates: list[Candidate], count: int) -> list[Candidate]:
    """Evenly over the network."""
    return [
        candidates[round((i + 0.5) * len(candidates) / count - 0.5)] for i in range(count)
    ]


def seconds_as_published(
    name: str, model: LoadedModel, weight: str, windows: int
) -> float:
    script = Path(__file__).with_name("published.py")
    environment = {key: value for key, value in os.environ.items() if key not in DEFAULTS}
    with tempfile.TemporaryDirectory() as temporary:
        if name.startswith("reference:"):
            folder = str(model.folder)
        else:
            folder = temporary
            model.model.save_pretrained(folder)
        command = [sys.executable, str(script), folder, weight, str(windows)]
        process = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        )
    return float(process.stdout)


def floor_seconds(
    model: LoadedModel, candidates: list[Candidate], tokens: int, rate: float
) -> float:
    """Suffix and head products of the candidates over the machine's matmul rate; scans and metrics come for free."""
    anatomy = model.anatomy
    head = anatomy.component(anatomy.head).parameters
    operations = 0
    for candidate in candidates:
        start = first_block(anatomy, candidate.perturbation)
        suffix = sum(
            c.parameters
            for c in anatomy.candidates
            if c.block is not None and c.block >= start
        )
        operations += 2 * tokens * (suffix + head)
    return operations / rate


def run(name: str, path: Path | None) -> None:
    model = opened(name)
    trained = name.startswith("reference:")
    every, _ = find_candidates(model.anatomy, [Recipe("int4")])
    candidates = every if trained else spread(every, 13)
    vocabulary = model.anatomy.component(model.anatomy.embedding).shape[0]
    windows = 8 if trained else 2
    ids = torch.randint(
        0, vocabulary, (windows, 512), generator=torch.Generator().manual_seed(0)
    )
    rate = matmul_rate(
        columns=model.config.hidden_size * 4, inner=model.config.hidden_size
    )
    seconds: dict[str, float] = {}
    for engine_class, chosen in (
        (FastEngine, candidates),
        (PlainEngine, spread(every, 2)),
    ):
        engine: Engine = engine_class(model)
        engine.prepare(ids)
        engine.measure([chosen[0].perturbation])  # to warm up
        begin = time.perf_counter()
        engine.measure([candidate.perturbation for candidate in chosen])
        seconds[engine.name] = (time.perf_counter() - begin) / len(chosen)
        del engine
    fast = seconds["fast"]
    published = seconds_as_published(
        name, model, every[len(every) // 2].component.weight, windows
    )
    floor = floor_seconds(model, candidates, ids.numel(), rate) / len(candidates)
    numbers = {
        ("", "tokens"): str(ids.numel()),
        ("fast", "s/candidate"): f"{fast:.3f}",
        ("floor", "s/candidate"): f"{floor:.2f}",
        ("fast", "% of the floor"): f"{100 * floor / fast:.0f}",
        ("plain", "s/candidate"): f"{seconds['plain']:.2f}",
        ("fast", "times as fast as plain"): f"{seconds['plain'] / fast:.2f}",
        ("as published", "s/candidate"): f"{published:.2f}",
        ("fast", "times as fast as published"): f"{published / fast:.1f}",
    }
    shown = ", ".join(
        f"{variant} {quantity} {number}"
        for (variant, quantity), number in numbers.items()
    )
    print(
        f"{name}: {shown} ({len(candidates)} candidates, {rate / 1e9:.0f} GFLOP/s)",
        flush=True,
    )
    threads = str(torch.get_num_threads())
    write_speed(path, {"benchmark": "sweep", "model": name, "threads": threads}, numbers)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", default=MODELS)
    arguments = parser.parse_args()
    print(machine(), flush=True)
    for name in arguments.models.split(","):
        # Each model in a process of its own: what one leaves in memory must not slow the next.
        if "," in arguments.models:
            flags = ["--write", str(arguments.write)] if arguments.write else []
            subprocess.run(
                [sys.executable, __file__, *flags, "--models", name], check=True
            )
        else:
            run(name, arguments.write)


if __name__ == "__main__":
    main()
