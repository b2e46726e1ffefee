"""At the byte sizes of the paper's ten points: the paper's plan, our exact plan, and other orders.

    python benchmarks/planning.py [--models reference:mamba,…] [--stressed] [--out FILE.json]

Every plan at a size takes no more bytes than the paper's point there. Plans are made from one sweep on WikiText-2
train and judged on WikiText-2 test: KL from the original, perplexity.

(a) the paper's point; (b) exact: least predicted KL within those bytes; (c) plans of that size by going down lists
sorted by SQNR, by MSE, and at random; (d) NNCF's own choice, `compress_weights` with `ratio` by its data-free criterion
(weight quantization error) and by an activation-based one (mean activation variance), at the least INT4 ratio within
the bytes; NNCF mixes INT4 and INT8 only, so it has no plan above uniform INT8.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterable
from pathlib import Path

from common import machine
from kl_lens import paper, planning
from kl_lens.checkpoints import LoadedModel, load
from kl_lens.pipeline import Study
from kl_lens.records import SensitivityTable
from kl_lens.sensitivity.joint import PlanMeter
from kl_lens.text import evaluation_windows
from nncf_choice import nncf_plans
from stress import STRESSED, plant

METHODS = (
    "paper",
    "exact",
    "sqnr order",
    "mse order",
    "random order",
    "nncf data-free",
    "nncf activations",
)


def by_order(
    table: SensitivityTable, entries: Iterable[tuple[str, str]], limit: int
) -> dict[str, str] | None:
    """Goes down a list of (component, format), each entry overruling the one before, until the size is reached."""
    assignment: dict[str, str] = {}
    for component, name in entries:
        if planning.cost_of(table.components, assignment).bytes <= limit:
            return assignment
        assignment[component] = name
    return assignment if planning.cost_of(table.components, assignment).bytes <= limit else None


def entries_by(table: SensitivityTable, metric: str, descending: bool) -> list[tuple[str, str]]:
    ranked = sorted(table.measurements, key=lambda m: m.metrics[metric].value, reverse=descending)
    return [(m.component, m.format) for m in ranked]


def random_entries(table: SensitivityTable, seed: int) -> list[tuple[str, str]]:
    """INT8 for everything in random order, then INT4 in another: an order without knowledge."""
    names = [c.name for c in table.candidates]
    order = random.Random(seed)
    first, second = order.sample(names, len(names)), order.sample(names, len(names))
    return [(n, "int8") for n in first] + [(n, "int4") for n in second]


def compare(model: LoadedModel, label: str, arguments: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        table = Study(model, folder=folder).measure(windows=arguments.windows)
    tokenizer = model.require_tokenizer()
    judge = PlanMeter(
        model, evaluation_windows("wikitext2:test", tokenizer, length=512, limit=arguments.test_windows)
    )
    # The paper's points may give siblings (q, k, v; gate, up) different formats; so may ours here, to be comparable.
    points = [p for p in paper.paper_points(table) if "point" in p.name]
    sizes = [int(p.bytes or 0) for p in points]
    nncf = {"data-free": {}, "activations": {}} if arguments.without_nncf else nncf_plans(model, table, sizes)
    rows = []
    for point in points:
        limit = int(point.bytes or 0)
        exact = planning.plan_for_budget(table, max_bytes=limit, keep_fused=False).plan
        plans = {
            "paper": dict(point.assignment),
            "exact": dict(exact.assignment),
            "sqnr order": by_order(table, entries_by(table, "sqnr_db", True), limit),
            "mse order": by_order(table, entries_by(table, "mse", False), limit),
            "random order": by_order(table, random_entries(table, 0), limit),
            "nncf data-free": nncf["data-free"].get(limit),
            "nncf activations": nncf["activations"].get(limit),
        }
        row: dict[str, object] = {"point": point.name, "bytes": limit}
        for method, assignment in plans.items():
            if assignment is None:
                continue
            result = judge.measure(assignment)
            row[method] = {
                "bytes": planning.cost_of(table.components, assignment).bytes,
                "kl": result.kl.value,
                "kl_se": result.kl.standard_error,
                "perplexity": result.perplexity.value,
            }
        rows.append(row)
        cells = "  ".join(f"{m} {row[m]['kl']:.3e}" for m in METHODS if m in row)  # type: ignore[index]
        print(f"{label} {point.name} {limit / 1e6:.2f} MB  {cells}", flush=True)
    original = judge.measure({}).original_perplexity
    return {"model": label, "perplexity": original, "rows": rows, "settings": vars(arguments)}


def table_of(result: dict[str, object]) -> str:
    lines = [
        f"{result['model']} (original's test perplexity {result['perplexity']:.3f}): KL, and perplexity behind it"
    ]
    lines.append("| point | MB | " + " | ".join(METHODS) + " |")
    lines.append("|" + "---|" * (len(METHODS) + 2))
    for row in result["rows"]:  # type: ignore[attr-defined]
        cells = [f"{row[m]['kl']:.2e} {row[m]['perplexity']:.3f}" if m in row else "–" for m in METHODS]
        lines.append(f"| {row['point']} | {row['bytes'] / 1e6:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(STRESSED))
    parser.add_argument("--stressed", action="store_true", help="also the stressed variants")
    parser.add_argument("--windows", type=int, default=8, help="of 512 calibration tokens")
    parser.add_argument("--test-windows", type=int, default=16)
    parser.add_argument("--only-stressed", action="store_true", help="the stressed variants alone")
    parser.add_argument("--without-nncf", action="store_true")
    parser.add_argument("--out", type=Path, help="the numbers as JSON")
    arguments = parser.parse_args()
    print(machine())
    results = []
    variants = (True,) if arguments.only_stressed else (False, True) if arguments.stressed else (False,)
    for stressed in variants:
        for name in arguments.models.split(","):
            model = load(name)
            if stressed:
                plant(model, name)
            results.append(compare(model, f"{name}{' stressed' if stressed else ''}", arguments))
            print(table_of(results[-1]), flush=True)
            if arguments.out:
                with tempfile.NamedTemporaryFile("w", dir=arguments.out.parent, delete=False) as file:
                    json.dump(results, file, indent=1, default=str)
                Path(file.name).replace(arguments.out)


if __name__ == "__main__":
    main()
