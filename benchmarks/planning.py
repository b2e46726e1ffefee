"""At the sizes of the paper's ten points: the paper's plan, our exact plan, and other orders.

    python benchmarks/planning.py [--models reference:mamba,stressed:reference:mamba,…] [--write docs/results/plans.csv]

Every plan is no larger than the paper's point. Plans are made from one sweep on WikiText-2 train and judged on
WikiText-2 test: KL from the original, perplexity.

(a) the paper's point; (b) exact: the least predicted KL within those bytes; (c) the plan that one gets by going down a
list sorted by SQNR, by MSE, or at random.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterable

from common import ALL, machine, opened
from kl_lens import planning
from kl_lens.measuring.joint import PlanMeter
from kl_lens.planning.points import paper_points
from kl_lens.run.records import SensitivityTable
from kl_lens.study.study import Study
from kl_lens.text.windows import evaluation_windows
from result_files import Row, options, write


def by_order(
    table: SensitivityTable, entries: Iterable[tuple[str, str]], limit: int
) -> dict[str, str] | None:
    """Goes down a list of (component, format) until the size is reached; a later entry replaces an earlier one."""
    assignment: dict[str, str] = {}
    for component, name in entries:
        if planning.cost_of(table.components, assignment).bytes <= limit:
            return assignment
        assignment[component] = name
    return (
        assignment
        if planning.cost_of(table.components, assignment).bytes <= limit
        else None
    )


def entries_by(
    table: SensitivityTable, metric: str, descending: bool
) -> list[tuple[str, str]]:
    ranked = sorted(
        table.measurements, key=lambda m: m.metrics[metric].value, reverse=descending
    )
    return [(m.component, m.format) for m in ranked]


def random_entries(table: SensitivityTable, seed: int) -> list[tuple[str, str]]:
    """INT8 for everything in random order, then INT4 in another: an order without knowledge."""
    names = [c.name for c in table.candidates]
    order = random.Random(seed)
    first = order.sample(names, len(names))
    second = order.sample(names, len(names))
    return [(n, "int8") for n in first] + [(n, "int4") for n in second]


def compare(name: str, arguments: argparse.Namespace) -> list[Row]:
    model = opened(name)
    with tempfile.TemporaryDirectory() as folder:
        table = Study(model, folder=folder).measure(windows=arguments.windows)
    tokenizer = model.require_tokenizer()
    judge = PlanMeter(
        model,
        evaluation_windows(
            "wikitext2:test", tokenizer, length=512, limit=arguments.test_windows
        ),
    )
    # The paper's points may give siblings (q, k, v; gate, up) different formats; so may ours here, to be comparable.
    points = [p for p in paper_points(table) if "point" in p.name]
    original = judge.measure({}).original_perplexity
    rows = []
    for point in points:
        limit = int(point.bytes or 0)
        exact = planning.plan_for_budget(
            planning.build_problem(table, keep_fused=False), max_bytes=limit
        ).plan
        plans = {
            "paper": dict(point.assignment),
            "exact": dict(exact.assignment),
            "sqnr order": by_order(table, entries_by(table, "sqnr_db", True), limit),
            "mse order": by_order(table, entries_by(table, "mse", False), limit),
            "random order": by_order(table, random_entries(table, 0), limit),
        }
        for method, assignment in plans.items():
            if assignment is None:
                continue
            result = judge.measure(assignment)
            rows.append(
                {
                    "model": name,
                    "point": point.name[-2:],
                    "mb": f"{limit / 1e6:.2f}",
                    "method": method,
                    "kl": f"{result.kl.value:.2e}",
                    "perplexity": f"{result.perplexity.value:.2f}",
                    "original_perplexity": f"{original:.2f}",
                    "windows": str(arguments.windows),
                    "test_windows": str(arguments.test_windows),
                }
            )
            print(", ".join(rows[-1].values()), flush=True)
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", default=ALL)
    parser.add_argument(
        "--windows", type=int, default=8, help="of 512 calibration tokens"
    )
    parser.add_argument("--test-windows", type=int, default=16)
    arguments = parser.parse_args()
    print(machine())
    for name in arguments.models.split(","):
        write(arguments.write, compare(name, arguments), ("model", "point", "method"))


if __name__ == "__main__":
    main()
