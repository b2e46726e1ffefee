"""Error feedback for ggml's IQ2 and IQ3 types: eight weights at a time, whose codes are not free of each other.

As in `feedback.py`, with runs of eight columns in place of columns. With H = R Rᵀ, R upper triangular, the loss is
Σ |(E_B + Σ E_K M_KB) R_BB|² over runs B, K < B, with M_KB = R_KB R_BB⁻¹. So each run takes the lattice point nearest to
w_B + Σ E_K M_KB in the metric R_BB R_BBᵀ, and its error goes into the runs behind. Rounds of descent follow: every run
moves to its best point while the others stay, then every block's FP16 scale is fitted again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kl_lens.base.compiling import njit, prange
from kl_lens.weights.formats import Quantized
from kl_lens.weights.formats.gguf_blocks import GGUFFormat, gguf_module
from kl_lens.weights.quantizers.feedback import BLOCK, Objective

Array = npt.NDArray[np.float32]
ROUNDS = 3
SHORTLIST = 6  # grid vectors that are compared in the full metric


def fed_back_blocks(
    fmt: GGUFFormat, weight: torch.Tensor, blocks: Quantized, objective: Objective
) -> Quantized:
    """A matrix with the scales of `blocks` and codes by error feedback."""
    lattice = LATTICES[fmt.name]
    given = np.ascontiguousarray(weight.cpu().numpy())
    moments = objective.moments.cpu().numpy()
    rows, columns = given.shape
    packed = blocks.data.cpu().numpy().reshape(-1, fmt.block_bytes)
    scales = run_scales(fmt.name, packed).reshape(rows, -1)
    codes = np.zeros((rows, columns // lattice.width), np.uint16)
    signs = np.zeros((rows, columns // RUN), np.uint8)
    values = np.zeros_like(given)
    order, mixing, metrics = _by_runs(objective)
    grid = np.ascontiguousarray(lattice.grid.T)
    _feed_back(
        given, scales, order, mixing, metrics, grid, lattice.even, codes, signs, values
    )
    runs = [moments[i : i + RUN, i : i + RUN] for i in range(0, columns, RUN)]
    inverses = np.linalg.inv(np.stack(runs))
    for _ in range(ROUNDS):
        for first in range(0, columns, BLOCK):
            block = slice(first, first + BLOCK)
            pull = (given - values) @ moments[:, block]
            _descend(
                pull,
                moments[block, block].copy(),
                inverses[first // RUN : (first + BLOCK) // RUN],
                scales,
                grid,
                lattice.even,
                first,
                codes,
                signs,
                values,
            )
        packed = _fitted(packed, given, values, moments, rows)
        scales = run_scales(fmt.name, packed).reshape(rows, -1)
        values = _values(lattice.grid, codes, signs, scales)
    done = with_codes(
        fmt.name, packed, codes.reshape(len(packed), -1), signs.reshape(len(packed), -1)
    )
    data = torch.from_numpy(done).reshape(blocks.data.shape).to(weight.device)
    return Quantized(fmt.name, blocks.shape, data)


def _by_runs(objective: Objective) -> tuple[npt.NDArray[np.int64], Array, Array]:
    """Runs, the most important first; M in that order, (columns, columns); the metric of each, (runs, 8, 8)."""
    exact = objective.moments.double()
    runs = exact.diagonal().reshape(-1, RUN).sum(-1).argsort(descending=True, stable=True)
    order = (runs[:, None] * RUN + torch.arange(RUN, device=runs.device)).flatten()
    factor = torch.linalg.cholesky(exact[order][:, order].flip(0, 1)).flip(0, 1)
    own = torch.stack(
        [factor[i : i + RUN, i : i + RUN] for i in range(0, len(factor), RUN)]
    )
    inverse = torch.linalg.inv(own)
    mixing = torch.einsum("kbi,bij->kbj", factor.reshape(len(factor), -1, RUN), inverse)
    whole = mixing.reshape(len(factor), -1).float().contiguous().cpu().numpy()
    return runs.cpu().numpy(), whole, (own @ own.mT).float().cpu().numpy()


def _feed_back(
    weight: Array,
    scales: Array,
    runs: npt.NDArray[np.int64],
    mixing: Array,
    metrics: Array,
    grid: Array,
    even: bool,
    codes: npt.NDArray[np.uint16],
    signs: npt.NDArray[np.uint8],
    values: Array,
) -> None:
    order = (runs[:, None] * RUN + np.arange(RUN)).reshape(-1)
    ordered = weight[:, order]
    errors = np.zeros_like(ordered)
    for first in range(0, weight.shape[1], BLOCK):
        block = slice(first, first + BLOCK)
        wanted = ordered[:, block] + errors[:, :first] @ mixing[:first, block]
        inside = slice(first // RUN, (first + BLOCK) // RUN)
        _round_runs(
            wanted,
            ordered[:, block].copy(),
            mixing[block, block].copy(),
            metrics[inside],
            scales,
            grid,
            even,
            runs[inside],
            codes,
            signs,
            values,
        )
        errors[:, block] = ordered[:, block] - values[:, order[block]]


def _fitted(
    packed: npt.NDArray[np.uint8], weight: Array, values: Array, moments: Array, rows: int
) -> npt.NDArray[np.uint8]:
    """Blocks with their FP16 scales fitted to the codes, each by least squares given the others."""
    old = packed[:, :2].copy().view(np.float16).astype(np.float32).reshape(rows, -1)
    new = old.copy()
    errors = weight - values
    for b in range(old.shape[1]):
        block = slice(256 * b, 256 * (b + 1))
        own = values[:, block]
        pull = ((errors @ moments[:, block]) * own).sum(-1)
        curvature = np.maximum(((own @ moments[block, block]) * own).sum(-1), 1e-30)
        stored = (
            (old[:, b] * (1 + pull / curvature)).astype(np.float16).astype(np.float32)
        )
        step = np.where(
            old[:, b] != 0, stored / np.where(old[:, b] == 0, 1, old[:, b]) - 1, 0
        )
        step = np.where(2 * pull * step > curvature * step**2, step, 0).astype(np.float32)
        errors[:, block] -= own * step[:, None]
        new[:, b] = np.where(step == 0, old[:, b], stored)
    changed = packed.copy()
    changed[:, :2] = new.reshape(-1).astype(np.float16)[:, None].view(np.uint8)
    return changed


def _values(
    grid: Array,
    codes: npt.NDArray[np.uint16],
    signs: npt.NDArray[np.uint8],
    scales: Array,
) -> Array:
    bits = np.unpackbits(signs[..., None], axis=-1, bitorder="little").astype(np.float32)
    points = grid[codes].reshape(*signs.shape, RUN) * (1 - 2 * bits)
    values: Array = (
        (points * scales[..., None]).reshape(len(codes), -1).astype(np.float32)
    )
    return values


@njit(error_model="numpy", fastmath={"contract", "nsz"}, cache=True)
def _nearest(  # type: ignore[no-untyped-def]
    target, scale, metric, columns, even, scores, kept, costs, point, best, code
):
    """The lattice point nearest to `target`: its values in `best`, its codes in `code`; returns signs and distance.

    The grid vectors that are nearest by the metric's diagonal are compared in the whole metric, with the signs of the
    target. One sign is turned if the number of minus signs must be even, or while that brings the point nearer.
    """
    width, count = columns.shape
    parts = 8 // width
    keep = kept.shape[1] if parts == 1 else 4
    for p in range(parts):
        costs[:] = np.float32(np.inf)
        scores[:] = np.float32(0)
        for i in range(
            width
        ):  # the vectors inside, so that the processor takes several at once
            own = metric[p * width + i, p * width + i]
            square = own * scale * scale
            slope = np.float32(-2) * own * scale * abs(target[p * width + i])
            for n in range(count):
                scores[n] += columns[i, n] * (square * columns[i, n] + slope)
        for n in range(count):
            cost = scores[n]
            if cost < costs[keep - 1]:
                place = keep - 1
                while place > 0 and costs[place - 1] > cost:
                    costs[place] = costs[place - 1]
                    kept[p, place] = kept[p, place - 1]
                    place -= 1
                costs[place] = cost
                kept[p, place] = n
    least = np.float32(np.inf)
    chosen = 0
    away = np.empty(8, np.float32)
    for first in range(keep):
        for second in range(keep if parts == 2 else 1):
            signs = 0
            for i in range(8):
                n = kept[0, first] if i < width else kept[1, second]
                point[i] = columns[i % width, n] * scale
                if target[i] < 0:
                    point[i] = -point[i]
                    signs ^= 1 << i
            odd = False
            for i in range(8):
                odd ^= (signs >> i) & 1 == 1
            turns = 1 if even and odd else 0 if even else 2
            for turn in range(turns + 1):
                distance = np.float32(0)
                for i in range(8):
                    total = np.float32(0)
                    for j in range(8):
                        total += metric[i, j] * (target[j] - point[j])
                    away[i] = total
                    distance += total * (target[i] - point[i])
                if turn == turns:
                    break
                change = np.float32(np.inf)
                at = 0
                for i in range(8):
                    step = np.float32(2) * point[i]  # target − point grows by it
                    this = np.float32(2) * step * away[i] + step * step * metric[i, i]
                    if this < change:
                        change = this
                        at = i
                if not even and change >= 0:
                    break
                point[at] = -point[at]
                signs ^= 1 << at
            if distance < least:
                least = distance
                chosen = signs
                code[0] = kept[0, first]
                code[1] = kept[1, second]
                for i in range(8):
                    best[i] = point[i]
    return chosen, least


@njit(parallel=True, error_model="numpy", cache=True)
def _round_runs(  # type: ignore[no-untyped-def]
    wanted, weight, mixing, metrics, scales, columns, even, runs, codes, signs, values
):
    """One block of runs, in order. `wanted` is changed; codes, signs and values are written at the runs' places."""
    parts = 8 // columns.shape[0]
    for row in prange(wanted.shape[0]):
        kept = np.zeros((2, SHORTLIST), np.int64)
        costs = np.empty(SHORTLIST, np.float32)
        scores = np.empty(columns.shape[1], np.float32)
        point = np.empty(8, np.float32)
        best = np.empty(8, np.float32)
        code = np.zeros(2, np.int64)
        own = wanted[row]
        for b in range(runs.shape[0]):
            run = runs[b]
            at = 8 * b
            target = own[at : at + 8].copy()
            turned, _ = _nearest(
                target,
                scales[row, run],
                metrics[b],
                columns,
                even,
                scores,
                kept,
                costs,
                point,
                best,
                code,
            )
            signs[row, run] = turned
            for p in range(parts):
                codes[row, run * parts + p] = code[p]
            for i in range(8):
                values[row, 8 * run + i] = best[i]
                error = weight[row, at + i] - best[i]
                for k in range(at + 8, own.shape[0]):
                    own[k] += error * mixing[at + i, k]


