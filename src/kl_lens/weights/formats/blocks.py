"""ggml's blocks in torch, on whatever device they are: the bytes of codes and scales, and the values they stand for.

Every operation is exact or rounded once, in one order. So a CPU and a GPU give the same bits, which are gguf-py's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kl_lens.base.accelerators import constant
from kl_lens.base.lazy import Tensor, torch
from kl_lens.weights.formats.format import Quantized

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Field:
    """Some bits of every code: byte i of a stretch of `run` bytes holds those of codes i, run + i, 2·run + i, … from
    its lowest bits up."""

    start: int  # the first byte in the block
    bits: int
    shift: int  # of these bits in the code
    run: int


@dataclass(frozen=True)
class Layout:
    """How a type's blocks hold codes and scales. Value = scale · (code − zero) + offset; with a table, its entries take
    the codes' places. Where blocks have small scales, scale = d · (small − small_zero)."""

    size: int  # weights of a block
    bytes: int
    group: int  # columns that share a scale
    highest: int  # the code; the lowest is 0
    codes: tuple[Field, ...]
    zero: int = 0
    table: bool = False  # levels are those of IQ4_NL, not evenly apart
    scale: int = 0  # byte where the FP16 scale is
    # The same for the minimum. With small scales it is taken off, else added.
    minimum: int | None = None
    small: tuple[Field, ...] = ()
    small_zero: int = 0
    small_highest: int = 0
    six: int | None = None  # byte where eight scales and eight minima of six bits are


def _halves(start: int) -> Field:
    return Field(start, 4, 0, 16)


_Q2_K = Layout(256, 84, 16, 3, (Field(16, 2, 0, 32),), scale=80, minimum=82)
_Q3_K = Layout(256, 110, 16, 7, (Field(0, 1, 2, 32), Field(32, 2, 0, 32)), 4, scale=108)
_Q4_K = Layout(256, 144, 32, 15, (Field(16, 4, 0, 32),), minimum=2)
_Q5_K = Layout(256, 176, 32, 31, (Field(16, 1, 4, 32), Field(48, 4, 0, 32)), minimum=2)
_Q6_K = Layout(
    256, 210, 16, 63, (Field(0, 4, 0, 64), Field(128, 2, 4, 32)), 32, scale=208
)
_IQ4_XS = Layout(256, 136, 32, 15, (_halves(8),), table=True)
_Q3_SMALL = (Field(96, 4, 0, 8), Field(104, 2, 4, 4))
_IQ4_SMALL = (Field(4, 4, 0, 1), Field(2, 2, 4, 1))
LAYOUTS = {
    "q4_0": Layout(32, 18, 32, 15, (_halves(2),), 8),
    "q4_1": Layout(32, 20, 32, 15, (_halves(4),), minimum=2),
    "q5_0": Layout(32, 22, 32, 31, (Field(2, 1, 4, 1), _halves(6)), 16),
    "q5_1": Layout(32, 24, 32, 31, (Field(4, 1, 4, 1), _halves(8)), minimum=2),
    "q8_0": Layout(32, 34, 32, 254, (Field(2, 8, 0, 1),), 127),
    "q2_k": replace(_Q2_K, small=(Field(0, 4, 0, 16),), small_highest=15),
    "q3_k": replace(_Q3_K, small=_Q3_SMALL, small_zero=32, small_highest=63),
    "q4_k": replace(_Q4_K, six=4, small_highest=63),
    "q5_k": replace(_Q5_K, six=4, small_highest=63),
    "q6_k": replace(
        _Q6_K, small=(Field(192, 8, 0, 1),), small_zero=128, small_highest=255
    ),
    "iq4_nl": Layout(32, 18, 32, 15, (_halves(2),), table=True),
    "iq4_xs": replace(_IQ4_XS, small=_IQ4_SMALL, small_zero=32, small_highest=63),
}


