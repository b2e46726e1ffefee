"""Integers that compressed-tensors' `pack-quantized` has and OpenVINO has not: the rules of `integer.py`
with 3, 5, 6 and 8 bits. A row of codes is one stream of bits that ends with a 32-bit word."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kl_lens.weights.formats.format import Quantized, register
from kl_lens.weights.formats.integer import SignedScaleFormat, ZeroPointFormat


@dataclass(frozen=True)
class PackedFormat(SignedScaleFormat):
    """Codes of a number of bits that does not divide a byte."""

    def _bytes(self, shape: tuple[int, ...]) -> int:
        words = math.prod(shape[:-1]) * -(-shape[-1] * self.bits // 32)
        return 4 * words + self._groups(shape) * self.scale_dtype.itemsize

    def pack(self, quantized: Quantized) -> npt.NDArray[np.uint8]:
        codes = (quantized.data.cpu().numpy() + np.int8(2 ** (self.bits - 1))).view(np.uint8)
        single = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., : self.bits]
        rows = single.reshape(-1, codes.shape[-1] * self.bits)
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 32)))
        return np.packbits(padded, axis=-1, bitorder="little").reshape(-1)


register(ZeroPointFormat("uint8", bits=8, group_size=None, symmetric=False))
for _group in (32, 64, 128):  # a format's replacements come before it
    _smaller = [other for other in (64, 32) if other < _group]
    for _bits in (3, 5, 6):
        _others = (*(f"int{_bits}-g{other}" for other in _smaller), "int8")
        register(PackedFormat(f"int{_bits}-g{_group}", _bits, _group, True, fallback=_others))
    for _name, _kind in (("int8", SignedScaleFormat), ("uint8", ZeroPointFormat)):
        if (_name, _group) != ("int8", 128):  # NNCF has it
            _others = (*(f"{_name}-g{other}" for other in _smaller), _name)
            register(_kind(f"{_name}-g{_group}", 8, _group, _name == "int8", fallback=_others))
