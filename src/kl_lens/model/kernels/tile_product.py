"""A small matrix product inside numba kernels: four rows against a panel of 64 columns.

numba has no matrix product that may be called from parallel tasks, and most products of scans are too small for
a library call anyway. Written as loops, the compiler keeps the sums in memory; so the innermost part is given to LLVM
as vectors: sixteen columns of four rows stay in registers for the whole depth.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kl_lens.base.compiling import njit
from kl_lens.model.kernels.vector_math import FAST_MATH

# Columns of a panel.
WIDTH = 64
_ROWS = 4
# Columns whose sums are held in registers at a time, and the floats of one register.
_COLUMNS = 16
_LANES = 8 if binding.get_host_cpu_features().get("avx2") else 4


def _tile_product(from_zero: bool) -> Any:
    """out[at : at + 4] = matrix[row : row + 4] · panel, or += it; as code for numba functions."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.FloatType()
        wide = ir.VectorType(ir.FloatType(), _LANES)
        quad = ir.VectorType(number, 4)
        index = context.get_value_type(types.intp)

        def rows_of(argument: int, first: Any, count: int) -> list[Any]:
            """Pointers to `count` rows of an array, from row `first` on."""
            array = context.make_array(signature.args[argument])(
                context, builder, arguments[argument]
            )
            start = builder.bitcast(array.data, ir.IntType(8).as_pointer())
            stride = builder.extract_value(array.strides, 0)  # in bytes
            offsets = [
                builder.mul(builder.add(first, index(r)), stride) for r in range(count)
            ]
            return [
                builder.bitcast(builder.gep(start, [o]), number.as_pointer())
                for o in offsets
            ]

        def load(kind: Any, pointer: Any) -> Any:
            loaded = builder.load(builder.bitcast(pointer, kind.as_pointer()))
            loaded.align = 4
            return loaded

        panel = context.make_array(signature.args[2])(context, builder, arguments[2])
        steps = builder.udiv(builder.extract_value(panel.shape, 0), index(4))
        left_rows = rows_of(0, arguments[1], _ROWS)
        out_rows = rows_of(3, arguments[4], _ROWS)
        for first in range(0, WIDTH, _COLUMNS):
            targets = {
                (r, c): builder.gep(out_rows[r], [index(first + c)])
                for r in range(_ROWS)
                for c in range(0, _COLUMNS, _LANES)
            }
            zero = ir.Constant(wide, [0.0] * _LANES)
            sums = {
                key: cgutils.alloca_once_value(
                    builder, zero if from_zero else load(wide, target)
                )
                for key, target in targets.items()
            }
            with cgutils.for_range(builder, steps) as loop:
                depth = builder.mul(loop.index, index(4))
                factors = [
                    load(quad, builder.gep(pointer, [depth])) for pointer in left_rows
                ]
                panel_rows = rows_of(2, depth, 4)
                for k in range(4):
                    lane = ir.Constant(
                        ir.VectorType(ir.IntType(32), _LANES), [k] * _LANES
                    )
                    for c in range(0, _COLUMNS, _LANES):
                        values = load(
                            wide, builder.gep(panel_rows[k], [index(first + c)])
                        )
                        for r in range(_ROWS):
                            factor = builder.shuffle_vector(factors[r], factors[r], lane)
                            product = builder.fmul(factor, values, flags=("contract",))
                            total = builder.fadd(
                                builder.load(sums[r, c]), product, flags=("contract",)
                            )
                            builder.store(total, sums[r, c])
            for key, target in targets.items():
                stored = builder.store(
                    builder.load(sums[key]), builder.bitcast(target, wide.as_pointer())
                )
                stored.align = 4
        return context.get_dummy_value()

    def typed(typing_context, matrix, row, panel, out, at):  # type: ignore[no-untyped-def]
        return types.void(matrix, row, panel, out, at), build

    return intrinsic(typed)


_multiply = _tile_product(from_zero=True)
_accumulate = _tile_product(from_zero=False)


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def multiply(matrix, row, panel, out, at):  # type: ignore[no-untyped-def]
    """out[at : at + 4, :WIDTH] = matrix[row : row + 4] · panel.

    matrix: (rows, depth); panel: (depth, WIDTH); float32, rows dense, depth a multiple of four, nothing overlapping.
    """
    _multiply(matrix, row, panel, out, at)


@njit(fastmath=FAST_MATH, error_model="numpy", cache=True)
def accumulate(matrix, row, panel, out, at):  # type: ignore[no-untyped-def]
    """The same, added to what is there."""
    _accumulate(matrix, row, panel, out, at)
