"""ggml's types by name and by number. Two of them are grouped formats here: their blocks hold the same codes and
scales, so how these are chosen is not written twice.

Q2_0, of llama.cpp since July 2026: 64 weights in 18 bytes, value = d · (code − 1), codes 0 to 3. With d = −scale these
are two-bit integers whose scale has a sign. ggml's own quantizer leaves one level unused, for twice the error.

MXFP4: 32 weights in 17 bytes, the exponent first, then the codes of E2M1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from kl_lens.base.lazy import Tensor, torch
from kl_lens.weights.formats.blocks import Field, read_codes, write_codes
from kl_lens.weights.formats.format import FP16, Quantized, Shape, get_format, register
from kl_lens.weights.formats.gguf_blocks import gguf_module
from kl_lens.weights.formats.integer import SignedScaleFormat
from kl_lens.weights.formats.tables import MX_ZERO

Q2_0 = SignedScaleFormat("q2_0", 2, 64, ("iq4_nl", FP16))
MXFP4 = get_format("mxfp4")
register(Q2_0)


@dataclass(frozen=True)
class GGMLType:
    name: str  # as llama.cpp spells it: Q4_K
    number: int
    block: int  # weights
    bytes: int  # of a block


@cache
def ggml_types() -> dict[str, GGMLType]:
    """Every type by our name of it (`q4_k`): those of the package gguf, and one that it lacks."""
    gguf = gguf_module()
    types = [GGMLType("Q2_0", 42, 64, 18)]
    for kind in gguf.GGMLQuantizationType:
        types.append(GGMLType(kind.name, int(kind), *gguf.GGML_QUANT_SIZES[kind]))
    names = {"F16": FP16, "F32": "fp32"}
    return {names.get(kind.name, kind.name.lower()): kind for kind in types}


def as_blocks(quantized: Quantized) -> Tensor:
    """The rows of a weight as ggml has them, (…, rows, bytes)."""
    name = quantized.format
    if name not in (Q2_0.name, MXFP4.name):
        return quantized.data
    assert quantized.scales is not None
    kind = ggml_types()[name]
    codes = quantized.data.reshape(-1, kind.block)
    blocks = torch.zeros(len(codes), kind.bytes, dtype=torch.uint8, device=codes.device)
    scales = quantized.scales
    if name == Q2_0.name:
        codes = 1 - codes
        scales = -scales
    else:
        index = codes.int() - MX_ZERO
        codes = index.abs() + 8 * (index < 0)
    write_codes(blocks, _codes_of(kind), 0, codes.to(torch.uint8))
    blocks[:, : scales.itemsize] = scales.reshape(-1, 1).view(torch.uint8)
    return blocks.reshape(*quantized.shape[:-1], -1)


def from_blocks(name: str, shape: Shape, data: Tensor) -> Quantized:
    """The weight that `as_blocks` gave these rows for."""
    stored = Quantized(name, shape, data.reshape(*shape[:-1], -1))
    if name not in (Q2_0.name, MXFP4.name):
        return stored
    kind = ggml_types()[name]
    blocks = data.reshape(-1, kind.bytes)
    codes = read_codes(blocks, _codes_of(kind), 0, kind.block).reshape(shape)
    if name == Q2_0.name:
        scales = -blocks[:, :2].contiguous().view(torch.float16)
        codes = 1 - codes.view(torch.int8)
    else:
        scales = blocks[:, :1]
        codes = MX_ZERO + torch.where(codes > 7, 8 - codes, codes)
    return replace(stored, data=codes, scales=scales.reshape(*shape[:-1], -1))


def _codes_of(kind: GGMLType) -> tuple[Field, ...]:
    return (Field(2, 2, 0, 1) if kind.name == "Q2_0" else Field(1, 4, 0, 16),)
