"""Methods side by side, on files that their runtime judges, at equal bytes.

    python benchmarks/quantizers.py --out FILE.jsonl [--models …] [--targets openvino,gguf] [--parts …] [--jobs N]
    python benchmarks/quantizers.py --out FILE.jsonl --table

`methods`: every 4-bit grid of OpenVINO and every K-quant, the whole model on it (of a GGUF file the head in Q6_K, as
llama.cpp has it), by `rtn`, `search` or `imatrix`, `gptq`, and `ordered`. `nncf`: NNCF's own data-free, AWQ + scale
estimation and GPTQ on the same graph and text, embedding and head at 8 bits as it leaves them; ours with the same grids
beside it. `calibration`: what 3, 6 and 32 windows of WikiText-2 train, and C4 and novels (`--texts FOLDER`) leave of
the gain. `time`: seconds for one layer, ours and NNCF's, on the same inputs. `whole`: seconds for all components of the
mamba-130m shape, without the forward passes.

Methods learn from WikiText-2 train, files are judged on WikiText-2 test: KL from the original, mean over windows. Every
row is appended to the results as it is done; what is there is not done again. `reference:mamba+stressed` is a
reference with planted outliers; a folder of models stands for all models in it.
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
from kl_lens.calibration import gather, gather_in_order
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
from planning import STRESSED
from rivals import REFERENCES, Judged, Remembered, judge_files, models
from stress import stress

SHARED = Path(__file__).resolve().parents[2] / "shared"
PARTS = ("methods", "nncf", "calibration", "time", "whole")
GRIDS = {
    "openvino": (
        "int4", "int4-g128", "int4-g64", "int4-g32", "uint4-g128", "uint4-g64", "uint4-g32", "nf4-g64",
    ),
    "gguf": ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "iq4_nl", "iq4_xs"),
}  # fmt: skip
BASE = {"openvino": "rtn", "gguf": "imatrix"}  # what `gptq` is set beside
AIM = {"openvino": (0.75, 0.6), "gguf": (0.85, 0.75)}  # at most, and the median
METHODS = {"openvino": ("rtn", "search", "gptq", "ordered"), "gguf": ("rtn", "imatrix", "gptq", "ordered")}
BESIDE_NNCF = ("int4", "int4-g128", "int4-g64", "uint4-g128", "uint4-g64")
RESTRICTED = {"openvino": "int4-g64", "gguf": "q4_k"}
WIKITEXT, FULL = "wikitext2:train", 32
TIMED = ("int4-g64", "q4_k")
LENGTH = 512


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
    """What is the same for all tasks."""

    test_windows: int
    cache: Path
    texts: Path
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
    """All that are there; a line for those that are not."""
    present = []
    for name in models(names):
        if name.startswith("reference:") or Path(name, "config.json").is_file():
            present.append(name)
        else:
            print(f"{name} is not there and left out", flush=True)
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
    files = {"c4": judging.texts / "c4/c4_sample.txt", "novels": judging.texts / "gutenberg_sample.txt"}
    source = str(files.get(task.text, task.text))
    return draw_windows(source, model.require_tokenizer(), windows=task.windows, length=LENGTH, seed=43)


def learn(task: Task, model: LoadedModel, judging: Judging, assignment: dict[str, Recipe]) -> None:
    """Statistics are gathered once for all processes; those of a plan in order are its own."""
    slug = re.sub(r"\W+", "-", f"{task.model} {task.text} {task.windows}")
    folder, windows = judging.cache / "statistics" / slug, drawn(task, model, judging)
    with locked(folder):
        plain = gather(model, windows, folder)
    model.weights.learn_from(plain)
    if Recipe(task.grid, task.method).quantizer.of_a_plan:
        own = judging.cache / "in-order" / f"{slug}-{task.part}-{task.grid}"
        gather_in_order(model, windows, own, plain, assignment)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def perform(task: Task, judging: Judging) -> dict[str, Any]:
    torch.set_num_threads(judging.threads)
    row: dict[str, Any] = asdict(task) | {"test_windows": judging.test_windows}
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
    assignment = mixture(task, one.model, method)
    if Recipe(task.grid, method).quantizer.learns:
        learn(task, one.model, judging, assignment)
    plan = Plan("uniform", dict(assignment), "uniform")
    settings = SessionSettings(threads=judging.threads)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "file"
        size = target.export(one.model, plan, folder).realised_bytes
        if not ours:
            ids = drawn(task, one.model, judging).ids
            size = put_file(one.model, folder, task.grid, task.method, ids)
        return judge_files(target, folder, size, one.text, one.teacher, settings)


def mixture(task: Task, model: LoadedModel, method: str) -> dict[str, Recipe]:
    """Every component's recipe: the grid by this method, and what the part and the target want of the ends."""
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
    """Layers of published shapes do not depend on the model: once is enough."""
    return tuple(SHAPES) if name == REFERENCES[0] else ()


