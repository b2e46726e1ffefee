"""Does the loss of a plan grow along the text? KL by position in windows of 8,192 tokens.

    python benchmarks/positions.py [--models reference:mamba,…] [--window 8192] [--windows 4]
                                   [--write docs/results/positions.csv]

For each model: our exact plans at 4.5 and 6.5 bits per weight (K-quants, measured on a little text), everything in
INT4, and each family of components alone in INT4. All in PyTorch, weights only, on WikiText-2 test.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from common import REFERENCES, machine
from kl_lens import planning
from kl_lens.run.folder import Run
from kl_lens.run.positions import curve_of
from kl_lens.run.records import Plan, SensitivityTable
from kl_lens.study.study import Study
from result_files import Row, options, write

FORMATS = ("q3_k", "q4_k", "q5_k", "q6_k", "q8_0")
BITS = (4.5, 6.5)


def plans(table: SensitivityTable) -> list[Plan]:
    """Everything in INT4, and each family alone."""
    families = dict.fromkeys(c.family for c in table.candidates)
    parts = {"int4": [c.name for c in table.candidates]}
    if len(families) > 2:  # besides the embedding
        parts |= {
            f"int4.{f}": [c.name for c in table.candidates if c.family == f]
            for f in families
        }
    return [
        Plan(name, dict.fromkeys(names, "int4"), "positions.py")
        for name, names in parts.items()
    ]


def rows(name: str, window: int, windows: int, folder: str) -> list[Row]:
    study = Study(name, folder=folder)
    study.measure(formats=FORMATS, windows=2, workers=1)
    for bits in BITS:
        study.plan(max_bpw=bits, name=f"exact-{bits}")
    with Run.open(Path(folder)) as run:
        table = run.table()
    for plan in plans(table):
        planning.write_plan(
            plan, planning.plan_path(Path(folder) / "plans", plan.name), table.components
        )
    table = []
    for score in study.evaluate(
        target="torch", positions="wikitext2:test", window_length=window, windows=windows
    ):
        plan = score.subject.plan
        kind = "kl" if plan else "cross_entropy"
        curve = curve_of(score, kind)
        assert curve is not None
        bits = 16.0
        if plan:
            stored = planning.read_plan(
                planning.plan_path(Path(folder) / "plans", plan), table.components
            )
            bits = planning.cost_of(table.components, stored.assignment).bits_per_weight
        for start, mean in zip(curve.starts, curve.means, strict=True):
            table.append(
                {
                    "model": name,
                    "plan": plan or "original",
                    "quantity": kind,
                    "bits_per_weight": f"{bits:.2f}",
                    "windows": str(curve.windows),
                    "window": str(window),
                    "from": str(start),
                    "mean": f"{mean.value:.5g}",
                    "error": f"{mean.standard_error:.2g}",
                    "slope": f"{curve.slope.value:.3g}",
                    "slope_error": f"{curve.slope.standard_error:.2g}",
                    "trend": curve.trend,
                }
            )
        print(name, plan or "original", kind, f"{bits:.2f}", curve.slope, curve.trend)
    return table


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", default=REFERENCES)
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--windows", type=int, default=4)
    arguments = parser.parse_args()
    print(machine())
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            write(
                arguments.write,
                rows(name, arguments.window, arguments.windows, folder),
                ("model", "plan", "quantity", "window", "from"),
            )


if __name__ == "__main__":
    main()
