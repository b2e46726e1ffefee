"""How long exact budgets and the frontier take, on tables of random damage and two kinds of shapes.

    python benchmarks/knapsack.py [--repeats 5]

`repeated` has the four projections of a Mamba block over and over, as real models do; `irregular` gives every
component a shape of its own, which is harder: no two sums of bytes agree. Each row is solved at several
budgets; the slowest and the mean wall time are printed, with the largest gap that was left.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from kl_lens.planning import build_problem, pareto_frontier, plan_for_budget
from kl_lens.planning.problem import LatencyTable
from kl_lens.records import Component, Estimate, Measurement, SensitivityTable

DAMAGE = {"int8": 0.004, "q6_k": 0.03, "q5_k": 0.2, "q4_k": 0.7, "int4": 1.0}
MAMBA = ((3072, 768), (80, 1536), (1536, 256), (768, 1536))
SHARES = (0.03, 0.1, 0.25, 0.5, 0.8)


def random_table(count: int, formats: int, kind: str, seed: int) -> SensitivityTable:
    generator = np.random.default_rng(seed)
    names = [f"c{i}" for i in range(count)]
    components, measurements = [], []
    for i, name in enumerate(names):
        irregular = (int(generator.integers(16, 4096)), 256 * int(generator.integers(1, 13)))
        shape = MAMBA[i % 4] if kind == "repeated" else irregular
        components.append(Component(name, f"{name}.weight", "in_proj", "ssm", i, shape, shape[0] * shape[1]))
        scale = generator.lognormal(-9, 2)
        for fmt in ("int8", "int4", "q5_k", "q6_k", "q4_k")[: formats - 1]:
            kl = Estimate(float(scale * DAMAGE[fmt] * generator.lognormal(0, 0.3)), 0.0)
            measurements.append(
                Measurement(name, fmt, {"kl_teacher_to_student": kl}, 32768, 64, "float32", 0.0)
            )
    return SensitivityTable(kind, "mamba", tuple(components), names[0], names[0], tuple(measurements))


def random_latency(table: SensitivityTable, seed: int) -> LatencyTable:
    generator = np.random.default_rng(seed)
    speed = {"fp16": 1.0, "int8": 0.6, "q6_k": 0.95, "q5_k": 0.9, "q4_k": 0.6, "int4": 0.65}
    return {
        (c.name, f): float(c.parameters * 1e-10 * speed[f] * generator.lognormal(0, 0.1))
        for c in table.components
        for f in ("fp16", *table.formats)
    }


def budgets(table: SensitivityTable) -> Iterator[tuple[str, Callable[[], float]]]:
    """(what is asked, a call that solves it and gives the gap)."""
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
    repeats = parser.parse_args().repeats
    print(f"{'shapes':10} {'size':>9}  {'question':28} {'mean s':>7} {'max s':>7} {'largest gap':>12}")
    for kind in ("repeated", "irregular"):
        for count, formats in ((100, 3), (100, 4), (400, 6)):
            times: dict[str, list[float]] = {}
            gaps: dict[str, float] = {}
            points, within = [], 1.0
            for seed in range(repeats):
                table = random_table(count, formats, kind, seed)
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
            for question, seconds in times.items():
                proof = f"{gaps[question]:.1e}" if question in gaps else f"×{within:.4f}"
                print(
                    f"{kind:10} {count:>4} × {formats:<2}  {question:28} {statistics.mean(seconds):7.3f} "
                    f"{max(seconds):7.3f} {proof:>12}"
                )
            print(f"{'':21}  {max(points)} points on the largest frontier")


if __name__ == "__main__":
    main()
