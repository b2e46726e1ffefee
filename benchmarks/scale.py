"""Several processes: how much faster they are, and how good estimates are.

    python benchmarks/scale.py workers [mamba-130m] [--windows 16] [--workers 1,2,4,8,16] [--ray]
                                                        workers beside one process with all threads
    python benchmarks/scale.py estimates [--models reference:mamba,…]  `measure --estimate` beside the sweep itself

Shapes have random weights and text of random tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import machine, matmul_rate, shape  # isort: skip  (first: it sets the environment that torch reads)

import torch

from kl_lens.checkpoints import load
from kl_lens.recipes import Recipe
from kl_lens.runs import Run
from kl_lens.sensitivity.engines import FastEngine
from kl_lens.sensitivity.perturbation import find_candidates
from kl_lens.sensitivity.pieces import PieceRunner
from kl_lens.sensitivity.sweep import Sweep
from kl_lens.sensitivity.workers import Order, Workers, hired
from kl_lens.text import Windows
from kl_lens.text.windows import UsedDocument

LENGTH = 512
RECIPES = (Recipe("int4"), Recipe("int8"))
REFERENCE = Path(__file__).resolve().parent.parent / "reference"


def random_windows(count: int, vocabulary: int) -> Windows:
    ids = torch.randint(0, vocabulary, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    document = (UsedDocument("random", "0"),)
    starts = tuple(range(0, count * LENGTH, LENGTH))
    return Windows(ids, "random", None, "drawn", 0, None, starts, (document,) * count, 10**9)


# -- workers -----------------------------------------------------------------------------------------------------


def workers(name: str, count: int, every: int, counts: list[int], with_ray: bool) -> None:
    """A line for each way: the sweep of one process, and of workers with and without their start."""
    from sweep import floor_seconds  # beside this file

    with tempfile.TemporaryDirectory() as temporary:
        folder = str(REFERENCE / name.partition(":")[2])
        if not name.startswith("reference:"):
            folder = temporary
            shape(name).model.save_pretrained(folder)
        how = {"dtype": "float32", "device": "cpu"}
        begin = time.perf_counter()
        model = load(folder, **how)
        opening = time.perf_counter() - begin
        windows = random_windows(count, model.anatomy.component(model.anatomy.embedding).shape[0])
        candidates = find_candidates(model.anatomy, [Recipe("int4")])[0][::every]
        cores, size = torch.get_num_threads(), model.config.hidden_size
        rate = matmul_rate(columns=4 * size, inner=size)
        floor = floor_seconds(model, candidates, windows.ids.numel(), rate)
        print(
            f"{name}: {len(candidates)} candidates × {count} windows; opening {opening:.1f} s; floor {floor:.1f} s "
            f"({rate / 1e9:.0f} GFLOP/s, {cores} threads)",
            flush=True,
        )
        runner = PieceRunner(FastEngine(model), candidates, windows.ids)
        runner.engine.prepare(windows.ids[: runner.layout.batch])  # kernels are compiled, or read
        runner.engine.measure([candidates[-1].perturbation])
        results: list[list[tuple[object, ...]]] = []

        def swept(title: str, workers: Workers | None = None) -> float:
            with Run.create(Path(temporary) / str(len(results))) as run:
                begin = time.perf_counter()
                Sweep(model, run, workers=workers).measure(candidates, windows)
                seconds = time.perf_counter() - begin
                results.append(_samples(run))
            print(
                f"{title}: {seconds:.1f} s, {floor / seconds:.0%} of the floor"
                + ("" if results[-1] == results[0] else ", other bits"),
                flush=True,
            )
            return seconds

        alone = swept(f"one process, {cores} threads")
        order = Order(folder, how, model.fingerprint)
        for number, ray in ((n, ray) for ray in (None, "local")[: 1 + with_ray] for n in counts):
            kind = "workers of Ray" if ray else f"processes with {max(1, cores // number)} threads each"
            with hired(order, number, ray, say=print) as several:
                first = swept(f"{number} {kind}, with their start", several)
                seconds = swept(f"{number} {kind}", several)
            print(
                f"    {alone / seconds:.2f} times as fast as one process; the start took {first - seconds:.1f} s"
            )
        torch.set_num_threads(1)
        begin = time.perf_counter()
        runner.engine.prepare(windows.ids[: runner.layout.batch])
        teacher = time.perf_counter() - begin
        print(
            f"besides: the original on a batch of {runner.layout.batch} windows {teacher:.2f} s with one thread",
            flush=True,
        )


def _samples(run: Run) -> list[tuple[object, ...]]:
    rows = run.journal.execute("SELECT component, format, window, token_kl FROM samples ORDER BY 1, 2, 3")
    return rows.fetchall()


# -- estimates ---------------------------------------------------------------------------------------------------


def estimates(names: list[str], windows: int) -> None:
    print("model                seconds: said, taken      memory: said, taken      disk: said, taken")
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            words = [name, "--windows", str(windows)]
            if not name.startswith("reference:"):
                shape(name).model.save_pretrained(temporary)
                words = [temporary, "--tokenizer", str(REFERENCE / "mamba"), "--windows", str(windows)]
                words += ["--components", r"layers\.(0|8|16|23)\."]
            run = Path(temporary) / "run"
            told = json.loads(_command("measure", *words, "--estimate", "--json")[0])
            _, seconds, peak = _command("measure", *words, "--workers", "1", "--run", str(run), "--json")
            disk = (run / "run.sqlite").stat().st_size
            pairs = ((told["seconds"], seconds), (told["memory"], peak), (told["disk"], disk))
            print(f"{name:18s}", *(f"{a:14.4g} {b:10.4g} ({a / b - 1:+.0%})" for a, b in pairs), flush=True)


CHILD = "import sys; from kl_lens.cli.main import main; code = main(sys.argv[1:]); sys.exit(code)"


def _command(*words: str) -> tuple[str, float, int]:
    """What a command prints, its seconds from start to end, and its peak memory."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen([sys.executable, "-c", CHILD, *words], stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - begin
        out.seek(0)
        if status:
            raise SystemExit(f"kl-lens {' '.join(words)} failed")
        return out.read(), seconds, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("workers", "estimates"))
    parser.add_argument("model", nargs="?", default="mamba-130m")
    parser.add_argument("--models", default="reference:mamba,reference:mamba2,reference:hybrid,mamba-130m")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--every", type=int, default=8, help="only every n-th candidate")
    parser.add_argument("--workers", default="2", help="how many, for `workers`: 1,2,4,8,16")
    parser.add_argument("--ray", action="store_true", help="as many workers of Ray too")
    arguments = parser.parse_args()
    print(machine(), flush=True)
    if arguments.what == "workers":
        counts = [int(word) for word in arguments.workers.split(",")]
        workers(arguments.model, arguments.windows, arguments.every, counts, arguments.ray)
    else:
        estimates(arguments.models.split(","), arguments.windows)


if __name__ == "__main__":
    main()
