"""Products of float32 matrices on a GPU's tensor cores, as accurate as wanted.

Tensor cores multiply halves: eleven significant bits, as TF32 has, at twice TF32's rate. So each row x of either matrix
is scaled by a power of two, which gives halves the range that they lack, and split into x = high + low, both halves:
22 bits. high·highᵀ + high·lowᵀ + low·highᵀ, summed in float32, then leaves out nothing that float32 would have kept
(`tf32x3`), but for the cores' habit of cutting off where they should round when they sum. The first of these products
alone has TF32's accuracy (`tf32`).

Splitting costs one pass over each matrix, little beside a product with thousands of rows, so nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_DEPTH = 64  # of the split matrices, columns are a multiple of this; the rest is zeros


@dataclass(frozen=True)
class Halves:
    """The rows of a matrix, split."""

    high: Tensor  # (rows, columns padded)
    low: Tensor  # the same, or `high` again where a single product is wanted
    inverses: Tensor  # (rows,), float32: factors of the rows, in the end

    @property
    def parts(self) -> int:
        return 1 if self.low is self.high else 2


@triton.jit
def _split(  # type: ignore[no-untyped-def]
    x,
    high,
    low,
    inverses,
    stride,
    columns,
    padded,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + k, mask=k < columns, other=0.0)
    # The largest becomes 2¹⁴ to 2¹⁵; halves reach to 2¹⁶.
    exponent = tl.maximum(
        (tl.max(tl.abs(values), axis=0).to(tl.int32, bitcast=True) >> 23) & 255, 27
    )
    values *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(inverses + row, ((exponent - 14) << 23).to(tl.float32, bitcast=True))
    part = values.to(high.dtype.element_ty)
    offset = row * padded + k
    tl.store(high + offset, part, mask=k < padded)
    if LOW:
        tl.store(
            low + offset,
            (values - part.to(tl.float32)).to(high.dtype.element_ty),
            mask=k < padded,
        )


def split(matrix: Tensor, precision: str) -> Halves:
    """The rows of a float32 matrix, ready to be multiplied."""
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    rows, columns = matrix.shape
    padded = -(-columns // _DEPTH) * _DEPTH
    high = torch.empty(rows, padded, dtype=torch.float16, device=matrix.device)
    low = torch.empty_like(high) if precision == "tf32x3" else high
    inverses = torch.empty(rows, dtype=torch.float32, device=matrix.device)
    block = triton.next_power_of_2(padded)
    _split[(rows,)](
        matrix,
        high,
        low,
        inverses,
        matrix.stride(0),
        columns,
        padded,
        LOW=low is not high,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )
    return Halves(high, low, inverses)


@triton.jit
def _place(program, row_tiles, column_tiles, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which tile a program computes: GROUP tiles of rows beside each other, so that both operands stay in the cache."""
    first = program // (GROUP * column_tiles) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    return first + within % size, within // size


@triton.jit
def _linear(  # type: ignore[no-untyped-def]
    a,
    a_low,
    a_scale,
    b,
    b_low,
    b_scale,
    bias,
    y,
    rows,
    columns,
    depth,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """a and b are pointers, or (DESCRIBED) descriptors that Hopper's copy engine reads tiles by."""
    m, n = _place(tl.program_id(0), tl.cdiv(rows, BM), tl.cdiv(columns, BN), GROUP)
    row = m * BM + tl.arange(0, BM)
    column = n * BN + tl.arange(0, BN)
    # Beyond the edges the last row and column are computed again, and not stored.
    r = tl.minimum(row, rows - 1)
    c = tl.minimum(column, columns - 1)
    k = tl.arange(0, BK)
    a_offset = r.to(tl.int64)[:, None] * depth + k[None, :]
    b_offset = c.to(tl.int64)[:, None] * depth + k[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, depth, BK):
        if DESCRIBED:
            a_high = a.load([m * BM, first])
            b_high = b.load([n * BN, first])
        else:
            a_high = tl.load(a + a_offset + first)
            b_high = tl.load(b + b_offset + first)
        if PARTS == 2:
            if DESCRIBED:
                a_rest = a_low.load([m * BM, first])
                b_rest = b_low.load([n * BN, first])
            else:
                a_rest = tl.load(a_low + a_offset + first)
                b_rest = tl.load(b_low + b_offset + first)
            total = tl.dot(a_rest, b_high.T, total)
            total = tl.dot(a_high, b_rest.T, total)
        total = tl.dot(a_high, b_high.T, total)
    total = total * tl.load(a_scale + r)[:, None] * tl.load(b_scale + c)[None, :]
    if BIAS:
        total += tl.load(bias + c)[None, :]
    offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(y + offset, total, mask=(row < rows)[:, None] & (column < columns)[None, :])


@cache
def _tiles(device: torch.device, parts: int) -> dict[str, Any]:
    """Sizes of tiles for this device; the same for every product, so that equal rows give equal results anywhere."""
    # Its stubs lack what newer releases have.
    card: Any = torch.cuda.get_device_properties(device)
    if parts == 1 and card.shared_memory_per_block_optin >= 200 << 10:
        sizes = {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 4}
    else:  # 96 KB of shared memory: what every card since Ampere has
        sizes = {"BM": 128, "BN": 128, "BK": 32, "num_warps": 4, "num_stages": 3}
    return {**sizes, "GROUP": 16, "DESCRIBED": card.major >= 9}


def product(a: Halves, b: Halves, bias: Tensor | None = None) -> Tensor:
    """a · bᵀ in float32, (rows of a, rows of b)."""
    rows = len(a.high)
    columns = len(b.high)
    y = torch.empty(rows, columns, dtype=torch.float32, device=a.high.device)
    sizes = _tiles(y.device, a.parts)

    def tiled(matrix: Tensor, height: int) -> Any:
        if not sizes["DESCRIBED"]:
            return matrix
        return TensorDescriptor.from_tensor(matrix, [height, sizes["BK"]])

    grid: Any = (triton.cdiv(rows, sizes["BM"]) * triton.cdiv(columns, sizes["BN"]),)
    _linear[grid](
        tiled(a.high, sizes["BM"]),
        tiled(a.low, sizes["BM"]),
        a.inverses,
        tiled(b.high, sizes["BN"]),
        tiled(b.low, sizes["BN"]),
        b.inverses,
        b.inverses if bias is None else bias,
        y,
        rows,
        columns,
        a.high.shape[1],
        BIAS=bias is not None,
        PARTS=a.parts,
        **sizes,
    )
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """`torch.nn.functional.linear` of float32 tensors on a GPU; x: (…, columns), weight: (outputs, columns)."""
    rows = split(x.reshape(-1, x.shape[-1]), precision)
    y = product(rows, split(weight, precision), bias)
    return y.view(*x.shape[:-1], -1)
