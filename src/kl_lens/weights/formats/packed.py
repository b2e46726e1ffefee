"""Integers that compressed-tensors' `pack-quantized` has and OpenVINO has not: the rules of `integer.py`
with 3, 5, 6 and 8 bits. A row of codes is one stream of bits; groups of 32 or more end with a 32-bit word."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kl_lens.weights.formats.format import Quantized, register
from kl_lens.weights.formats.integer import (
    SignedScaleFormat,
    ZeroPointFormat,
    pack_codes,
    register_groups,
)


@dataclass(frozen=True)
class PackedFormat(SignedScaleFormat):
    """Codes of a number of bits that does not divide a byte, stored without a sign."""

    def pack(self, quantized: Quantized) -> npt.NDArray[np.uint8]:
        return pack_codes(quantized.data + 2 ** (self.bits - 1), self.bits)


register(ZeroPointFormat("uint8", 8, None, False))
for _bits in (3, 5, 6):
    register_groups(PackedFormat, f"int{_bits}", _bits, True)
register_groups(SignedScaleFormat, "int8", 8, True, groups=(64, 32))  # NNCF has 128
register_groups(ZeroPointFormat, "uint8", 8, False, last="uint8")
