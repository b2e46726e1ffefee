"""What tuning on KL gains: the same file before and after, on text that chose nothing.

    python benchmarks/tune.py [--models reference:mamba,stressed:reference:mamba,FOLDER,…] [--device cuda]
                              [--grids int4-g64,q4_k,q3_k,q2_k] [--windows 2048] [--write docs/results/tune.csv]

Every linear layer gets the grid with error feedback, embedding and head 8 bits (Q6_K for GGUF types). Then the scales
are tuned on windows of WikiText-2 train that the statistics were not taken from. KL from the original is measured on
WikiText-2 test, weights only, before and after.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from common import ALL, machine, models, opened, shown
from kl_lens.judging.choosing import paired_difference
from kl_lens.measuring.joint import PlanMeter
from kl_lens.measuring.tuning import TuningRates, tuned
from kl_lens.study.calibrate import CalibrateSettings
from kl_lens.study.session import Session
from kl_lens.weights.formats import get_format
from kl_lens.weights.formats.gguf_blocks import GGUFFormat
from kl_lens.weights.recipes import Recipe, fitting_recipe, preferred
from result_files import Row, options, write

KEY = ("model", "grid", "rate", "windows", "epochs")


def compare(name: str, arguments: argparse.Namespace, folder: Path) -> Iterator[Row]:
    model = opened(name, arguments.device)
    session = Session(given=model)
    learnt = session.do(
        CalibrateSettings.of(model=name, run=str(folder))
    ).statistics.identity["text"]
    model = session.in_run(model, folder)
    windows = model.task.drawn(
        "wikitext2:train", windows=arguments.windows, length=512, seed=7
    )
    apart = [
        all(abs(start - begin) >= 512 for begin in learnt["starts"])
        for start in windows.starts
    ]
    ids = windows.ids[torch.tensor(apart)]
    test = model.task.from_start(
        "wikitext2:test", length=512, limit=arguments.test_windows
    )
    meter = PlanMeter(model, test)
    for grid in arguments.grids.split(","):
        ends = "q6_k" if isinstance(get_format(grid), GGUFFormat) else "int8"
        recipes: dict[str, Recipe] = {}
        for component in model.anatomy.candidates:
            outside = component.name in (model.anatomy.embedding, model.anatomy.head)
            wanted = preferred(ends if outside else grid, ("gptq",))
            recipes[component.name] = fitting_recipe(wanted, component.shape)[0]
        before = meter.measure(recipes)
        began = time.perf_counter()
        tensors = tuned(model, recipes, ids, TuningRates())
        seconds = time.perf_counter() - began
        after = {
            component: Recipe(recipe.grid.name, f"tuned-{grid}")
            if component in tensors
            else recipe
            for component, recipe in recipes.items()
        }
        for component, quantized in tensors.items():
            model.weights.keep_tuned(component, after[component], quantized)
        result = meter.measure(after)
        difference = paired_difference(result.windows, before.windows)
        yield {
            "model": shown(name),
            "grid": grid,
            "bits": str(get_format(grid).bits),
            "rate": f"{TuningRates.rate:g}",
            "windows": str(len(ids)),
            "epochs": str(TuningRates.epochs),
            "kl_before": f"{before.kl.value:.5f}",
            "kl_after": f"{result.kl.value:.5f}",
            "ratio": f"{result.kl.value / before.kl.value:.3f}",
            "difference_se": f"{difference.standard_error:.0e}",
            "seconds": f"{seconds:.0f}",
            "test_windows": str(len(test)),
        }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", default=ALL, help="names, or folders of models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--grids", default="int4-g64,q4_k,q3_k,q2_k")
    parser.add_argument(
        "--windows", type=int, default=2048, help="of 512 tokens to tune on"
    )
    parser.add_argument("--test-windows", type=int, default=32)
    arguments = parser.parse_args()
    print(machine())
    rows: list[Row] = []
    for name in models(arguments.models):
        with tempfile.TemporaryDirectory() as folder:
            for row in compare(name, arguments, Path(folder) / "run"):
                rows.append(row)
                print(
                    ", ".join(f"{key} {value}" for key, value in row.items()), flush=True
                )
                write(arguments.write, [row], KEY)
    for grid in dict.fromkeys(row["grid"] for row in rows):
        ratios = [float(row["ratio"]) for row in rows if row["grid"] == grid]
        print(
            f"{grid}: median ratio {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
