"""Error feedback for ggml's IQ2 and IQ3 types: eight weights at a time, whose codes are not free of each other.

As in `feedback.py`, with runs of eight columns in place of columns. With H = R Rᵀ, R upper triangular, the loss is
Σ |(E_B + Σ E_K M_KB) R_BB|² over runs B, K < B, with M_KB = R_KB R_BB⁻¹. So each run takes the lattice point nearest to
w_B + Σ E_K M_KB in the metric R_BB R_BBᵀ, and its error goes into the runs behind. Rounds of descent follow: every run
moves to its best point while the others stay, then every block's FP16 scale is fitted again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy import float32
from torch import Tensor

from kl_lens.base.compiling import njit, prange
from kl_lens.weights.formats import Quantized
from kl_lens.weights.formats.format import Bytes, Floats
from kl_lens.weights.formats.gguf_blocks import GGUFFormat, gguf_module, gguf_values
from kl_lens.weights.quantizers.feedback import BLOCK, Objective

Codes = npt.NDArray[np.uint16]
RUN = 8  # weights whose signs are stored together
ROUNDS = 3
SHORTLIST = 6  # grid vectors that are compared in the full metric


def fed_back_blocks(
    fmt: GGUFFormat, weight: Tensor, blocks: Quantized, objective: Objective
) -> Quantized:
    """A matrix with the scales of `blocks` and codes by error feedback."""
    vectors = grid_of(fmt.name)
    exact = np.ascontiguousarray(weight.cpu().numpy())
    moments = objective.moments.cpu().numpy()
    rows, columns = exact.shape
    packed = blocks.data.cpu().numpy().reshape(-1, fmt.block_bytes)
    scales = run_scales(fmt.name, packed).reshape(rows, -1)
    codes = np.zeros((rows, columns // vectors.shape[1]), np.uint16)
    signs = np.zeros((rows, columns // RUN), np.uint8)
    values = np.zeros_like(exact)
    grid = np.ascontiguousarray(vectors.T)
    # The last three are written.
    points = (grid, fmt.name in EVEN, codes, signs, values)
    runs, mixing, metrics = _by_runs(objective)
    order = (runs[:, None] * RUN + np.arange(RUN)).reshape(-1)
    ordered = exact[:, order]
    errors = np.zeros_like(ordered)
    for first in range(0, columns, BLOCK):
        block = slice(first, first + BLOCK)
        inside = slice(first // RUN, (first + BLOCK) // RUN)
        part = ordered[:, block].copy()
        wanted = part + errors[:, :first] @ mixing[:first, block]
        inner = mixing[block, block].copy()
        _round_runs(wanted, part, inner, metrics[inside], scales, runs[inside], *points)
        errors[:, block] = part - values[:, order[block]]
    corners = [moments[i : i + RUN, i : i + RUN] for i in range(0, columns, RUN)]
    inverses = np.linalg.inv(np.stack(corners))
    for _ in range(ROUNDS):
        for first in range(0, columns, BLOCK):
            block = slice(first, first + BLOCK)
            pull = (exact - values) @ moments[:, block]
            inner = moments[block, block].copy()
            part = inverses[first // RUN : (first + BLOCK) // RUN]
            _descend(pull, inner, part, scales, first, *points)
        packed = _fitted(packed, exact, values, moments)
        scales = run_scales(fmt.name, packed).reshape(rows, -1)
        values[:] = _values(vectors, codes, signs, scales)
    codes = codes.reshape(len(packed), -1)
    packed = with_codes(fmt.name, packed, codes, signs.reshape(len(packed), -1))
    data = torch.from_numpy(packed).reshape(blocks.data.shape).to(weight.device)
    return Quantized(fmt.name, blocks.shape, data)


def _by_runs(objective: Objective) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Runs, the most important first; M in that order, (columns, columns); the metric of each, (runs, 8, 8)."""
    exact = objective.moments.double()
    runs = exact.diagonal().reshape(-1, RUN).sum(-1).argsort(descending=True, stable=True)
    order = (runs[:, None] * RUN + torch.arange(RUN, device=runs.device)).flatten()
    factor = torch.linalg.cholesky(exact[order][:, order].flip(0, 1)).flip(0, 1)
    corners = [factor[i : i + RUN, i : i + RUN] for i in range(0, len(factor), RUN)]
    roots = torch.stack(corners)
    inverse = torch.linalg.inv(roots)
    mixing = torch.einsum("kbi,bij->kbj", factor.reshape(len(factor), -1, RUN), inverse)
    whole = mixing.reshape(len(factor), -1).float().contiguous().cpu().numpy()
    return runs.cpu().numpy(), whole, (roots @ roots.mT).float().cpu().numpy()