@njit(parallel=True, error_model="numpy", cache=True)
def _descend(  # type: ignore[no-untyped-def]
    pull, moments, inverses, scales, columns, even, start, codes, signs, values
):
    """One block of runs: each moves to its best point while the others stay. `pull` is changed."""
    parts = 8 // columns.shape[0]
    for row in prange(pull.shape[0]):
        kept = np.zeros((2, SHORTLIST), np.int64)
        costs = np.empty(SHORTLIST, np.float32)
        scores = np.empty(columns.shape[1], np.float32)
        point = np.empty(8, np.float32)
        best = np.empty(8, np.float32)
        code = np.zeros(2, np.int64)
        target = np.empty(8, np.float32)
        metric = np.empty((8, 8), np.float32)
        own = pull[row]
        for b in range(inverses.shape[0]):
            at = 8 * b
            run = start // 8 + b
            here = np.float32(0)
            for i in range(8):
                shift = np.float32(0)
                for j in range(8):
                    shift += inverses[b, i, j] * own[at + j]
                    metric[i, j] = moments[at + i, at + j]
                target[i] = values[row, start + at + i] + shift
                here += shift * own[at + i]
            turned, distance = _nearest(
                target,
                scales[row, run],
                metric,
                columns,
                even,
                scores,
                kept,
                costs,
                point,
                best,
                code,
            )
            if distance < here:
                signs[row, run] = turned
                for p in range(parts):
                    codes[row, run * parts + p] = code[p]
                for i in range(8):
                    step = best[i] - values[row, start + at + i]
                    values[row, start + at + i] = best[i]
                    for k in range(own.shape[0]):
                        own[k] -= step * moments[at + i, k]


Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.uint16]
RUN = 8  # weights whose signs are stored together


