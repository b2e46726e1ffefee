"""The GPU: sweeps of published shapes beside the plain engine and the floors; agreement; types; error feedback.

    python benchmarks/gpu.py sweep mamba-130m,mamba2-130m,mamba2-2.7b [--precisions tf32x3,tf32] [--every 6]
    python benchmarks/gpu.py agreement reference:mamba,reference:mamba2,reference:hybrid
    python benchmarks/gpu.py types reference:mamba,reference:mamba2,reference:hybrid [--draws 16]
    python benchmarks/gpu.py gptq mamba-130m    # each with [--write docs/results/speed.csv]
    python benchmarks/gpu.py states mamba2-130m    # every state and cache in every format, 4 windows of 1,024 tokens

Shapes have random weights and text of random tokens, 64 windows of 512, INT4 and INT8, every candidate; the plain
engine measures two of them. Agreement is on WikiText-2 against the plain engine in float32. Types: a whole model in a
type of llama.cpp, quantized by the GPU and by the CPU (ggml), each draw with the importance of other windows. Floors
are the products alone, at the rates of torch's own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import opened  # isort: skip  (first: it sets the environment that torch reads)

import numpy as np
import torch
from scipy.stats import kendalltau

from kl_lens.measuring.engines import Engine, FastEngine, PlainEngine
from kl_lens.measuring.joint import PlanMeter
from kl_lens.measuring.perturbation import (
    Candidate,
    find_candidates,
    find_state_candidates,
)
from kl_lens.measuring.pieces import noise_floor
from kl_lens.run.readings import Reading, summarise
from kl_lens.study.calibrate import CalibrateSettings
from kl_lens.study.measure import STATE_TOKENS, STATE_WINDOWS
from kl_lens.study.session import Session
from kl_lens.text.windows import draw_windows
from kl_lens.weights.formats import get_format
from kl_lens.weights.quantizers import InputStatistics, get_quantizer
from kl_lens.weights.recipes import Recipe, fitting_recipe
from result_files import options, write_speed
from sweep import floor_seconds

PRECISIONS = "tf32x3,tf32"
RECIPES = [
    Recipe(t, m)
    for t in ("q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
    for m in ("imatrix", "gptq")
]


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measured(
    engine: Engine, candidates: list[Candidate], ids: torch.Tensor
) -> list[list[Reading]]:
    results: list[list[Reading]] = [[] for _ in candidates]
    for slab in engine.slabs(ids):
        engine.prepare(ids[slab.start : slab.stop])
        for windows, more in zip(
            results, engine.measure([c.perturbation for c in candidates]), strict=True
        ):
            windows += more
    return results


def rates(width: int) -> dict[str, float]:
    """Operations per second of torch's products with this width."""
    flops = {}
    for name, dtype in (
        ("float32", torch.float32),
        ("TF32", torch.float32),
        ("BF16", torch.bfloat16),
    ):
        a, b = (
            torch.randn(n, width, device="cuda", dtype=dtype) for n in (16384, 4 * width)
        )
        torch.backends.cuda.matmul.allow_tf32 = name == "TF32"
        seconds(lambda a=a, b=b: a @ b.T)  # type: ignore[misc]
        elapsed = seconds(lambda a=a, b=b: [a @ b.T for _ in range(10)])  # type: ignore[misc]
        flops[name] = 20 * a.shape[0] * width * 4 * width / elapsed
    torch.backends.cuda.matmul.allow_tf32 = False
    return flops