@lru_cache(maxsize=1)
def layer(name: str, windows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of this shape and inputs that go together as in a real model: for speed, never for quality."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = SHAPES[name]
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    inputs = torch.randn(windows * LENGTH, columns, generator=generator)
    inputs = (inputs + inputs @ mixing) * torch.exp(torch.randn(columns, generator=generator))
    return torch.randn(rows, columns, generator=generator) * 0.02, inputs


def timed(task: Task, judging: Judging) -> dict[str, Any]:
    """Seconds from the inputs to the stored layer, the better of two, and the error of its outputs beside `rtn`'s."""
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
    """Seconds for all components that the grid fits, with second moments of inputs that hang together."""
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


# -- tables ------------------------------------------------------------------------------------------------


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


def print_tables(rows: list[dict[str, Any]]) -> None:
    failed = [row for row in rows if row.get("error")]
    rows = [row for row in rows if not row.get("error")]
    for target in METHODS:
        print_methods(target, [r for r in rows if r["part"] == "methods" and r["target"] == target])
    print_nncf([r for r in rows if r["part"] == "nncf"])
    print_calibration([r for r in rows if r["part"] == "calibration"])
    print_times([r for r in rows if r["part"] == "time"])
    for row in rows:
        if row["part"] == "whole":
            print(
                f"\n{row['model']}, {row['components']} components in {row['grid']}+{row['method']}: "
                f"{row['seconds']:.0f} s, {row['threads']} threads"
            )
    for row in failed:
        print(f"failed: {row['part']}, {row['model']}, {row['grid']}, {row['method']}: {row['error']}")


def grouped(rows: list[dict[str, Any]], *names: str) -> dict[tuple[str, ...], dict[str, dict[str, Any]]]:
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), {})[row["method"]] = row
    return groups


def mean(row: dict[str, Any] | None) -> float:
    return float(np.mean(row["kl"])) if row else float("nan")


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    error = np.std(row["kl"], ddof=1) / len(row["kl"]) ** 0.5 if len(row["kl"]) > 1 else float("nan")
    return f"{mean(row):.4f} ± {error:.0e}"


def short(name: str) -> str:
    return Path(name).name if "/" in name else name


def heading(*names: str) -> None:
    print("\n| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")


def print_methods(target: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    methods, base, (most, middle) = METHODS[target], BASE[target], AIM[target]
    learnt = ("gptq", "ordered")
    heading("model", "grid", "MB", *(f"`{m}`" for m in methods), *(f"{m} / {base}" for m in learnt))
    ratios: dict[str, list[float]] = {method: [] for method in learnt}
    for (model, grid), of in grouped(rows, "model", "grid").items():
        size = next(iter(of.values()))["bytes"] / 1e6
        cells = [cell(of.get(m)) for m in methods]
        for method in learnt:
            ratio = mean(of.get(method)) / mean(of.get(base))
            cells.append("" if np.isnan(ratio) else f"{ratio:.2f}")
            ratios[method] += [] if np.isnan(ratio) else [ratio]
        print(f"| {short(model)} | {grid} | {size:.3f} | {' | '.join(cells)} |")
    for method, found in ratios.items():
        if found:
            met = sum(ratio <= most for ratio in found)
            print(
                f"\n{target}: {method} / {base}: median {statistics.median(found):.3f} (aim {middle}), "
                f"{min(found):.2f} to {max(found):.2f}; at most {most} (the aim) in {met} of {len(found)}."
            )


def print_nncf(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    methods = (*METHODS["openvino"], *NNCF_METHODS)
    heading("model", "grid", "MB", "NNCF's MB", *methods, "gptq / NNCF's best")
    ratios = []
    for (model, grid), of in grouped(rows, "model", "grid").items():
        theirs = {m: mean(of[m]) for m in NNCF_METHODS if m in of}
        ratio = mean(of.get("gptq")) / min(theirs.values(), default=float("nan"))
        ratios += [] if np.isnan(ratio) else [ratio]
        sizes = [
            max((of[m]["bytes"] for m in names if m in of), default=0)
            for names in (METHODS["openvino"], theirs)
        ]
        print(
            f"| {short(model)} | {grid} | {sizes[0] / 1e6:.3f} | {sizes[1] / 1e6:.3f} | "
            f"{' | '.join(cell(of.get(m)) for m in methods)} | {ratio:.2f} |"
        )
    if ratios:
        lower = sum(ratio < 1 for ratio in ratios)
        print(
            f"\nours below the best of NNCF's in {lower} of {len(ratios)}; median {statistics.median(ratios):.3f}."
        )


def print_calibration(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    plain = {(r["model"], r["target"], r["grid"]): r for r in rows if r["method"] == "rtn"}
    heading(
        "model", "grid", "learnt from", "windows", "`rtn`", "`search` / `imatrix`", "`gptq`", "gptq / rtn"
    )
    learnt = [r for r in rows if r["method"] != "rtn"]
    for (model, target, grid, text, windows), of in grouped(
        learnt, "model", "target", "grid", "text", "windows"
    ).items():
        rtn = plain.get((model, target, grid))
        cells = " | ".join(cell(of.get(m)) for m in METHODS[target][1:])
        ratio = mean(of.get("gptq")) / mean(rtn)
        print(f"| {short(model)} | {grid} | {text} | {windows} | {cell(rtn)} | {cells} | {ratio:.2f} |")


def print_times(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    heading("layer", "grid", "method", "seconds", "threads", "error of its outputs / rtn's")
    for row in rows:
        print(
            f"| {row['target']} | {row['grid']} | {row['method']} | {row['seconds']:.2f} | {row['threads']} | "
            f"{row['of_rtn']:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*REFERENCES, *(f"{name}+stressed" for name in REFERENCES), str(SHARED / "models")]

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
        "--texts", type=Path, default=SHARED / "data", help="where C4's and the novels' samples are"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--cache", type=Path, help="statistics and weights (default: beside the results)")
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON object a line; added to")
    parser.add_argument("--table", action="store_true", help="nothing but the tables of what is there")
    arguments = parser.parse_args()
    known = known_rows(arguments.out)
    if not arguments.table:
        wanted = [t for t in tasks(arguments) if known.get(t.key, {"error": "missing"}).get("error")]
        wanted = [task for task in wanted if has_text(task, arguments.texts)]
        run_all(wanted, arguments)
        known = known_rows(arguments.out)
    print(machine())
    print_tables(list(known.values()))


def has_text(task: Task, texts: Path) -> bool:
    return task.text == WIKITEXT or texts.is_dir()


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
