"""ggml's blocks taken apart: the levels that a block's scales leave, and codes put back into its bytes.

The scales themselves are never decoded here: gguf-py dequantizes the block with every code at its lowest and at its
highest, and the levels lie evenly between. Only where a type keeps its codes has to be known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kl_lens.formats import Quantized
from kl_lens.formats.gguf_blocks import GGUFFormat
from kl_lens.quantizers.levels import Levels

Codes = npt.NDArray[Any]  # uint8 (blocks, columns of a block)
Blocks = npt.NDArray[Any]  # uint8 (blocks, bytes of a block)


def _halves(codes: Codes, run: int) -> Codes:
    """Four bits each: of every 2·run codes the first half in the low halves of the bytes, the second in the high."""
    pairs = codes.reshape(len(codes), -1, 2, run) & 15
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(len(codes), -1)


def _quarters(codes: Codes) -> Codes:
    """Two bits each: of every 128 codes four runs of 32, in the bits of 32 bytes from the lowest up."""
    runs = (codes & 3).reshape(len(codes), -1, 4, 32)
    return (runs[:, :, 0] | runs[:, :, 1] << 2 | runs[:, :, 2] << 4 | runs[:, :, 3] << 6).reshape(
        len(codes), -1
    )


def _bits(codes: Codes, bit: int) -> Codes:
    """One bit of every code: eight runs of 32 in the bits of 32 bytes."""
    runs = (codes >> bit & 1).reshape(len(codes), 8, 32)
    return np.bitwise_or.reduce(runs << np.arange(8, dtype=np.uint8)[:, None], axis=1)


def _fifth_bits(codes: Codes) -> Codes:
    """Q5_0 and Q5_1: one bit of each of 32 codes, in order, in four bytes."""
    return np.packbits(codes >> 4 & 1, axis=1, bitorder="little")


def _q4(start: int) -> Callable[[Blocks, Codes], None]:
    def write(blocks: Blocks, codes: Codes) -> None:
        blocks[:, start:] = _halves(codes, 16)

    return write


def _q5(start: int) -> Callable[[Blocks, Codes], None]:
    def write(blocks: Blocks, codes: Codes) -> None:
        blocks[:, start : start + 4] = _fifth_bits(codes)
        blocks[:, start + 4 :] = _halves(codes, 16)

    return write


def _q8_0(blocks: Blocks, codes: Codes) -> None:
    blocks[:, 2:] = codes - np.uint8(127)  # −127 to 127, in two's complement


def _q2_k(blocks: Blocks, codes: Codes) -> None:
    blocks[:, 16:80] = _quarters(codes)


def _q3_k(blocks: Blocks, codes: Codes) -> None:
    blocks[:, :32] = _bits(codes, 2)
    blocks[:, 32:96] = _quarters(codes)


def _q4_k(blocks: Blocks, codes: Codes) -> None:
    blocks[:, 16:] = _halves(codes, 32)


def _q5_k(blocks: Blocks, codes: Codes) -> None:
    blocks[:, 16:48] = _bits(codes, 4)
    blocks[:, 48:] = _halves(codes, 32)


def _q6_k(blocks: Blocks, codes: Codes) -> None:
    blocks[:, :128] = _halves(codes, 64)
    blocks[:, 128:192] = _quarters(codes >> 4)


@dataclass(frozen=True)
class Layout:
    """How a type's blocks hold their codes."""

    group: int  # columns that share a scale
    highest: int  # the code; the lowest is 0
    write: Callable[[Blocks, Codes], None]
    table: bool = False  # levels are those of IQ4_NL, not evenly apart


LAYOUTS = {
    "q4_0": Layout(32, 15, _q4(2)),
    "q4_1": Layout(32, 15, _q4(4)),
    "q5_0": Layout(32, 31, _q5(2)),
    "q5_1": Layout(32, 31, _q5(4)),
    "q8_0": Layout(32, 254, _q8_0),
    "q2_k": Layout(16, 3, _q2_k),
    "q3_k": Layout(16, 7, _q3_k),
    "q4_k": Layout(32, 15, _q4_k),
    "q5_k": Layout(32, 31, _q5_k),
    "q6_k": Layout(16, 63, _q6_k),
    "iq4_nl": Layout(32, 15, _q4(2), table=True),
    "iq4_xs": Layout(32, 15, _q4(8), table=True),
}
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def block_levels(fmt: GGUFFormat, quantized: Quantized) -> Levels:
    """The levels that the scales of a quantized matrix leave to its codes."""
    layout = LAYOUTS[fmt.name]

    def all_at(code: int) -> torch.Tensor:
        codes = torch.full(quantized.shape, float(code))
        return fmt.dequantize(with_codes(fmt, quantized, codes))[:, :: layout.group].contiguous()

    if layout.table:
        # Code 8 is level 1: what it stands for is the scale.
        table = tuple(float(level) for level in IQ4_LEVELS)
        return Levels(layout.group, all_at(8), 0, layout.highest, table=table)
    lowest, highest = all_at(0), all_at(layout.highest)
    return Levels(layout.group, (highest - lowest) / layout.highest, 0, layout.highest, offsets=lowest)


def with_codes(fmt: GGUFFormat, quantized: Quantized, codes: torch.Tensor) -> Quantized:
    """The same blocks with other codes, (rows, columns)."""
    rows = quantized.data.cpu().numpy()
    blocks = rows.reshape(-1, fmt.block_bytes).copy()
    whole = codes.cpu().numpy().astype(np.uint8).reshape(-1, fmt.block_size)
    LAYOUTS[fmt.name].write(blocks, whole)
    data = torch.from_numpy(blocks.reshape(rows.shape)).to(quantized.data.device)
    return Quantized(quantized.format, quantized.shape, data)
