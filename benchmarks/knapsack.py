"""How long exact budgets and the frontier take: published shapes with each target's whole menu, random damage.

    python benchmarks/knapsack.py [--repeats 5] [--write docs/results/speed.csv]

Each table is solved at several budgets; the slowest and the mean wall time are printed, with the largest gap.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kl_lens.planning import SpeedModel, build_problem, frontier, plan_for_budget
from kl_lens.run.records import Component, Estimate, Measurement, SensitivityTable
from kl_lens.targets import get_target
from kl_lens.weights.formats import get_format
from result_files import options, write_speed

SHAPES = {
    "mamba-130m": [
        (50288, 768),
        *([(3072, 768), (80, 1536), (1536, 48), (768, 1536)] * 24),
    ],
    "mamba2-2.7b": [(50288, 2560), *([(10576, 2560), (2560, 5120)] * 64)],
}
BITS = [4.6 + share * (16 - 4.6) for share in (0.03, 0.1, 0.25, 0.5, 0.8)]


def random_table(
    name: str, formats: Sequence[str], generator: np.random.Generator
) -> SensitivityTable:
    """Damage falls by about four with each bit, and varies between components as it does in real models."""
    components = []
    measurements = []
    for i, shape in enumerate(SHAPES[name]):
        part = Component(
            f"c{i}", f"c{i}.weight", "in_proj", "ssm", i, shape, shape[0] * shape[1]
        )
        components.append(part)
        scale = generator.lognormal(-9, 2)
        for fmt in (f for f in formats if get_format(f).fits(shape) is None):
            bits = 8 * get_format(fmt).bytes((256, 256)) / 256**2
            kl = Estimate(
                float(scale * 4 ** (4 - bits) * generator.lognormal(0, 0.3)), 0.0
            )
            metrics = {"kl_teacher_to_student": kl}
            measurements.append(
                Measurement(part.name, fmt, metrics, 32768, 64, "float32", 0.0)
            )
    return SensitivityTable(
        name, "mamba", tuple(components), "c0", "c0", tuple(measurements)
    )


def questions(
    table: SensitivityTable, speed: SpeedModel
) -> Iterator[tuple[str, Callable[[], float]]]:
    """(question, a call that solves it and returns the gap)."""
    problem = build_problem(table)
    timed = build_problem(table, speed=speed)
    for bpw in BITS:
        yield "least KL, bytes", lambda bpw=bpw: plan_for_budget(problem, max_bpw=bpw).gap
    for kl in (1e-4, 1e-3, 1e-2, 1e-1):
        yield "least bytes, KL", lambda kl=kl: plan_for_budget(problem, max_kl=kl).gap
    pace = 1 / (0.75 * timed.reach("seconds")[1])
    for bpw in BITS[1:4]:
        yield (
            "least KL, bytes and speed",
            lambda bpw=bpw: plan_for_budget(timed, max_bpw=bpw, min_speed=pace).gap,
        )
    yield "frontier", lambda: 0.0 * len(frontier(problem))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--repeats", type=int, default=3, help="random tables per size (default: 3)"
    )
    arguments = parser.parse_args()
    for name, target in (
        (name, target) for name in SHAPES for target in ("gguf", "openvino")
    ):
        formats = get_target(target).formats
        times: dict[str, list[float]] = {}
        gaps: dict[str, float] = {}
        for seed in range(arguments.repeats):
            generator = np.random.default_rng(seed)
            rates = {fmt: 1e-10 * float(generator.lognormal(0, 0.15)) for fmt in formats}
            table = random_table(
                name, [fmt for fmt in formats if fmt != "fp16"], generator
            )
            for question, solve in questions(table, SpeedModel(0.0, rates, 1e-10)):
                begin = time.perf_counter()
                gaps[question] = max(gaps.get(question, 0.0), solve())
                times.setdefault(question, []).append(time.perf_counter() - begin)
        numbers = {}
        for question, seconds in times.items():
            numbers[question, "components × recipes"] = (
                f"{len(SHAPES[name])} × {len(formats)}"
            )
            numbers[question, "mean s"] = f"{statistics.mean(seconds):.3f}"
            numbers[question, "longest s"] = f"{max(seconds):.3f}"
            numbers[question, "gap"] = f"{gaps[question]:.1e}"
        print(
            f"{name}, {target}",
            *(f"{q}, {unit} {n}" for (q, unit), n in numbers.items()),
            sep="\n  ",
        )
        case = {"benchmark": "knapsack", "model": f"{name}, {target}", "threads": "1"}
        write_speed(arguments.write, case, numbers)


if __name__ == "__main__":
    main()
