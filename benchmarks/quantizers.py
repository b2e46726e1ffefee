"""Quantization methods side by side, as files of equal size that their runtime judges.

    python benchmarks/quantizers.py --out FILE.jsonl [--models …] [--targets openvino,gguf] [--parts …] [--jobs N]
    python benchmarks/quantizers.py --out FILE.jsonl --write docs/results/quantizers.csv --only-write

`methods`: every small format of OpenVINO and every K-quant, the whole model in it (in a GGUF file the head in Q6_K, as
llama.cpp does), by `rtn`, `search` or `imatrix`, and `gptq`. `nncf`: NNCF's own data-free, AWQ + scale
estimation and GPTQ on the same graph and text, with embedding and head at 8 bits as NNCF leaves them; our methods with
the same formats beside them. `calibration`: how much of the gain remains with 3, 6 and 32 windows of WikiText-2 train,
and with C4 and novels (`--texts FOLDER`). `time`: seconds for one layer, ours and NNCF's, on the same inputs. `whole`:
seconds for all components of the mamba-130m shape, without the forward passes.

Methods learn from WikiText-2 train, files are judged on WikiText-2 test: KL from the original, mean over windows. Every
result is appended to FILE.jsonl as soon as it is there; results that are there are not made again.
`reference:mamba+stressed` is a reference model with planted outliers; a folder of models stands for all models in it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import machine, shape
from kl_lens.calibration import gather
from kl_lens.checkpoints import LoadedModel, load
from kl_lens.evaluation import prepare_text
from kl_lens.evaluation.texts import EvaluationText
from kl_lens.evaluation.torch_session import TorchSession
from kl_lens.quantizers import InputStatistics
from kl_lens.recipes import Recipe, fitting_recipe, preferred
from kl_lens.records import Plan
from kl_lens.targets import SessionSettings, get_target
from kl_lens.text import Windows, draw_windows
from nncf_methods import NNCF_METHODS, compressed, one_product, put_file
from result_files import Row, add_option, provenance, write
from rivals import REFERENCES, Judged, Remembered, judge_files, models
from stress import STRESSED, stress

PARTS = ("methods", "nncf", "calibration", "time", "whole")
GRIDS = {
    "openvino": (
        "int4", "int4-g128", "int4-g64", "int4-g32", "uint4-g128", "uint4-g64", "uint4-g32", "nf4-g64",
        "uint2-g64", "mxfp4",
    ),
    "gguf": (
        "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "iq4_nl", "iq4_xs",
        "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s",
    ),
}  # fmt: skip
BASE = {"openvino": "rtn", "gguf": "imatrix"}  # what `gptq` is compared with
METHODS = {"openvino": ("rtn", "search", "gptq"), "gguf": ("rtn", "imatrix", "gptq")}
BESIDE_NNCF = ("int4", "int4-g128", "int4-g64", "uint4-g128", "uint4-g64")
RESTRICTED = {"openvino": "int4-g64", "gguf": "q4_k"}
WIKITEXT, FULL = "wikitext2:train", 32
TIMED = ("int4-g64", "q4_k")
LENGTH = 512
Case = tuple[str, str, str, str, str, str, int]


@dataclass(frozen=True)
class Task:
    """One file, or one layer, to be made and judged."""

    part: str
    model: str
    target: str
    grid: str
    method: str
    text: str = WIKITEXT
    windows: int = FULL

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Judging:
    """Settings that all tasks share."""

    test_windows: int
    cache: Path
    texts: Path | None
    threads: int


@dataclass(frozen=True)
class Opened:
    model: LoadedModel
    text: EvaluationText
    teacher: Remembered


def tasks(arguments: argparse.Namespace) -> Iterator[Task]:
    for name in found_models(arguments.models):
        for part in arguments.parts:
            for target in arguments.targets:
                for task in part_tasks(part, name, target, arguments):
                    if task.grid in (arguments.grids or (task.grid,)) and task.method in (
                        arguments.methods or (task.method,)
                    ):
                        yield task


def part_tasks(part: str, name: str, target: str, arguments: argparse.Namespace) -> Iterator[Task]:
    windows, methods = arguments.windows, METHODS[target]
    if part == "methods":
        for grid in GRIDS[target]:
            yield from (Task(part, name, target, grid, method, windows=windows) for method in methods)
    elif part == "nncf" and target == "openvino":
        for grid in BESIDE_NNCF:
            for method in (*methods, *NNCF_METHODS):
                yield Task(part, name, target, grid, method, windows=windows)
    elif part == "calibration":
        grid = RESTRICTED[target]
        yield Task(part, name, target, grid, "rtn", windows=windows)
        for text, count in [
            (WIKITEXT, 3),
            (WIKITEXT, 6),
            (WIKITEXT, windows),
            ("c4", windows),
            ("novels", windows),
        ]:
            yield from (Task(part, name, target, grid, method, text, count) for method in methods[1:3])
    elif part == "time" and target == "openvino":
        for layer in timed_layers(name):
            for grid in TIMED:
                ours = ("rtn", "search", "gptq") if grid in GRIDS["openvino"] else ("rtn", "imatrix", "gptq")
                yield from (Task(part, name, layer, grid, method, windows=windows) for method in ours)
                if grid in GRIDS["openvino"]:
                    yield from (Task(part, name, layer, grid, m, windows=windows) for m in NNCF_METHODS)
    elif part == "whole" and target == "openvino" and name == REFERENCES[0]:
        yield from (Task(part, "mamba-130m", target, grid, "gptq", windows=windows) for grid in TIMED)


def found_models(names: str) -> list[str]:
    """The models that exist; a line for each that does not."""
    present = []
    for name in models(names):
        if name.startswith("reference:") or Path(name, "config.json").is_file():
            present.append(name)
        else:
            print(f"{name} does not exist and is left out", flush=True)
    return present


# -- one task ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def opened(name: str, judging: Judging) -> Opened:
    base, _, variant = name.partition("+")
    model = load(base)
    if variant == "stressed":
        for pattern, factor in STRESSED[base]:
            stress(model, pattern, factor=factor)
    model.weights.keep_in(judging.cache / "weights")
    text = prepare_text(
        "wikitext2:test", model.require_tokenizer(), window=LENGTH, limit=judging.test_windows
    )
    return Opened(model, text, Remembered(TorchSession(model)))


def drawn(task: Task, model: LoadedModel, judging: Judging) -> Windows:
    files = {"c4": "c4/c4_sample.txt", "novels": "gutenberg_sample.txt"}
    source = str(judging.texts / files[task.text]) if judging.texts and task.text in files else task.text
    return draw_windows(source, model.require_tokenizer(), windows=task.windows, length=LENGTH, seed=43)


def learn(task: Task, model: LoadedModel, judging: Judging) -> None:
    """Gathers statistics once for all processes."""
    slug = re.sub(r"\W+", "-", f"{task.model} {task.text} {task.windows}")
    folder, windows = judging.cache / "statistics" / slug, drawn(task, model, judging)
    with locked(folder):
        model.weights.learn_from(gather(model, windows, folder))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def perform(task: Task, judging: Judging) -> dict[str, Any]:
    torch.set_num_threads(judging.threads)
    row: dict[str, Any] = asdict(task) | {"test_windows": judging.test_windows} | provenance()
    began = time.perf_counter()
    try:
        if task.part in ("time", "whole"):
            row |= (timed if task.part == "time" else timed_whole)(task, judging)
        else:
            found = judged(task, judging)
            row |= {"bytes": found.bytes, "kl": found.kl.tolist(), "perplexity": found.perplexity}
    except Exception as error:  # one file that fails must not stop the others
        row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
    return row | {"seconds": row.get("seconds", time.perf_counter() - began)}


def judged(task: Task, judging: Judging) -> Judged:
    one, target = opened(task.model, judging), get_target(task.target)
    ours = task.method not in NNCF_METHODS
    method = task.method if ours else "rtn"
    assignment = assignment_of(task, one.model, method)
    if Recipe(task.grid, method).quantizer.learns:
        learn(task, one.model, judging)
    plan = Plan("uniform", dict(assignment), "uniform")
    settings = SessionSettings(threads=judging.threads)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "file"
        size = target.export(one.model, plan, folder).realised_bytes
        if not ours:
            ids = drawn(task, one.model, judging).ids
            size = put_file(one.model, folder, task.grid, task.method, ids)
        return judge_files(target, folder, size, one.text, one.teacher, settings)


def assignment_of(task: Task, model: LoadedModel, method: str) -> dict[str, Recipe]:
    """Every component's recipe: this grid and method, but what the part and the target store embedding and head in."""
    anatomy = model.anatomy
    ends = {"nncf": {anatomy.embedding: "int8", anatomy.head: "int8"}}.get(task.part, {})
    if task.target == "gguf":
        ends = {anatomy.head: "q6_k"}
    recipes = {}
    for component in anatomy.candidates:
        grid = ends.get(component.name, task.grid)
        wanted = Recipe("int8") if grid == "int8" else preferred(grid, (method,))
        recipes[component.name] = fitting_recipe(wanted, component.shape)[0]
    return recipes