@dataclass(frozen=True)
class Lattice:
    """One of ggml's types where four or eight weights share a code.

    A block of 256 weights has one FP16 scale, a 4-bit scale for every 16 or 32 weights, an index into a fixed grid of
    vectors for every 4 or 8 weights, and a sign for every weight. Where `even` is set, the signs of 8 weights are in 7
    bits: the number of minus signs is even.
    """

    name: str
    width: int  # weights of one grid vector
    even: bool  # an even number of minus signs in every run
    group: int  # weights that share a 4-bit scale

    @property
    def grid(self) -> npt.NDArray[np.float32]:
        """The vectors, (codes, width), all positive."""
        return _grid(self.name)


LATTICES = {
    one.name: one
    for one in (
        Lattice("iq2_xxs", 8, True, 32),
        Lattice("iq2_xs", 8, True, 16),
        Lattice("iq2_s", 8, False, 16),
        Lattice("iq3_xxs", 4, True, 32),
        Lattice("iq3_s", 4, False, 32),
    )
}


@cache
def _grid(name: str) -> npt.NDArray[np.float32]:
    kind: Any = getattr(gguf_module().quants, name.upper())
    kind.init_grid()
    grid: npt.NDArray[np.float32] = np.ascontiguousarray(
        kind.grid.reshape(-1, LATTICES[name].width)
    )
    return grid


