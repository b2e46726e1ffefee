"""Several processes: how much faster they are, what a piece of work costs besides arithmetic, how good estimates are.

    python benchmarks/scale.py workers [mamba-130m] [--windows 16] [--workers 1,2,4,8,16] [--ray]
                                                        workers of one thread each, beside one process with all threads
    python benchmarks/scale.py estimates [--models reference:mamba,…]  `measure --estimate` beside the sweep itself
    python benchmarks/scale.py shapes                                  efficiency of 8 and 64 workers on two shapes
    python benchmarks/scale.py paper                                   a 52B and a 400B hybrid, counted, not run

Shapes have random weights and text of random tokens. The 2.7b shape is timed with four of its 64 blocks, which are all
alike; the large hybrids are counted on the meta device, at the rate that an H200 reached on the 2.7b shape.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from common import SHAPES, machine, matmul_rate, shape  # isort: skip  (first: it sets the environment that torch reads)

import torch
import transformers

from kl_lens.checkpoints import load
from kl_lens.cluster.crew import HiredCrew, WorkerPool
from kl_lens.cluster.processes import ProcessHands
from kl_lens.cluster.worker import Order
from kl_lens.recipes import Recipe
from kl_lens.runs import Run
from kl_lens.sensitivity.cost import Item, Rates, estimate, items_of, measured_rates
from kl_lens.sensitivity.engines import DEFAULT_MEMORY, FastEngine
from kl_lens.sensitivity.perturbation import find_candidates
from kl_lens.sensitivity.pieces import Layout, Piece, PieceRunner
from kl_lens.sensitivity.sweep import Sweep
from kl_lens.text import Windows
from kl_lens.text.windows import UsedDocument
from kl_lens.units import human_bytes, human_seconds

LENGTH = 512
RECIPES = (Recipe("int4"), Recipe("int8"))
REFERENCE = Path(__file__).resolve().parent.parent / "reference"
# mamba2-2.7b on an H200: 258 candidates, 64 windows of 512, `tf32x3`, in 167 s. What that is in
# operations of its products per second is counted here, so that scans, metrics and waiting are in it.
H200_SECONDS = 167.0


def random_windows(count: int, vocabulary: int) -> Windows:
    ids = torch.randint(0, vocabulary, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    document = (UsedDocument("random", "0"),)
    starts = tuple(range(0, count * LENGTH, LENGTH))
    return Windows(ids, "random", None, "drawn", 0, None, starts, (document,) * count, 10**9)


# -- workers -----------------------------------------------------------------------------------------------------


def workers(name: str, count: int, every: int, counts: list[int], with_ray: bool) -> None:
    """A line for each way; seconds are those of the sweep alone, and of starting until every worker can begin."""
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

        def swept(title: str, crew: HiredCrew | None = None) -> float:
            with Run.create(Path(temporary) / str(len(results))) as run:
                begin = time.perf_counter()
                Sweep(model, run, crew=crew).measure(candidates, windows)
                seconds = time.perf_counter() - begin
                results.append(_samples(run))
            print(
                f"{title}: {seconds:.1f} s, {floor / seconds:.0%} of the floor"
                + ("" if results[-1] == results[0] else ", other bits"),
                flush=True,
            )
            return seconds

        alone = swept(f"one process, {cores} threads")
        order = Order(folder, how, model.fingerprint, FastEngine.name, DEFAULT_MEMORY, None, Path(temporary))
        ways: list[tuple[str, int, WorkerPool]] = [("processes", n, ProcessHands(0, 1)) for n in counts]
        ways += [("processes", n, ProcessHands()) for n in counts if 1 < n <= cores // 2]
        if with_ray:
            from kl_lens.cluster.ray_pool import RayPool

            ways += [("workers of Ray", n, RayPool("local")) for n in counts]
        for kind, number, hands in ways:
            begin = time.perf_counter()
            with HiredCrew(hands, order, number, print) as crew:
                first = crew.begin(candidates[:1], windows.ids[:1], None, None)
                while any(member.layout is None for member in crew._members):
                    crew._hear(print)
                ready = time.perf_counter() - begin
                call = _call_seconds(crew, first)
                seconds = swept(f"{number} {kind}, threads of each: {crew.order.threads}", crew)
            print(
                f"    {alone / seconds:.2f} times as fast as one process; all were ready after {ready:.1f} s; a piece "
                f"there and back {call * 1e3:.1f} ms",
                flush=True,
            )
        torch.set_num_threads(1)
        begin = time.perf_counter()
        runner.engine.prepare(windows.ids[: runner.layout.batch])
        teacher = time.perf_counter() - begin
        rates, _ = measured_rates(runner.engine, candidates, windows.ids, 0.0, opening)
        print(
            f"besides: the original on a batch of {runner.layout.batch} windows {teacher:.2f} s with one thread; "
            f"committing {rates.committing * 1e3:.2f} ms a candidate and window",
            flush=True,
        )


def _samples(run: Run) -> list[tuple[object, ...]]:
    rows = run.journal.execute("SELECT component, format, window, token_kl FROM samples ORDER BY 1, 2, 3")
    return rows.fetchall()


def _call_seconds(crew: HiredCrew, layout: Layout, times: int = 50) -> float:
    """Seconds for an empty piece of work to go there and back."""
    list(crew.do(layout.whole([1.0]), lambda text: None))
    begin = time.perf_counter()
    for index in range(times):
        list(crew.do([Piece((0,), (), float(index))], lambda text: None))
    return (time.perf_counter() - begin) / times


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
            said, _, _ = _command("measure", *words, "--estimate", "--json")
            told = json.loads(said)
            told = told.get("here") or told["estimates"][0]  # what the command does by default
            _, seconds, peak = _command("measure", *words, "--run", str(run), "--json")
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


# -- shapes ------------------------------------------------------------------------------------------------------


def shapes(starting: float, windows: int = 64) -> None:
    """`starting`: of a worker, until it can open the model; what `workers` found."""
    for name, blocks in (("mamba-130m", 24), ("mamba2-2.7b", 4)):
        hidden, layers, heads = SHAPES[name]
        SHAPES[name] = (hidden, blocks, heads)
        begin = time.perf_counter()
        model = shape(name)
        making = time.perf_counter() - begin
        candidates = find_candidates(model.anatomy, RECIPES)[0]
        ids = random_windows(windows, 50000).ids
        rates, layout = measured_rates(FastEngine(model), candidates, ids, starting, making * layers / blocks)
        times = layers // blocks
        items = [
            replace(item, start=item.start + blocks * copy if item.start >= 0 else item.start)
            for item in items_of(model, candidates)
            for copy in range(times if item.start >= 0 else 1)
        ]
        rates = replace(rates, teacher=sum(rates.blocks) * times + rates.same, blocks=rates.blocks * times)
        print(f"{name}, {len(items)} candidates × {windows} windows ({blocks} of {layers} blocks timed)")
        tell(rates, items, windows, layout.batch, layout.slab)


def tell(rates: Rates, items: list[Item], windows: int, batch: int, slab: int) -> None:
    for count in (1, 8, 64):
        e = estimate(rates, items, windows, batch, slab, count)
        print(
            f"  {count:3d} workers: {human_seconds(e.seconds)}, efficiency {e.efficiency:.0%} "
            f"(starting and opening {human_seconds(e.starting)}, the original {human_seconds(e.teacher)})",
            flush=True,
        )


# -- on paper ----------------------------------------------------------------------------------------------------

JAMBA = {  # the published configurations
    "52B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
    },
    "398B": {
        "hidden_size": 8192,
        "num_hidden_layers": 72,
        "intermediate_size": 24576,
        "num_attention_heads": 64,
    },
}


def h200_rate() -> float:
    """Operations per second of the products of that sweep."""
    with torch.device("meta"):
        model = transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(hidden_size=2560, num_hidden_layers=64, vocab_size=50288, num_heads=80,
                                      head_dim=64, state_size=128, n_groups=1, tie_word_embeddings=True)
        )  # fmt: skip
    blocks = [sum(p.numel() for p in block.parameters() if p.dim() == 2) for block in model.backbone.layers]
    head = model.lm_head.weight.numel()
    suffix = [sum(blocks[start:]) + head for start in range(64) for _ in range(2)]  # in_proj, out_proj
    total = sum(suffix) + sum(blocks) + head  # and the embedding
    return 2.0 * 2 * total * 64 * LENGTH / H200_SECONDS


def paper(windows: int = 64) -> None:
    rate, tokens = h200_rate(), LENGTH
    print(f"an H200's products in tf32x3, in such a sweep: {rate / 1e12:.0f} Tflop/s")
    for name, sizes in JAMBA.items():
        config = transformers.JambaConfig(
            **sizes, vocab_size=65536, num_key_value_heads=8, num_experts=16, num_experts_per_tok=2,
            expert_layer_period=2, expert_layer_offset=1, attn_layer_period=8, attn_layer_offset=4,
            mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, use_mamba_kernels=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = transformers.JambaForCausalLM(config)
        total = sum(p.numel() for p in model.parameters())
        active, items = [], []
        for index, block in enumerate(model.model.layers):
            matrices = {
                n: p
                for n, p in block.named_parameters()
                if p.dim() >= 2 and "conv1d" not in n and "A_log" not in n
            }
            stacks = [p.numel() for p in matrices.values() if p.dim() == 3]
            plain = [p.numel() for p in matrices.values() if p.dim() == 2]
            active.append(sum(plain) + sum(stacks) * config.num_experts_per_tok / config.num_experts)
            items += [Item(index, recipe, size) for size in plain + stacks for recipe in RECIPES]
        head = config.vocab_size * config.hidden_size
        items += [Item(start, recipe, head) for start in (-1, len(active)) for recipe in RECIPES]
        second = 2.0 * tokens / rate
        state = 4 * tokens * (config.hidden_size * (len(active) + 2) + config.vocab_size)  # kept of a window
        rates = Rates(
            starting=10.0,
            opening=total * 2 / 2e9,  # bfloat16 from a disk of 2 GB/s
            teacher=(sum(active) + head) * second,
            blocks=tuple(a * second for a in active),
            same=head * second,
            quantizing=dict.fromkeys(RECIPES, 2 * 3 / 1e12),  # three passes at 1 TB/s
            committing=0.0002,
            memory=0,
            disk=5200,
        )
        print(
            f"{name}: {total / 1e9:.0f}B parameters, {(sum(active) + head) / 1e9:.0f}B at work on a token, "
            f"{len(items)} candidates × {windows} windows; weights {human_bytes(2 * total)} in bfloat16, "
            f"{human_bytes(state)} of the original kept for each window"
        )
        tell(rates, items, windows, 32, 32)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("workers", "estimates", "shapes", "paper"))
    parser.add_argument("model", nargs="?", default="mamba-130m")
    parser.add_argument("--models", default="reference:mamba,reference:mamba2,reference:hybrid,mamba-130m")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--every", type=int, default=8, help="only every n-th candidate")
    parser.add_argument("--workers", default="2", help="how many, for `workers`: 1,2,4,8,16")
    parser.add_argument("--ray", action="store_true", help="as many workers of Ray too")
    parser.add_argument(
        "--starting", type=float, default=10.0, help="seconds of a worker's start, for `shapes`"
    )
    arguments = parser.parse_args()
    print(machine(), flush=True)
    if arguments.what == "workers":
        counts = [int(word) for word in arguments.workers.split(",")]
        workers(arguments.model, arguments.windows, arguments.every, counts, arguments.ray)
    elif arguments.what == "estimates":
        estimates(arguments.models.split(","), arguments.windows)
    elif arguments.what == "shapes":
        shapes(arguments.starting)
    else:
        paper()


if __name__ == "__main__":
    main()