# -- time --------------------------------------------------------------------------------------------------

SHAPES = {"in_proj of mamba-130m": (3072, 768), "out_proj of mamba-130m": (768, 1536)}


def timed_layers(name: str) -> tuple[str, ...]:
    """Layers of published shapes are the same for all models: timed once."""
    return tuple(SHAPES) if name == REFERENCES[0] else ()


@lru_cache(maxsize=1)
def layer(name: str, windows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of this shape and correlated inputs as in a real model: for speed, never for quality."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = SHAPES[name]
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(windows * LENGTH, columns, generator=generator)
    inputs = (inputs + inputs @ mixing) * torch.exp(torch.randn(columns, generator=generator))
    return torch.randn(rows, columns, generator=generator) * 0.02, inputs


def timed(task: Task, judging: Judging) -> dict[str, Any]:
    """Seconds from inputs to the stored layer, the better of two, and its output error over that of `rtn`."""
    weight, inputs = layer(task.target, task.windows)
    moments = inputs.T @ inputs / len(inputs)
    seconds, values = [], weight
    for _ in range(2):
        began = time.perf_counter()
        if task.method in NNCF_METHODS:
            values = through_nncf(task, weight, inputs)
        else:
            recipe = Recipe.parse(f"{task.grid}+{task.method}")
            found = InputStatistics(inputs.T @ inputs / len(inputs), (len(inputs),))
            known = found if recipe.quantizer.learns else None
            values = recipe.grid.dequantize(recipe.quantizer.quantize(weight, recipe.grid, "layer", known))
        seconds.append(time.perf_counter() - began)
    plain = weight - Recipe.parse(task.grid).grid.roundtrip(weight)
    error = [float(((e @ moments) * e).sum()) for e in (weight - values, plain)]
    return {"seconds": min(seconds), "error": None, "of_rtn": error[0] / error[1], "threads": judging.threads}


def timed_whole(task: Task, judging: Judging) -> dict[str, Any]:
    """Seconds for all components that the grid fits, with second moments of correlated inputs."""
    model, recipe = shape(task.model), Recipe.parse(f"{task.grid}+{task.method}")
    fitting = [c for c in model.anatomy.candidates if recipe.grid.fits(c.shape) is None]
    moments = {}
    for width in {c.shape[-1] for c in fitting}:
        inputs = torch.randn(4 * width, width) @ torch.randn(width, width)
        moments[width] = InputStatistics(inputs.T @ inputs / len(inputs), (len(inputs),))

    def quantize(component: Any) -> None:
        weight = model.model.get_parameter(component.weight).detach()
        recipe.quantizer.quantize(weight, recipe.grid, component.name, moments[component.shape[-1]])

    quantize(fitting[1])  # compiles
    began = time.perf_counter()
    for component in fitting:
        quantize(component)
    return {
        "seconds": time.perf_counter() - began,
        "error": None,
        "components": len(fitting),
        "threads": judging.threads,
    }


def through_nncf(task: Task, weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    from kl_lens.targets.openvino.session import core

    with tempfile.TemporaryDirectory() as place:
        file = one_product(weight.numpy(), Path(place))
        samples = [part[None].numpy() for part in inputs.split(LENGTH)]
        graph = compressed(file, task.grid, task.method, samples, all_layers=True)
        compiled = core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        identity = np.eye(weight.shape[1], dtype=np.float32)[None]
        return torch.from_numpy(
            np.array(compiled(identity)[0][0])
        ).T  # what it multiplies with, column by column


# -- results -----------------------------------------------------------------------------------------------


def known_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Task → row of what is done; a line that was cut off and rows that failed do not count."""
    rows = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        task = Task(**{name: row[name] for name in Task.__dataclass_fields__})
        rows[task.key] = row
    return rows


def as_csv(results: list[dict[str, Any]]) -> list[Row]:
    """Rows of quantizers.csv; `ratio` is the KL over that of the method in `ratio_to`."""
    files = {case_of(result): result for result in results if "kl" in result}
    rows = []
    for case, result in files.items():
        part, target, model, grid, method, _, _ = case
        beside = base_of(case, files)
        name = short(model)
        error = np.std(result["kl"], ddof=1) / len(result["kl"]) ** 0.5 if len(result["kl"]) > 1 else np.nan
        row = {
            "part": part,
            "target": target,
            "model": f"stressed:{name.removesuffix('+stressed')}" if name.endswith("+stressed") else name,
            "grid": grid,
            "method": method,
            "text": result["text"],
            "windows": str(result["windows"]),
            "mb": f"{result['bytes'] / 1e6:.3f}",
            "kl": f"{np.mean(result['kl']):.4f}",
            "kl_se": f"{error:.0e}",
            "ratio": f"{np.mean(result['kl']) / np.mean(files[beside]['kl']):.2f}" if beside else "",
            "ratio_to": ("NNCF's best" if part == "nncf" else beside[4]) if beside else "",
            "test_windows": str(result["test_windows"]),
            "note": "",
            **{name: result[name] for name in provenance()},
        }
        rows.append(row)
    return rows


def case_of(result: dict[str, Any]) -> Case:
    return tuple(result[name] for name in ("part", "target", "model", "grid", "method", "text", "windows"))


def base_of(case: Case, files: dict[Case, dict[str, Any]]) -> Case | None:
    """The file that a file of `gptq` is compared with."""
    part, target, model, grid, method, _, _ = case
    if method != "gptq":
        return None
    same = [other for other in files if other[:4] == (part, target, model, grid)]
    wanted = {"rtn"} if part == "calibration" else {BASE[target]}
    if part == "nncf":
        wanted = set(NNCF_METHODS)
    return min(
        (c for c in same if c[4] in wanted), key=lambda c: float(np.mean(files[c]["kl"])), default=None
    )


def print_summary(results: list[dict[str, Any]], rows: list[Row]) -> None:
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if row["ratio"]:
            case = tuple(row[name] for name in ("part", "target", "method", "ratio_to"))
            groups.setdefault(case, []).append(float(row["ratio"]))
    for (part, target, method, beside), found in groups.items():
        print(
            f"{part}, {target}: KL of {method} over that of {beside}: median {statistics.median(found):.2f}, "
            f"{min(found):.2f} to {max(found):.2f}, {len(found)} files"
        )
    for result in results:
        what = f"{result['part']}, {short(result['model'])}, {result['target']}, {result['grid']}, {result['method']}"
        if result.get("error"):
            print(f"failed: {what}: {result['error']}")
        elif result["part"] in ("time", "whole"):
            of_rtn = f", output error {result['of_rtn']:.3f} of rtn's" if "of_rtn" in result else ""
            print(f"{what}: {result['seconds']:.2f} s on {result['threads']} threads{of_rtn}")


def short(name: str) -> str:
    return Path(name).name if "/" in name else name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*REFERENCES, *(f"{name}+stressed" for name in REFERENCES)]

    def names(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--models", default=",".join(every), help="names, or folders of models")
    parser.add_argument("--targets", "--target", type=names, default=list(GRIDS), help="openvino, gguf")
    parser.add_argument("--parts", "--part", type=names, default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--grids", type=names, help="these alone")
    parser.add_argument("--methods", type=names, help="these alone")
    parser.add_argument("--windows", type=int, default=FULL, help="of 512 tokens that methods learn from")
    parser.add_argument("--test-windows", type=int, default=16)
    parser.add_argument(
        "--texts",
        type=Path,
        help="folder with c4/c4_sample.txt and gutenberg_sample.txt; without it neither is used",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--cache", type=Path, help="statistics and weights (default: beside the results)")
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON object a line; added to")
    parser.add_argument("--only-write", action="store_true", help="make no files; only write what is there")
    add_option(parser)
    arguments = parser.parse_args()
    known = known_rows(arguments.out)
    if not arguments.only_write:
        wanted = [t for t in tasks(arguments) if known.get(t.key, {"error": "missing"}).get("error")]
        wanted = [task for task in wanted if has_text(task, arguments.texts)]
        run_all(wanted, arguments)
        known = known_rows(arguments.out)
    print(machine())
    rows = as_csv(list(known.values()))
    write(arguments.write, rows, ("part", "target", "model", "grid", "method", "text", "windows"))
    print_summary(list(known.values()), rows)


def has_text(task: Task, texts: Path | None) -> bool:
    return task.text == WIKITEXT or texts is not None


def run_all(wanted: list[Task], arguments: argparse.Namespace) -> None:
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
    cache = arguments.cache or arguments.out.with_suffix(".cache")
    judging = Judging(arguments.test_windows, cache, arguments.texts, threads)
    # Every process for itself: a fork of a process that has run numba or OpenVINO hangs.
    context = multiprocessing.get_context("spawn")
    os.environ |= {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    with (
        arguments.out.open("a", encoding="utf-8") as out,
        ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool,
    ):
        running = [pool.submit(perform, task, judging) for task in wanted]
        for done, future in enumerate(as_completed(running), 1):
            row = future.result()
            out.write(json.dumps(row) + "\n")
            out.flush()
            found = row.get("error") or (f"KL {np.mean(row['kl']):.5f}" if "kl" in row else "")
            print(
                f"{done}/{len(running)} {row['part']} {short(row['model'])} {row['grid']} {row['method']} "
                f"{row['text']} {row['windows']}: {found} ({row['seconds']:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