def run_scales(name: str, blocks: Bytes) -> npt.NDArray[np.float32]:
    """What the grid is multiplied by in every run of 8 weights, (blocks, 32)."""
    count = len(blocks)
    gguf = gguf_module()
    first = with_codes(
        name, blocks, np.zeros((count, 256 // LATTICES[name].width), np.uint16), _NO_SIGNS
    )
    values = gguf.dequantize(first, gguf.GGMLQuantizationType[name.upper()])
    scales: npt.NDArray[np.float32] = (
        values.reshape(count, 32, RUN)[..., 0] / _grid(name)[0, 0]
    )
    return scales


def with_codes(name: str, blocks: Bytes, codes: Codes, signs: Bytes) -> Bytes:
    """The same blocks and scales with other codes, (blocks, 256 / width), and signs, (blocks, 32), a bit per weight."""
    count = len(blocks)
    changed = blocks.copy()
    signs = np.broadcast_to(signs, (count, 32))
    low = (codes & 255).astype(np.uint8)
    if name == "iq2_xs":
        changed[:, 2:66] = (codes | (signs & 127).astype(np.uint16) << 9).view(np.uint8)
    elif name == "iq2_s":
        changed[:, 2:34] = low
        changed[:, 34:66] = signs
        changed[:, 66:74] = _joined((codes >> 8).reshape(count, 8, 4), 2)
    elif name == "iq3_s":
        changed[:, 2:66] = low
        changed[:, 74:106] = signs
        changed[:, 66:74] = _joined((codes >> 8).reshape(count, 8, 8), 1)
    else:  # the signs of 32 weights and their 4-bit scale are one 32-bit number
        words = slice(66, 98) if name == "iq3_xxs" else slice(2, 66)
        parts = (
            np.ascontiguousarray(blocks[:, words]).view(np.uint32).reshape(count, 8, -1)
        )
        parts[..., -1] &= np.uint32(0xF << 28)
        for place, each in enumerate(np.moveaxis(signs.reshape(count, 8, 4), -1, 0)):
            parts[..., -1] |= (each & 127).astype(np.uint32) << np.uint32(7 * place)
        if name == "iq2_xxs":
            parts[..., 0] = low.reshape(count, 8, 4).view(np.uint32)[..., 0]
        else:
            changed[:, 2:66] = low
        changed[:, words] = parts.reshape(count, -1).view(np.uint8)
    return changed


_NO_SIGNS = np.zeros((1, 1), np.uint8)


def _joined(parts: npt.NDArray[Any], bits: int) -> Bytes:
    """(…, count) numbers of a few bits each → one byte, the first in its lowest bits."""
    shifts = np.arange(parts.shape[-1], dtype=np.uint16) * bits
    joined: Bytes = (parts << shifts).sum(-1).astype(np.uint8)
    return joined