def _fitted(packed: Bytes, weight: Floats, values: Floats, moments: Floats) -> Bytes:
    """Blocks with their FP16 scales fitted to the codes, each by least squares given the others."""
    old = packed[:, :2].copy().view(np.float16).astype(float32)
    old = old.reshape(len(weight), -1)
    new = old.copy()
    errors = weight - values
    for b in range(old.shape[1]):
        block = slice(256 * b, 256 * (b + 1))
        part = values[:, block]
        scale = old[:, b]
        pull = ((errors @ moments[:, block]) * part).sum(-1)
        curvature = np.maximum(((part @ moments[block, block]) * part).sum(-1), 1e-30)
        rounded = (scale * (1 + pull / curvature)).astype(np.float16).astype(float32)
        step = np.where(scale != 0, rounded / np.where(scale == 0, 1, scale) - 1, 0)
        step = np.where(2 * pull * step > curvature * step**2, step, 0).astype(float32)
        errors[:, block] -= part * step[:, None]
        new[:, b] = np.where(step == 0, scale, rounded)
    changed = packed.copy()
    changed[:, :2] = new.reshape(-1).astype(np.float16)[:, None].view(np.uint8)
    return changed


def _values(grid: Floats, codes: Codes, signs: Bytes, scales: Floats) -> Floats:
    bits = np.unpackbits(signs[..., None], axis=-1, bitorder="little").astype(float32)
    points = grid[codes].reshape(*signs.shape, RUN) * (1 - 2 * bits)
    values = (points * scales[..., None]).reshape(len(codes), -1)
    return values.astype(float32)


@njit(error_model="numpy", fastmath={"contract", "nsz"}, cache=True)
def _shortlist(target, scale, metric, columns, costs, scores, shortest):  # type: ignore[no-untyped-def]
    """The grid vectors that are nearest to `target` by the metric's diagonal, the nearest first, in `shortest`."""
    width, count = columns.shape
    costs[:] = float32(np.inf)
    scores[:] = float32(0)
    last = len(shortest) - 1
    for i in range(width):
        # The vectors inside, so that the processor takes several at once.
        square = metric[i, i] * scale * scale
        slope = float32(-2) * metric[i, i] * scale * abs(target[i])
        for n in range(count):
            scores[n] += columns[i, n] * (square * columns[i, n] + slope)
    for n in range(count):
        cost = scores[n]
        if cost < costs[last]:
            rank = last
            while rank > 0 and costs[rank - 1] > cost:
                costs[rank] = costs[rank - 1]
                shortest[rank] = shortest[rank - 1]
                rank -= 1
            costs[rank] = cost
            shortest[rank] = n


@njit(error_model="numpy", fastmath={"contract", "nsz"}, cache=True)
def _nearest(target, scale, metric, columns, even, scratch, best, code):  # type: ignore[no-untyped-def]
    """The lattice point nearest to `target`: its values in `best`, its codes in `code`; returns signs and distance.

    The grid vectors that are nearest by the metric's diagonal are compared in the whole metric, with the signs of the
    target. One sign is turned if the number of minus signs must be even, or while that brings the point nearer.
    """
    shortest, costs, scores, point, away = scratch
    width = columns.shape[0]
    parts = 8 // width
    count = shortest.shape[1] if parts == 1 else 4
    for p in range(parts):
        inside = slice(p * width, (p + 1) * width)
        _shortlist(
            target[inside],
            scale,
            metric[inside, inside],
            columns,
            costs,
            scores,
            shortest[p, :count],
        )
    minus = 0
    odd = False
    for i in range(8):
        if target[i] < 0:
            minus ^= 1 << i
            odd = not odd
    turns = 2
    if even:
        turns = 1 if odd else 0
    least = float32(np.inf)
    chosen = 0
    for first in range(count):
        for second in range(count if parts == 2 else 1):
            signs = minus
            for i in range(8):
                n = shortest[0, first] if i < width else shortest[1, second]
                point[i] = columns[i % width, n] * scale
                if target[i] < 0:
                    point[i] = -point[i]
            for turn in range(turns + 1):
                distance = float32(0)
                for i in range(8):
                    total = float32(0)
                    for j in range(8):
                        total += metric[i, j] * (target[j] - point[j])
                    away[i] = total
                    distance += total * (target[i] - point[i])
                if turn == turns:
                    break
                least_change = float32(np.inf)
                at = 0
                for i in range(8):
                    step = float32(2) * point[i]  # target − point grows by it
                    change = float32(2) * step * away[i] + step * step * metric[i, i]
                    if change < least_change:
                        least_change = change
                        at = i
                if not even and least_change >= 0:
                    break
                point[at] = -point[at]
                signs ^= 1 << at
            if distance < least:
                least = distance
                chosen = signs
                code[0] = shortest[0, first]
                code[1] = shortest[1, second]
                best[:] = point
    return chosen, least


@njit(cache=True)
def _scratch(count):  # type: ignore[no-untyped-def]
    """Room for `_nearest` in a grid of so many vectors."""
    shortest = np.zeros((2, SHORTLIST), np.int64)
    costs = np.empty(SHORTLIST, float32)
    scores = np.empty(count, float32)
    return shortest, costs, scores, np.empty(8, float32), np.empty(8, float32)