def sweep(name: str, arguments: argparse.Namespace) -> None:
    model = opened(name, "cuda")
    candidates, _ = find_candidates(model.anatomy, [Recipe("int4"), Recipe("int8")])
    ids = torch.randint(
        0, 50000, (arguments.windows, 512), generator=torch.Generator().manual_seed(0)
    )
    floors = {
        kind: floor_seconds(model, candidates, ids.numel(), rate)
        for kind, rate in rates(model.config.hidden_size).items()
    }
    numbers = {("", "candidates"): str(len(candidates))}
    numbers |= {(f"floor, {kind}", "s"): f"{value:.1f}" for kind, value in floors.items()}
    print(
        f"{name}: {len(candidates)} candidates; floors of all "
        + ", ".join(f"{kind} {value:.1f} s" for kind, value in floors.items()),
        flush=True,
    )
    two = candidates[len(candidates) // 2 :: len(candidates) // 2][:2]
    for precision in arguments.precisions.split(","):
        engine = FastEngine(model, precision=precision)
        measured(engine, two[:1], ids[:8])  # compiles the kernels
        torch.cuda.reset_peak_memory_stats()
        sample = candidates[:: arguments.every]
        elapsed = seconds(partial(measured, engine, sample, ids))
        elapsed *= len(candidates) / len(sample)
        numbers[precision, "s"] = f"{elapsed:.1f}"
        print(
            f"  fast {precision:7s} {elapsed:7.1f} s, {elapsed / len(candidates):.4f} s each, "
            f"{len(engine.slabs(ids))} slabs, {floors['float32'] / elapsed:.0%} of float32's floor, "
            f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB",
            flush=True,
        )
        del engine
    if (
        arguments.every == 1
    ):  # where some candidates stand for all, two would take too long
        engine = PlainEngine(model)
        engine.prepare(ids[:1])
        engine.measure([two[0].perturbation])
        engine.prepare(ids)
        elapsed = seconds(lambda: engine.measure([c.perturbation for c in two])) / len(
            two
        )
        numbers["plain", "s"] = f"{elapsed * len(candidates):.0f}"
        print(
            f"  plain float32 {elapsed:.3f} s each, {elapsed * len(candidates):.0f} s for all",
            flush=True,
        )
    record(arguments, "gpu sweep", name, numbers)


def states(name: str, arguments: argparse.Namespace) -> None:
    """Twice: with kernels to compile, and without."""
    model = opened(name, "cuda")
    candidates, _ = find_state_candidates(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50000, (STATE_WINDOWS, STATE_TOKENS), generator=generator)
    engine = FastEngine(model)
    numbers = {("", "candidates"): str(len(candidates))}
    for run in ("first", "again"):
        elapsed = seconds(lambda: measured(engine, candidates, ids))
        numbers[run, "s"] = f"{elapsed:.1f}"
        print(
            f"{name}: {len(candidates)} states and caches, {run}: {elapsed:.1f} s",
            flush=True,
        )
    record(arguments, "gpu states", name, numbers)


def agreement(name: str, arguments: argparse.Namespace) -> None:
    model = opened(name, "cuda")
    candidates, _ = find_candidates(model.anatomy, [Recipe("int4"), Recipe("int8")])
    windows = draw_windows(
        "wikitext2:valid",
        model.require_tokenizer(),
        windows=arguments.windows,
        length=512,
        seed=0,
    )

    def divergences(engine: Engine) -> np.ndarray:
        readings = measured(engine, candidates, windows.ids)
        return np.array([summarise(w)["kl_teacher_to_student"].value for w in readings])

    expected = divergences(PlainEngine(model))
    numbers: dict[tuple[str, str], str] = {}
    for precision in ("float32", *arguments.precisions.split(",")):
        engine = FastEngine(model, precision=precision)
        noise = noise_floor(engine, windows.ids)["kl_teacher_to_student"]
        actual = divergences(engine)
        line = f"{name} {precision:7s} noise {noise:.1e}"
        numbers[precision, "noise floor"] = f"{noise:.1e}"
        for fmt in ("int4", "int8"):
            chosen = np.array([c.recipe == fmt for c in candidates]) & (expected > 1e-8)
            off = np.abs(actual[chosen] / expected[chosen] - 1).max()
            tau = kendalltau(actual[chosen], expected[chosen]).statistic
            variant = f"{precision}, {fmt.upper()}"
            numbers[variant, "largest relative difference of KL"] = f"{off:.1e}"
            numbers[variant, "τ"] = f"{tau:.4f}"
            line += f"; {fmt} ({chosen.sum()}, least {expected[chosen].min():.1e}): off by {off:.1e}, τ {tau:.4f}"
        print(line, flush=True)
    record(arguments, "gpu agreement", name, numbers)


def types(name: str, arguments: argparse.Namespace) -> None:
    """KL of the GPU's weights over that of the CPU's: geometric mean, and its standard error."""
    logarithms: dict[str, list[float]] = {}
    numbers: dict[tuple[str, str], str] = {}
    for draw in range(arguments.draws):
        kl: dict[str, list[float]] = {}
        for device in ("cpu", "cuda"):
            session = Session()
            with tempfile.TemporaryDirectory() as folder:
                settings = CalibrateSettings.of(
                    model=name, run=folder, device=device, windows=4, seed=draw
                )
                session.do(settings)
                model = session.in_run(
                    session.model(name, settings.opening), Path(folder)
                )
                test = model.task.from_start("wikitext2:test", length=512, limit=8)
                meter = PlanMeter(model, test)
                for recipe in RECIPES:
                    recipes = {
                        c.name: fitting_recipe(recipe, c.shape)[0]
                        for c in model.anatomy.candidates
                    }
                    kl.setdefault(str(recipe), []).append(meter.measure(recipes).kl.value)
        for label, (reference, actual) in kl.items():
            logarithms.setdefault(label, []).append(np.log(actual / reference))
        if draw:
            numbers = {
                (label, f"KL over that of the CPU, {draw + 1} draws"): (
                    f"{np.exp(np.mean(ratios)):.3f} ± {np.std(ratios, ddof=1) / len(ratios) ** 0.5:.3f}"
                )
                for label, ratios in logarithms.items()
            }
            print(
                name,
                draw + 1,
                ", ".join(f"{label} {n}" for (label, _), n in numbers.items()),
                flush=True,
            )
    record(arguments, "gpu types", name, numbers)


def record(
    arguments: argparse.Namespace,
    benchmark: str,
    name: str,
    numbers: dict[tuple[str, str], str],
) -> None:
    case = {
        "benchmark": benchmark,
        "model": name,
        "threads": "",
        "machine": torch.cuda.get_device_name(),
    }
    write_speed(arguments.write, case, numbers)


def gptq(name: str, arguments: argparse.Namespace) -> None:
    """Every component, with second moments of correlated random inputs."""
    model = opened(name, "cuda")
    fmt = get_format("int4-g64")
    method = get_quantizer("gptq")
    moments: dict[int, InputStatistics] = {}
    for width in {c.shape[-1] for c in model.anatomy.candidates}:
        inputs = torch.randn(2 * width, width, device="cuda") @ torch.randn(
            width, width, device="cuda"
        )
        moments[width] = InputStatistics(inputs.T @ inputs / len(inputs), (len(inputs),))
    fitting = [c for c in model.anatomy.candidates if fmt.fits(c.shape) is None]

    def quantize() -> None:
        for c in fitting:
            method.quantize(
                model.model.get_parameter(c.weight).detach(),
                fmt,
                c.name,
                moments[c.shape[-1]],
            )

    method.quantize(
        model.model.get_parameter(fitting[1].weight).detach(),
        fmt,
        "",
        moments[fitting[1].shape[-1]],
    )
    torch.cuda.reset_peak_memory_stats()
    elapsed = seconds(quantize)
    peak = torch.cuda.max_memory_allocated() / 1e9
    print(
        f"{name}: {len(fitting)} components in {fmt.name}+gptq: {elapsed:.1f} s, peak {peak:.1f} GB",
        flush=True,
    )
    variant = f"{fmt.name}+gptq"
    numbers = {(variant, "s"): f"{elapsed:.1f}", (variant, "peak GB"): f"{peak:.1f}"}
    record(arguments, "gpu gptq", name, numbers)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("what", choices=("sweep", "states", "agreement", "types", "gptq"))
    parser.add_argument("models")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--precisions", default=PRECISIONS)
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        help="measure every Nth candidate, scale the seconds up",
    )
    parser.add_argument("--draws", type=int, default=16)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for name in arguments.models.split(","):
        works = {
            "sweep": sweep,
            "states": states,
            "agreement": agreement,
            "types": types,
            "gptq": gptq,
        }
        works[arguments.what](name, arguments)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
