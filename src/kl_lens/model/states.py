"""Formats in which a runtime may keep recurrent states and attention caches, and what rounding to them does.

`int8` has one scale for each row (a channel's state, a head's key), `int8-head` one for each head of a state,
`int8-32` one for each 32 numbers of a row; scales are float16. `fp8` (E4M3) is scaled in the same way. `+feedback` also
keeps what rounding lost, in the same format, and adds it before the next rounding: twice the bytes. Caches, which are
written once, may also be in llama.cpp's block formats (`q8_0`), and in OpenVINO's integers with a zero point (`u8`,
`u4-32`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kl_lens.base.errors import FormatError
from kl_lens.run.records import CACHES, STATE
from kl_lens.weights.formats import get_format

ROW = "row"
HEAD = "head"
BLOCK = 32  # numbers of a row that share a scale in `-32`


@dataclass(frozen=True)
class Numbers:
    """Integers of −largest … largest, or floats with so many bits behind the point."""

    bits: int
    largest: float
    mantissa: int = 0  # 0: integers
    exponent: int = 0  # of the smallest normal number
    scaled: bool = True
    unsigned: bool = False  # integers of 0 … largest from the smallest value on; scale and offset in float32


NUMBERS = {
    "fp16": Numbers(16, 65504.0, 10, -14, scaled=False),
    # Nothing here depends on smaller exponents.
    "bf16": Numbers(16, 3.3895e38, 7, -100, scaled=False),
    "fp8": Numbers(8, 448.0, 3, -6),
    "int8": Numbers(8, 127.0),
    "int4": Numbers(4, 7.0),
    "u8": Numbers(8, 255.0, unsigned=True),
    "u4": Numbers(4, 15.0, unsigned=True),
}
_FLOATS = {10: torch.float16, 7: torch.bfloat16, 3: torch.float8_e4m3fn}  # by mantissa
GGML = ("q8_0", "q5_1", "q4_0", "iq4_nl")
# What is measured unasked. Two that share scales in the same way, as rows and heads of Mamba-1 do, are one.
MENUS = {
    STATE: (
        "fp16",
        "bf16",
        "fp8",
        "int8",
        "int8-head",
        "int8-32",
        "int4",
        "int4-head",
        "int4-32",
        "int8+feedback",
        "int4+feedback",
    ),
    **dict.fromkeys(
        CACHES, ("fp16", "bf16", "fp8", "int8", "int4", *GGML, "u8", "u4", "u4-32")
    ),
}


@dataclass(frozen=True)
class StateFormat:
    """How a state or a cache is kept: its numbers, what shares a scale, and whether rounding errors are kept, too."""

    numbers: Numbers
    scales: str = ROW
    feedback: bool = False
    ggml: str = ""  # llama.cpp's own format

    @classmethod
    def parse(cls, name: str, kind: str = STATE) -> StateFormat:
        """The format of a name such as `int8-head+feedback`, for one of KINDS."""
        if name in GGML and kind in CACHES:
            return cls(Numbers(get_format(name).bits, 0.0), str(BLOCK), ggml=name)
        base, _, feedback = name.partition("+")
        word, _, scales = base.partition("-")
        numbers = NUMBERS.get(word)
        allowed = ("", HEAD, str(BLOCK)) if kind == STATE else ("", str(BLOCK))
        if (
            numbers is None
            or feedback not in ("", "feedback")
            or scales not in allowed
            or (scales and not numbers.scaled)
            or (feedback and kind != STATE)
            or (numbers.unsigned and kind == STATE)
        ):
            raise FormatError(
                f"no format {name!r} for {kind}; there are {', '.join(MENUS[kind])}"
            )
        return cls(numbers, scales or ROW, bool(feedback))

    def fits(self, shape: Sequence[int]) -> str | None:
        """Why a head's (width, states), or a key of (…, width), cannot be kept so, or None."""
        if self.ggml and shape[-1] % BLOCK:
            return f"{shape[-1]} numbers per head do not divide into blocks of {BLOCK}"
        return None

    def group(self, width: int, states: int) -> int:
        """How many numbers of a head's (width, states) share a scale."""
        size = min(BLOCK, states) if states % BLOCK == 0 or states < BLOCK else states
        return {ROW: states, HEAD: width * states}.get(self.scales, size)

    def bits(self, shape: Sequence[int]) -> float:
        """Per number, scales and kept errors included."""
        if self.ggml:
            return get_format(self.ggml).bits_per_weight((1, BLOCK))
        width, states = (1, *shape)[-2:]
        scale = 64 if self.numbers.unsigned else 16
        scale_bits = scale / self.group(width, states) if self.numbers.scaled else 0
        return (self.numbers.bits + scale_bits) * (1 + self.feedback)

    def rounded(self, values: Tensor) -> Tensor:
        """Values (…, width, states) as they come back, without feedback."""
        numbers = self.numbers
        shape = values.shape
        if self.ggml:
            rows = values.float().reshape(-1, shape[-1])
            return get_format(self.ggml).roundtrip(rows).reshape(shape).to(values.dtype)
        groups = values.float().reshape(-1, self.group(*shape[-2:]))
        scale = torch.ones_like(groups[:, :1])
        offset = torch.zeros_like(groups[:, :1])
        if numbers.unsigned:
            offset, high = torch.aminmax(groups, dim=-1, keepdim=True)
            scale = (high - offset) / numbers.largest
        elif numbers.scaled:
            scale = (groups.abs().amax(-1, keepdim=True) / numbers.largest).half().float()
        groups = (groups - offset) / torch.where(scale > 0, scale, 1.0)
        groups = groups.clamp(-numbers.largest, numbers.largest)
        if numbers.mantissa:
            groups = groups.to(_FLOATS[numbers.mantissa]).float()
        else:
            groups = groups.round()
        return (groups * scale + offset).reshape(shape).to(values.dtype)


@dataclass(frozen=True)
class _Block:
    formats: Mapping[str, StateFormat]  # kind → how it is kept
    shapes: dict[str, tuple[int, ...]]  # kind → its shape, without sequences and tokens


_RUNNING: ContextVar[_Block | None] = ContextVar("running", default=None)


def running_format(kind: str, *shape: int) -> StateFormat | None:
    """For scans and attention: the format in which the block that runs now keeps this; None: as computed."""
    block = _RUNNING.get()
    if block is None:
        return None
    block.shapes.setdefault(kind, shape)
    return block.formats.get(kind)


@contextmanager
def keeping(
    blocks: Sequence[nn.Module], formats: Mapping[int, Mapping[str, StateFormat]]
) -> Iterator[dict[int, dict[str, tuple[int, ...]]]]:
    """Within, the blocks of these numbers keep states and caches in these formats. Yields what each has, once it has
    run: kind → shape."""
    shapes: dict[int, dict[str, tuple[int, ...]]] = {index: {} for index in formats}

    def entering(block: _Block | None) -> Any:
        def hook(*_: object) -> None:
            _RUNNING.set(block)

        return hook

    with ExitStack() as stack:
        for index, kinds in formats.items():
            block = blocks[index]
            enter = entering(_Block(kinds, shapes[index]))
            stack.enter_context(block.register_forward_pre_hook(enter))
            stack.enter_context(
                block.register_forward_hook(entering(None), always_call=True)
            )
        yield shapes