@njit(parallel=True, error_model="numpy", cache=True)
def _round_runs(  # type: ignore[no-untyped-def]
    wanted, weight, mixing, metrics, scales, runs, columns, even, codes, signs, values
):
    """One block of runs, in order. `wanted` is changed; codes, signs and values are written where the runs are."""
    parts = 8 // columns.shape[0]
    for row in prange(wanted.shape[0]):
        scratch = _scratch(columns.shape[1])
        best = np.empty(8, float32)
        code = np.zeros(2, np.int64)
        aims = wanted[row]
        for b in range(runs.shape[0]):
            run = runs[b]
            at = 8 * b
            target = aims[at : at + 8].copy()
            turned, _ = _nearest(
                target, scales[row, run], metrics[b], columns, even, scratch, best, code
            )
            signs[row, run] = turned
            for p in range(parts):
                codes[row, run * parts + p] = code[p]
            for i in range(8):
                values[row, 8 * run + i] = best[i]
                error = weight[row, at + i] - best[i]
                for k in range(at + 8, aims.shape[0]):
                    aims[k] += error * mixing[at + i, k]


@njit(parallel=True, error_model="numpy", cache=True)
def _descend(  # type: ignore[no-untyped-def]
    pull, moments, inverses, scales, start, columns, even, codes, signs, values
):
    """One block of runs: each moves to its best point while the others stay. `pull` is changed."""
    parts = 8 // columns.shape[0]
    for row in prange(pull.shape[0]):
        scratch = _scratch(columns.shape[1])
        best = np.empty(8, float32)
        code = np.zeros(2, np.int64)
        target = np.empty(8, float32)
        metric = np.empty((8, 8), float32)
        pulls = pull[row]
        for b in range(inverses.shape[0]):
            at = 8 * b
            run = start // 8 + b
            present = float32(0)
            for i in range(8):
                shift = float32(0)
                for j in range(8):
                    shift += inverses[b, i, j] * pulls[at + j]
                    metric[i, j] = moments[at + i, at + j]
                target[i] = values[row, start + at + i] + shift
                present += shift * pulls[at + i]
            turned, distance = _nearest(
                target, scales[row, run], metric, columns, even, scratch, best, code
            )
            if distance < present:
                signs[row, run] = turned
                for p in range(parts):
                    codes[row, run * parts + p] = code[p]
                for i in range(8):
                    step = best[i] - values[row, start + at + i]
                    values[row, start + at + i] = best[i]
                    for k in range(pulls.shape[0]):
                        pulls[k] -= step * moments[at + i, k]


# ggml's types where four or eight weights share a code. A block of 256 weights has one FP16 scale, a 4-bit scale for
# every 16 or 32 weights, an index into a fixed grid of vectors for every 4 or 8 weights, and a sign for every weight.
# Of those named here the signs of 8 weights are in 7 bits: the number of minus signs is even.
EVEN = ("iq2_xxs", "iq2_xs", "iq3_xxs")


@cache
def grid_of(name: str) -> Floats:
    """The vectors, (codes, 4 or 8), all positive."""
    kind: Any = getattr(gguf_module().quants, name.upper())
    kind.init_grid()
    width = 8 if name.startswith("iq2") else 4
    return np.ascontiguousarray(kind.grid.reshape(-1, width))


def run_scales(name: str, blocks: Bytes) -> Floats:
    """What the grid is multiplied by in every run of 8 weights, (blocks, 32)."""
    grid = grid_of(name)
    codes = np.zeros((len(blocks), 256 // grid.shape[1]), np.uint16)
    first = with_codes(name, blocks, codes, np.zeros((1, 1), np.uint8))
    values = gguf_values(name, first).reshape(len(blocks), 32, RUN)
    return values[..., 0] / grid[0, 0]


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
        parts = np.ascontiguousarray(blocks[:, words]).view(np.uint32)
        parts = parts.reshape(count, 8, -1)
        parts[..., -1] &= np.uint32(0xF << 28)
        sevens = (signs & 127).astype(np.uint32).reshape(count, 8, 4)
        for index in range(4):
            parts[..., -1] |= sevens[..., index] << np.uint32(7 * index)
        if name == "iq2_xxs":
            parts[..., 0] = low.reshape(count, 8, 4).view(np.uint32)[..., 0]
        else:
            changed[:, 2:66] = low
        changed[:, words] = parts.reshape(count, -1).view(np.uint8)
    return changed


def _joined(parts: npt.NDArray[Any], bits: int) -> Bytes:
    """(…, count) numbers of a few bits each → one byte, the first in its lowest bits."""
    shifts = np.arange(parts.shape[-1], dtype=np.uint16) * bits
    return (parts << shifts).sum(-1).astype(np.uint8)
