"""Quantization methods side by side, as files of equal size that their runtime judges.

    python benchmarks/quantizers.py [--models reference:mamba,stressed:reference:mamba,FOLDER,…] [--targets gguf]
                                    [--parts methods,nncf,calibration] [--write docs/results/quantizers.csv]

`methods`: every small format of OpenVINO and every K-quant, the whole model in it (in a GGUF file the head in Q6_K, as
llama.cpp does), by `rtn`, `search` or `imatrix`, and `gptq`. `nncf`: NNCF's own data-free, AWQ + scale estimation and
GPTQ on the same graph and text, with embedding and head at 8 bits as NNCF leaves them; our methods with the same
formats beside them. `calibration`: how much of the gain remains with 3, 6 and 32 windows of WikiText-2 train, and with
the texts of `--texts`.

Methods learn from WikiText-2 train, files are judged on WikiText-2 test: KL from the original, mean over windows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import ALL, machine, models, opened, shown
from kl_lens.judging import prepare
from kl_lens.judging.torch_session import TorchSession
from kl_lens.measuring.statistics import gather
from kl_lens.model import LanguageTask, LoadedModel
from kl_lens.run.records import Plan
from kl_lens.targets import get_target
from kl_lens.text.windows import Windows, draw_windows
from kl_lens.weights.recipes import Recipe, fitting_recipe, preferred
from nncf_methods import NNCF_METHODS, put_file
from result_files import Row, options, write
from rivals import Judged, Remembered, judge

GRIDS = {
    "openvino": (
        "int4",
        "int4-g128",
        "int4-g64",
        "int4-g32",
        "uint4-g128",
        "uint4-g64",
        "uint4-g32",
        "nf4-g64",
        "uint2-g64",
        "mxfp4",
    ),
    "gguf": (
        "q2_k",
        "q3_k",
        "q4_k",
        "q5_k",
        "q6_k",
        "q4_0",
        "iq4_nl",
        "iq4_xs",
        "iq2_xxs",
        "iq2_xs",
        "iq2_s",
        "iq3_xxs",
        "iq3_s",
    ),
}
METHODS = {"openvino": ("rtn", "search", "gptq"), "gguf": ("rtn", "imatrix", "gptq")}
BASE = {"openvino": "rtn", "gguf": "imatrix"}  # what `gptq` is compared with
BESIDE_NNCF = ("int4", "int4-g128", "int4-g64", "uint4-g128", "uint4-g64")
CALIBRATED = {"openvino": "int4-g64", "gguf": "q4_k"}
WIKITEXT = "wikitext2:train"
KEY = ("part", "target", "model", "grid", "method", "text", "windows")


@dataclass(frozen=True)
class Task:
    """One file to be made and judged."""

    part: str
    target: str
    grid: str
    method: str
    text: str
    windows: int


def tasks(target: str, arguments: argparse.Namespace) -> Iterator[Task]:
    windows = arguments.windows
    methods = METHODS[target]
    if "methods" in arguments.parts:
        for grid in GRIDS[target]:
            yield from (
                Task("methods", target, grid, m, WIKITEXT, windows) for m in methods
            )
    if "nncf" in arguments.parts and target == "openvino":
        for grid in BESIDE_NNCF:
            yield from (
                Task("nncf", target, grid, m, WIKITEXT, windows)
                for m in (*methods, *NNCF_METHODS)
            )
    if "calibration" in arguments.parts:
        texts = [
            (WIKITEXT, 3),
            (WIKITEXT, 6),
            (WIKITEXT, windows),
            *((text, windows) for text in arguments.texts),
        ]
        yield Task("calibration", target, CALIBRATED[target], "rtn", WIKITEXT, windows)
        for text, count in texts:
            yield from (
                Task("calibration", target, CALIBRATED[target], m, text, count)
                for m in methods[1:]
            )


class Judge:
    """One model: makes files of it and lets their runtime judge them."""

    def __init__(self, name: str, test_windows: int, folder: Path) -> None:
        self.model = opened(name).with_store(folder=folder / "weights")
        self.folder = folder
        tokenizer = self.model.require_tokenizer()
        self.text = prepare(
            "wikitext2:test", LanguageTask(tokenizer), window=512, limit=test_windows
        )
        self.teacher = Remembered(TorchSession(self.model))

    def drawn(self, task: Task) -> Windows:
        tokenizer = self.model.require_tokenizer()
        return draw_windows(
            task.text, tokenizer, windows=task.windows, length=512, seed=43
        )

    def judged(self, task: Task) -> Judged:
        target = get_target(task.target)
        from_store = task.method not in NNCF_METHODS
        if from_store and Recipe(task.grid, task.method).quantizer.learns:
            temporary = (
                self.folder / f"{Path(task.text).name.replace(':', '-')}-{task.windows}"
            )
            self.model.weights.learn_from(gather(self.model, self.drawn(task), temporary))
        plan = Plan(
            "uniform",
            assignment(task, self.model, task.method if from_store else "rtn"),
            "uniform",
        )
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "file"
            size = target.export(self.model, plan, folder).realised_bytes
            if not from_store:
                size = put_file(
                    self.model, folder, task.grid, task.method, self.drawn(task).ids
                )
            return judge(target, folder, size, self.text, self.teacher)


def assignment(task: Task, model: LoadedModel, method: str) -> dict[str, str]:
    """This grid and method, but for what the part and the target store embedding and head in."""
    anatomy = model.anatomy
    ends = (
        dict.fromkeys((anatomy.embedding, anatomy.head), "int8")
        if task.part == "nncf"
        else {}
    )
    if task.target == "gguf":
        ends = {anatomy.head: "q6_k"}
    recipes: dict[str, str] = {}
    for component in anatomy.candidates:
        grid = ends.get(component.name, task.grid)
        wanted = Recipe("int8") if grid == "int8" else preferred(grid, (method,))
        recipes[component.name] = fitting_recipe(wanted, component.shape)[0]
    return recipes


def rows(name: str, files: dict[Task, Judged], test_windows: int) -> Iterator[Row]:
    """`ratio` is the KL over that of the method in `ratio_to`."""
    for task, judgement in files.items():
        wanted = {"rtn"} if task.part == "calibration" else {BASE[task.target]}
        wanted = set(NNCF_METHODS) if task.part == "nncf" else wanted
        alike = [
            t
            for t in files
            if (t.part, t.target, t.grid) == (task.part, task.target, task.grid)
        ]
        rivals = [t for t in alike if t.method in wanted] if task.method == "gptq" else []
        beside = min(rivals, key=lambda rival: files[rival].mean, default=None)
        yield {
            "part": task.part,
            "target": task.target,
            "model": shown(name),
            "grid": task.grid,
            "method": task.method,
            "text": task.text,
            "windows": str(task.windows),
            "mb": f"{judgement.bytes / 1e6:.3f}",
            "kl": f"{judgement.mean:.4f}",
            "kl_se": f"{judgement.error:.0e}",
            "ratio": f"{judgement.mean / files[beside].mean:.2f}" if beside else "",
            "ratio_to": ("NNCF's best" if task.part == "nncf" else beside.method)
            if beside
            else "",
            "test_windows": str(test_windows),
            "note": "",
        }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", default=ALL, help="names, or folders of models")
    parser.add_argument("--targets", default=",".join(GRIDS))
    parser.add_argument("--parts", default="methods,nncf,calibration")
    parser.add_argument(
        "--windows", type=int, default=32, help="of 512 tokens that methods learn from"
    )
    parser.add_argument("--test-windows", type=int, default=8)
    parser.add_argument(
        "--texts", nargs="*", default=[], help="calibrate on these files too"
    )
    arguments = parser.parse_args()
    print(machine())
    for name in models(arguments.models):
        with tempfile.TemporaryDirectory() as folder:
            judge = Judge(name, arguments.test_windows, Path(folder))
            files = dict[Task, Judged]()
            for task in (
                task
                for target in arguments.targets.split(",")
                for task in tasks(target, arguments)
            ):
                files[task] = judge.judged(task)
                print(
                    shown(name),
                    *vars(task).values(),
                    f"KL {files[task].mean:.5f}",
                    flush=True,
                )
        table = list(rows(name, files, arguments.test_windows))
        write(arguments.write, table, KEY)
        ratios = [float(row["ratio"]) for row in table if row["ratio"]]
        print(
            f"{shown(name)}: KL of gptq over that of the others: median {np.median(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
