"""The sweep, three ways in one run: as published, our plain engine, our fast engine; with the floor of the arithmetic.

    python benchmarks/sweep.py [--models reference:mamba,…,mamba-130m,mamba2-130m] [--tokens 4096] [--memory]

"As published" is the published way of working: for each candidate copy the model, quantize one layer, run the
original and the copy with transformers' own forward, keep both sets of logits whole, and take from them the SQNR, both
KL divergences and both cross-entropies. A few candidates, spread evenly over the blocks, stand for all; each way
measures them on the same tokens (the published way one of them, for its work does not depend on the block).
"""

from __future__ import annotations

import argparse
import copy
import resource
import subprocess
import sys
import time

import torch

from common import machine, matmul_rate, shape
from kl_lens.checkpoints import LoadedModel, load
from kl_lens.formats import get_format
from kl_lens.sensitivity.engines import FastEngine, PlainEngine
from kl_lens.sensitivity.perturbation import Candidate, first_block

MODELS = "reference:mamba,reference:mamba2,reference:hybrid,mamba-130m,mamba2-130m"


def open_model(name: str) -> LoadedModel:
    return load(name) if name.startswith("reference:") else shape(name)


def spread_candidates(model: LoadedModel, blocks: int) -> list[Candidate]:
    """One component of each of some blocks, spread evenly, kinds in turn: the average suffix of a whole sweep."""
    chosen = []
    total = model.anatomy.blocks
    places = [round((i + 0.5) * total / blocks - 0.5) for i in range(blocks)]
    for turn, place in enumerate(places):
        members = [c for c in model.anatomy.block_components(place) if c.quantizable]
        chosen.append(Candidate(members[turn % len(members)], "int4"))
    return chosen


def as_published(model: LoadedModel, candidate: Candidate, ids: torch.Tensor) -> dict[str, float]:
    """Their way and their metrics, with the mistakes mended: means per token, log-probabilities, shifted labels."""
    functional = torch.nn.functional
    with torch.no_grad():
        student = copy.deepcopy(model.model)
        weight = student.get_parameter(candidate.component.weight)
        weight.data = get_format(candidate.format).roundtrip(weight.data)
        totals: dict[str, float] = {}
        batches = ids.split(8)
        for part in batches:
            p = model.model(part, use_cache=False).logits
            q = student(part, use_cache=False).logits
            log_p, log_q = torch.log_softmax(p, -1), torch.log_softmax(q, -1)
            labels = part[:, 1:].reshape(-1)
            found = {
                "kl_teacher_to_student": functional.kl_div(log_q, log_p, log_target=True, reduction="none")
                .sum(-1)
                .mean(),
                "kl_student_to_teacher": functional.kl_div(log_p, log_q, log_target=True, reduction="none")
                .sum(-1)
                .mean(),
                "sqnr_db": 10 * torch.log10(p.square().mean() / (p - q).square().mean()),
                "delta_cross_entropy": functional.cross_entropy(q[:, :-1].reshape(len(labels), -1), labels)
                - functional.cross_entropy(p[:, :-1].reshape(len(labels), -1), labels),
            }
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + float(value) / len(batches)
        return totals


def floor_seconds(model: LoadedModel, candidates: list[Candidate], tokens: int, rate: float) -> float:
    """Suffix and head products of the candidates over the machine's matmul rate; scans and metrics come for free."""
    anatomy = model.anatomy
    head = anatomy.component(anatomy.head).parameters
    operations = 0
    for candidate in candidates:
        start = first_block(anatomy, candidate.perturbation)
        suffix = sum(c.parameters for c in anatomy.candidates if c.block is not None and c.block >= start)
        operations += 2 * tokens * (suffix + head)
    return operations / rate


def run(name: str, arguments: argparse.Namespace) -> None:
    model = open_model(name)
    tokens = arguments.tokens
    candidates = spread_candidates(model, arguments.candidates)
    vocabulary = model.anatomy.component(model.anatomy.embedding).shape[0]
    ids = torch.randint(
        0, vocabulary, (max(1, tokens // 512), 512), generator=torch.Generator().manual_seed(0)
    )
    perturbations = [c.perturbation for c in candidates]
    rate = matmul_rate(columns=model.config.hidden_size * 4, inner=model.config.hidden_size)
    seconds: dict[str, list[float]] = {}
    engines = (FastEngine,) if arguments.without_plain else (PlainEngine, FastEngine)
    for engine_class in engines:
        engine = engine_class(model)
        engine.prepare(ids)
        for repeat in range(1 + arguments.repeats):
            begin = time.perf_counter()
            engine.measure(perturbations)
            if repeat:  # the first warms up
                seconds.setdefault(engine.name, []).append((time.perf_counter() - begin) / len(candidates))
    best = {engine: min(values) for engine, values in seconds.items()}
    floor = floor_seconds(model, candidates, ids.numel(), rate) / len(candidates)
    line = f"{name:18s} {ids.numel():6d} tokens  fast {best['fast']:7.2f} s per candidate"
    if "plain" in best:
        line += f"  plain {best['plain']:7.2f} s  plain/fast {best['plain'] / best['fast']:.2f}"
    if not arguments.without_published:
        begin = time.perf_counter()
        as_published(model, candidates[len(candidates) // 2], ids)
        theirs = time.perf_counter() - begin
        line += f"  as published {theirs:7.2f} s  published/fast {theirs / best['fast']:.1f}"
    line += f"  floor {floor:6.2f} s ({rate / 1e9:.0f} GFLOP/s): reached {floor / best['fast']:.0%}"
    print(line, flush=True)


def memory(windows: int) -> None:
    """Peak memory of a sweep on the mamba-130m shape at 512 tokens a window, in this process alone."""
    model = shape("mamba-130m")
    ids = torch.randint(0, 50000, (windows, 512), generator=torch.Generator().manual_seed(0))
    engine = FastEngine(model)
    last = spread_candidates(model, 4)[-1]
    for slab in engine.slabs(ids):
        engine.prepare(ids[slab.start : slab.stop])
        engine.measure([last.perturbation])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"mamba-130m, {windows} × 512 tokens, {len(engine.slabs(ids))} slabs: peak memory {peak / 1e9:.2f} GB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--candidates", type=int, default=4, help="spread over the blocks (default: 4)")
    parser.add_argument(
        "--repeats", type=int, default=2, help="the best counts, after one to warm up (default: 2)"
    )
    parser.add_argument("--without-published", action="store_true")
    parser.add_argument("--without-plain", action="store_true")
    parser.add_argument(
        "--memory", type=int, metavar="WINDOWS", help="only the peak memory at so many windows"
    )
    arguments = parser.parse_args()
    if arguments.memory:
        memory(arguments.memory)
        return
    print(machine(), flush=True)
    for name in arguments.models.split(","):
        # Each model in a process of its own: what one leaves in memory must not slow the next.
        if "," in arguments.models:
            own = [word for word in sys.argv[1:] if word not in ("--models", arguments.models)]
            subprocess.run([sys.executable, __file__, *own, "--models", name], check=True)
        else:
            run(name, arguments)


if __name__ == "__main__":
    main()
