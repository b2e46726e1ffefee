"""Integers that compressed-tensors' `pack-quantized` has and OpenVINO has not: the rules of `integer.py`
with 3, 5, 6 and 8 bits. A row of codes is one stream of bits; groups of 32 or more end with a 32-bit word."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kl_lens.weights.formats.format import Quantized, register
from kl_lens.weights.formats.integer import SignedScaleFormat, ZeroPointFormat, pack_codes


@dataclass(frozen=True)
class PackedFormat(SignedScaleFormat):
    """Codes of a number of bits that does not divide a byte, stored without a sign."""

    def pack(self, quantized: Quantized) -> npt.NDArray[np.uint8]:
        return pack_codes(quantized.data + 2 ** (self.bits - 1), self.bits)


register(ZeroPointFormat("uint8", bits=8, group_size=None, symmetric=False))
for _group in (32, 64, 128):  # a format's replacements come before it
    _smaller = [other for other in (64, 32) if other < _group]
    for _bits in (3, 5, 6):
        _others = (*(f"int{_bits}-g{other}" for other in _smaller), "int8")
        register(
            PackedFormat(f"int{_bits}-g{_group}", _bits, _group, True, fallback=_others)
        )
    for _name, _kind in (("int8", SignedScaleFormat), ("uint8", ZeroPointFormat)):
        if (_name, _group) != ("int8", 128):  # NNCF has it
            _others = (*(f"{_name}-g{other}" for other in _smaller), _name)
            register(
                _kind(f"{_name}-g{_group}", 8, _group, _name == "int8", fallback=_others)
            )
