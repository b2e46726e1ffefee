"""ggml's IQ2 and IQ3 types, where four or eight weights share one code: their bytes taken apart and put together.

A block of 256 weights has one FP16 scale, a 4-bit scale for every 16 or 32 weights, an index into a fixed grid of
vectors for every 4 or 8 weights, and a sign for every weight. Where `even` is set, the signs of 8 weights are stored in
7 bits: the number of minus signs is even.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kl_lens.weights.formats.gguf_blocks import gguf_module

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.uint16]
RUN = 8  # weights whose signs are stored together


@dataclass(frozen=True)
class Lattice:
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
    grid: npt.NDArray[np.float32] = np.ascontiguousarray(kind.grid.reshape(-1, LATTICES[name].width))
    return grid


def run_scales(name: str, blocks: Bytes) -> npt.NDArray[np.float32]:
    """What the grid is multiplied by in every run of 8 weights, (blocks, 32)."""
    count, gguf = len(blocks), gguf_module()
    first = with_codes(name, blocks, np.zeros((count, 256 // LATTICES[name].width), np.uint16), _NO_SIGNS)
    values = gguf.dequantize(first, gguf.GGMLQuantizationType[name.upper()])
    scales: npt.NDArray[np.float32] = values.reshape(count, 32, RUN)[..., 0] / _grid(name)[0, 0]
    return scales


def with_scale(blocks: Bytes, scales: npt.NDArray[np.float16]) -> Bytes:
    """The same blocks with other FP16 scales, (blocks,)."""
    changed = blocks.copy()
    changed[:, :2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return changed


def with_codes(name: str, blocks: Bytes, codes: Codes, signs: Bytes) -> Bytes:
    """The same blocks and scales with other codes, (blocks, 256 / width), and signs, (blocks, 32), a bit per weight."""
    count, changed = len(blocks), blocks.copy()
    signs = np.broadcast_to(signs, (count, 32))
    low = (codes & 255).astype(np.uint8)
    if name == "iq2_xs":
        changed[:, 2:66] = (codes | (signs & 127).astype(np.uint16) << 9).view(np.uint8)
    elif name == "iq2_s":
        changed[:, 2:34], changed[:, 34:66] = low, signs
        changed[:, 66:74] = _joined((codes >> 8).reshape(count, 8, 4), 2)
    elif name == "iq3_s":
        changed[:, 2:66], changed[:, 74:106] = low, signs
        changed[:, 66:74] = _joined((codes >> 8).reshape(count, 8, 8), 1)
    else:  # the signs of 32 weights and their 4-bit scale are one 32-bit number
        words = slice(66, 98) if name == "iq3_xxs" else slice(2, 66)
        parts = np.ascontiguousarray(blocks[:, words]).view(np.uint32).reshape(count, 8, -1)
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