def _span(field: Field, count: int, device: torch.device) -> tuple[slice, Tensor]:
    """The bytes of a field that holds so many codes, and how far its parts are moved in a byte."""
    shifts = torch.arange(0, 8, field.bits, dtype=torch.uint8, device=device)
    return slice(field.start, field.start + count * field.bits // 8), shifts[:, None]


def read_codes(
    blocks: Tensor, fields: tuple[Field, ...], zero: int, count: int
) -> Tensor:
    """Codes as uint8, (blocks, count). Whole bytes are signed, and `zero` makes them codes."""
    codes = torch.zeros(len(blocks), count, dtype=torch.uint8, device=blocks.device)
    for field in fields:
        span, shifts = _span(field, count, blocks.device)
        packed = blocks[:, span].reshape(len(blocks), -1, 1, field.run)
        if field.bits == 8:
            return packed.reshape(codes.shape) + zero
        parts = (packed >> shifts) & (2**field.bits - 1)
        codes |= (parts << field.shift).reshape(codes.shape)
    return codes


def write_codes(
    blocks: Tensor, fields: tuple[Field, ...], zero: int, codes: Tensor
) -> None:
    """Codes as uint8, (blocks, count), put into their bytes."""
    for field in fields:
        span, shifts = _span(field, codes.shape[1], blocks.device)
        if field.bits == 8:
            blocks[:, span] = codes - zero
            continue
        parts = (codes >> field.shift) & (2**field.bits - 1)
        parts = parts.reshape(len(blocks), -1, len(shifts), field.run) << shifts
        blocks[:, span] = parts.sum(2, dtype=torch.uint8).reshape(len(blocks), -1)


def _interleaved(small: Tensor) -> Tensor:
    """Scales and minima of four groups in turn, or the other way round."""
    return small.view(-1, 2, 2, 4).transpose(1, 2).reshape(-1, 16)


def _read_six(packed: Tensor) -> Tensor:
    """Eight scales and eight minima, (blocks, 16), from twelve bytes: those of the first four groups whole in the first
    eight, with the upper bits of the others; their lower bits in the last four."""
    first = packed[:, :8]
    last = packed[:, 8:]
    second = torch.cat([last & 15, last >> 4], 1) | (first >> 6) << 4
    return _interleaved(torch.cat([first & 63, second], 1))


def _write_six(packed: Tensor, small: Tensor) -> None:
    first, second = _interleaved(small).split(8, 1)
    packed[:, :8] = first | second >> 4 << 6
    packed[:, 8:] = (second[:, :4] & 15) | second[:, 4:] << 4


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _scales(layout: Layout, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Of every group its scale and, where there is one, what is added, (blocks, groups)."""
    scale = _half(blocks, layout.scale)
    minimum = None if layout.minimum is None else _half(blocks, layout.minimum)
    if not layout.small_highest:
        return scale, minimum
    small = small_scales(layout, blocks)
    if minimum is None:
        return scale * small, None
    small, small_minima = small.chunk(2, 1)
    return scale * small, -(minimum * small_minima)


def small_scales(layout: Layout, blocks: Tensor) -> Tensor:
    """The small scales of blocks (blocks, bytes), and then the small minima where the type has them; whole numbers as
    float32, (blocks, groups or twice as many)."""
    if layout.six is not None:
        return _read_six(blocks[:, layout.six : layout.six + 12]).float()
    count = layout.size // layout.group * (1 if layout.minimum is None else 2)
    codes = read_codes(blocks, layout.small, layout.small_zero, count)
    return codes.float() - layout.small_zero


def write_small_scales(layout: Layout, blocks: Tensor, small: Tensor) -> None:
    codes = (small + layout.small_zero).to(torch.uint8)
    if layout.six is not None:
        _write_six(blocks[:, layout.six : layout.six + 12], codes)
    else:
        write_codes(blocks, layout.small, layout.small_zero, codes)


def dequantized(layout: Layout, data: Tensor) -> Tensor:
    """The float32 values of blocks (…, bytes of a row), (…, columns)."""
    blocks = data.reshape(-1, layout.bytes)
    values = torch.empty(len(blocks), layout.size, device=data.device)
    # Pieces that stay in a CPU's cache, or that keep a GPU busy.
    step = (1 << 18 if data.device.type == "cpu" else 1 << 26) // layout.size
    for piece, target in zip(blocks.split(step), values.split(step), strict=True):
        scales, offsets = _scales(layout, piece)
        codes = read_codes(piece, layout.codes, layout.zero, layout.size)
        if layout.table:
            levels = iq4_levels(data.device)[codes.int()]
        else:
            levels = (codes - layout.zero).view(torch.int8).float()
        grouped = target.view(len(piece), -1, layout.group)
        torch.mul(levels.view(grouped.shape), scales[:, :, None], out=grouped)
        if offsets is not None:
            grouped += offsets[:, :, None]
    return values.view(*data.shape[:-1], -1)


def iq4_levels(device: torch.device) -> Tensor:
    return constant(torch.tensor(IQ4_LEVELS, dtype=torch.float32), device)


def with_scales(
    layout: Layout,
    scale: Tensor,
    minimum: Tensor | None = None,
    small: Tensor | None = None,
) -> Tensor:
    """Blocks with these scales and every code at 0: scale and minimum (blocks,); small scales as in `small_scales`."""
    blocks = torch.zeros(len(scale), layout.bytes, dtype=torch.uint8, device=scale.device)
    write_codes(
        blocks, layout.codes, layout.zero, blocks.new_zeros(len(blocks), layout.size)
    )
    for value, start in ((scale, layout.scale), (minimum, layout.minimum)):
        if value is not None and start is not None:
            blocks[:, start : start + 2] = value.half()[:, None].view(torch.uint8)
    if small is not None:
        write_small_scales(layout, blocks, small)
    return blocks


def with_codes(quantized: Quantized, codes: Tensor) -> Quantized:
    """The same blocks with other codes, (…, rows, columns)."""
    layout = LAYOUTS[quantized.format]
    blocks = quantized.data.reshape(-1, layout.bytes).clone()
    write_codes(
        blocks, layout.codes, layout.zero, codes.to(torch.uint8).reshape(-1, layout.size)
    )
    return replace(quantized, data=blocks.reshape(quantized.data.shape))


def nearest(name: str, weight: Tensor) -> Quantized:
    """ggml's rounding for the types that search for nothing: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0."""
    layout = LAYOUTS[name]
    groups = weight.reshape(-1, layout.group)
    low, high = torch.aminmax(groups, dim=1, keepdim=True)
    minimum = None  # of a block of zeros: never −0
    if layout.minimum is not None:
        scale = (high - low) / layout.highest
        minimum = low[:, 0]
        groups = groups - low
    elif name == "q8_0":
        scale = torch.maximum(high, low.abs()) / layout.zero
    else:
        # The value of largest magnitude, the first of equals, goes to the lowest code.
        scale = groups.gather(1, groups.abs().argmax(1, keepdim=True)) / -layout.zero
    scaled = groups * torch.where(scale == 0, 0, 1 / scale)
    if name == "q8_0":  # halves away from zero
        size = scaled.abs()
        whole = size.floor()
        codes = scaled.sign() * (whole + (2 * (size - whole)).floor()) + layout.zero
    else:
        codes = (scaled + (layout.zero + 0.5)).trunc().clamp(0, layout.highest)
    blocks = with_scales(layout, scale[:, 0], minimum)
    write_codes(blocks, layout.codes, layout.zero, codes.to(torch.uint8))
    return Quantized(name, tuple(weight.shape), blocks.reshape(*weight.shape[:-1], -1))
