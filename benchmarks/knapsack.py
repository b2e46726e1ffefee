"""How long exact budgets and the frontier take, on tables of random damage and two kinds of shapes.

    python benchmarks/knapsack.py [--repeats 5] [--write docs/results/speed.csv]

`repeated` has the four projections of a Mamba block over and over, as real models do; `irregular` gives every
component a shape of its own, which is harder: no two sums of bytes agree. Then the published shapes with the whole menu
of each target. Each row is solved at several budgets; the slowest and the mean wall time are printed, with the largest
gap that was left.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kl_lens.formats import get_format
from kl_lens.planning import build_problem, pareto_frontier, plan_for_budget
from kl_lens.planning.problem import LatencyTable
from kl_lens.records import Component, Estimate, Measurement, SensitivityTable
from kl_lens.targets import get_target
from result_files import add_option, write_speed

FORMATS = ("int8", "int4", "q5_k", "q6_k", "q4_k")
MAMBA = ((3072, 768), (80, 1536), (1536, 256), (768, 1536))
Shapes = Sequence[tuple[int, int]]
PUBLISHED: dict[str, Shapes] = {
    "mamba-130m": [(50288, 768), *([(3072, 768), (80, 1536), (1536, 48), (768, 1536)] * 24)],
    "mamba2-2.7b": [(50288, 2560), *([(10576, 2560), (2560, 5120)] * 64)],
}
SHARES = (0.03, 0.1, 0.25, 0.5, 0.8)


def repeated(count: int, kind: str, seed: int) -> Shapes:
    generator = np.random.default_rng(seed)
    if kind == "repeated":
        return [MAMBA[i % 4] for i in range(count)]
    return [(int(generator.integers(16, 4096)), 256 * int(generator.integers(1, 13))) for _ in range(count)]


def random_table(name: str, shapes: Shapes, formats: Sequence[str], seed: int) -> SensitivityTable:
    """Damage falls by about four with each bit, and varies between components as it does in real models."""
    generator = np.random.default_rng(seed)
    components, measurements = [], []
    for i, shape in enumerate(shapes):
        part = Component(f"c{i}", f"c{i}.weight", "in_proj", "ssm", i, shape, shape[0] * shape[1])
        components.append(part)
        scale = generator.lognormal(-9, 2)
        for fmt in (f for f in formats if get_format(f).fits(shape) is None):
            bits = 8 * get_format(fmt).bytes((256, 256)) / 256**2
            kl = Estimate(float(scale * 4 ** (4 - bits) * generator.lognormal(0, 0.3)), 0.0)
            measurements.append(
                Measurement(part.name, fmt, {"kl_teacher_to_student": kl}, 32768, 64, "float32", 0.0)
            )
    return SensitivityTable(name, "mamba", tuple(components), "c0", "c0", tuple(measurements))


def random_latency(table: SensitivityTable, seed: int) -> LatencyTable:
    """In proportion to bytes, with some variation as kernels have it."""
    generator = np.random.default_rng(seed)
    return {
        (c.name, f): float(get_format(f).bytes(c.shape) * 1e-10 * generator.lognormal(0, 0.15))
        for c in table.components
        for f in ("fp16", *table.formats)
        if get_format(f).fits(c.shape) is None
    }


def budgets(table: SensitivityTable) -> Iterator[tuple[str, Callable[[], float]]]:
    """(question, a call that solves it and returns the gap)."""
    latency = random_latency(table, 1)
    bits = [4.6 + share * (16 - 4.6) for share in SHARES]
    for bpw in bits:
        yield "least KL, bytes", lambda bpw=bpw: plan_for_budget(table, max_bpw=bpw).gap
    for kl in (1e-4, 1e-3, 1e-2, 1e-1):
        yield "least bytes, KL", lambda kl=kl: plan_for_budget(table, max_kl=kl).gap
    slowest = sum(latency[c.name, "fp16"] for c in table.components)
    for bpw in bits[1:4]:
        yield (
            "least KL, bytes and latency",
            lambda bpw=bpw: (
                plan_for_budget(table, max_bpw=bpw, max_latency=0.75 * slowest, latency=latency).gap
            ),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="random tables per size (default: 3)")
    add_option(parser)
    arguments = parser.parse_args()
    repeats = arguments.repeats
    cases = [
        (
            kind,
            f"{count} × {formats}",
            lambda seed, k=kind, n=count: repeated(n, k, seed),
            FORMATS[: formats - 1],
        )
        for kind in ("repeated", "irregular")
        for count, formats in ((100, 3), (100, 4), (400, 6))
    ] + [
        (f"{name}, {target}", f"{len(shapes)} × {len(menu)}", lambda seed, s=shapes: s, menu[:-1])
        for name, shapes in PUBLISHED.items()
        for target in ("gguf", "openvino")
        for menu in [get_target(target).formats]  # FP16 is the last
    ]
    for kind, size, shapes_of, formats in cases:
        times: dict[str, list[float]] = {}
        gaps: dict[str, float] = {}
        points, within = [], 1.0
        for seed in range(repeats):
            table = random_table(kind, shapes_of(seed), formats, seed)
            for question, solve in budgets(table):
                started = time.perf_counter()
                gap = solve()
                times.setdefault(question, []).append(time.perf_counter() - started)
                gaps[question] = max(gaps.get(question, 0.0), gap)
            started = time.perf_counter()
            frontier = pareto_frontier(build_problem(table))
            times.setdefault("frontier", []).append(time.perf_counter() - started)
            points.append(len(frontier))
            within = max(within, frontier.within)
        numbers = {}
        for question, seconds in times.items():
            numbers[question, "components × recipes"] = size
            numbers[question, "mean s"] = f"{statistics.mean(seconds):.3f}"
            numbers[question, "longest s"] = f"{max(seconds):.3f}"
            if question in gaps:
                numbers[question, "gap"] = f"{gaps[question]:.1e}"
            else:
                numbers[question, "KL of the frontier, at most times the optimum"] = f"{within:.4f}"
            shown = ", ".join(f"{q} {n}" for (asked, q), n in numbers.items() if asked == question)
            print(f"{kind}: {question}: {shown}")
        print(f"{kind}: {max(points)} points on the largest frontier", flush=True)
        write_speed(arguments.write, {"benchmark": "knapsack", "model": kind, "threads": "1"}, numbers)


if __name__ == "__main__":
    main()
