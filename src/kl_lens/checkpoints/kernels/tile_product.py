"""A small matrix product inside numba kernels: four rows against a panel of 64 columns.

numba has no matrix product that may be called from parallel tasks, and most products of scans and attention are too
small for a library call anyway. Written as loops, the compiler keeps the sums in memory; so the innermost part is given
to LLVM as vectors: sixteen columns of four rows stay in registers for the whole depth.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kl_lens.checkpoints.kernels.vector_math import FAST_MATH

# Columns of a panel.
WIDTH = 64
_ROWS = 4
# Columns whose sums are held in registers at a time, and the floats of one register.
_COLUMNS = 16
_LANES = 8 if binding.get_host_cpu_features().get("avx2") else 4


@intrinsic
def _accumulate(typing_context, left, row, panel, tile):  # type: ignore[no-untyped-def]
    """tile += left[row : row + 4] · panel, with the shapes of `accumulate`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, wide = ir.FloatType(), ir.VectorType(ir.FloatType(), _LANES)
        quad = ir.VectorType(number, 4)
        left_array, panel_array, tile_array = (
            context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 2, 3)
        )
        index = context.get_value_type(types.intp)
        steps = builder.extract_value(panel_array.shape, 0)
        stride = builder.extract_value(left_array.strides, 0)  # in bytes
        start = builder.bitcast(left_array.data, ir.IntType(8).as_pointer())

        def load(kind: Any, pointer: Any) -> Any:
            loaded = builder.load(builder.bitcast(pointer, kind.as_pointer()))
            loaded.align = 4
            return loaded

        rows = []
        for r in range(_ROWS):
            place = builder.mul(builder.add(arguments[1], index(r)), stride)
            rows.append(builder.bitcast(builder.gep(start, [place]), number.as_pointer()))
        for first in range(0, WIDTH, _COLUMNS):
            places = {
                (r, c): builder.gep(tile_array.data, [index(r * WIDTH + first + c)])
                for r in range(_ROWS)
                for c in range(0, _COLUMNS, _LANES)
            }
            sums = {key: cgutils.alloca_once_value(builder, load(wide, at)) for key, at in places.items()}
            with cgutils.for_range(builder, steps) as loop:
                depth = builder.mul(loop.index, index(4))
                factors = [load(quad, builder.gep(pointer, [depth])) for pointer in rows]
                for k in range(4):
                    from_here = builder.add(builder.mul(depth, index(WIDTH)), index(k * WIDTH + first))
                    for c in range(0, _COLUMNS, _LANES):
                        column = builder.gep(panel_array.data, [builder.add(from_here, index(c))])
                        values = load(wide, column)
                        for r in range(_ROWS):
                            lane = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [k] * _LANES)
                            factor = builder.shuffle_vector(factors[r], factors[r], lane)
                            product = builder.fmul(factor, values, flags=("contract",))
                            total = builder.fadd(builder.load(sums[r, c]), product, flags=("contract",))
                            builder.store(total, sums[r, c])
            for key, at in places.items():
                stored = builder.store(builder.load(sums[key]), builder.bitcast(at, wide.as_pointer()))
                stored.align = 4
        return context.get_dummy_value()

    return types.void(left, row, panel, tile), build


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def accumulate(left, row, panel, tile):  # type: ignore[no-untyped-def]
    """tile += left[row : row + 4] · panel.

    left: (rows, depth), each row dense; panel: (depth / 4, 4 · WIDTH) and tile: (4 · WIDTH,), dense, hold four rows of
    WIDTH in each row of theirs.
    """
    _accumulate(left, row, panel, tile)  # type: ignore[call-arg]


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def multiply(left, row, panel, tile):  # type: ignore[no-untyped-def]
    """tile = left[row : row + 4] · panel."""
    for c in range(4 * WIDTH):
        tile[c] = np.float32(0)
    _accumulate(left, row, panel, tile)  # type: ignore[call-arg]
