"""Formats by name, and replacements for shapes that a format does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from kl_lens.base.errors import FormatError
from kl_lens.weights.formats.base import Format

FP16 = "fp16"  # the format of weights without another

_formats: dict[str, Format] = {}

AnyFormat = TypeVar("AnyFormat", bound=Format)


def register(fmt: AnyFormat) -> AnyFormat:
    """Registers a format. A new format is one file that ends in this call."""
    if fmt.name in _formats:
        raise FormatError(f"format {fmt.name!r} is registered twice")
    _formats[fmt.name] = fmt
    return fmt


def known_formats() -> tuple[str, ...]:
    """All names, in order of registration."""
    return tuple(_formats)


def get_format(name: str) -> Format:
    try:
        return _formats[name.lower()]
    except KeyError:
        raise FormatError(f"unknown format {name!r}; known: {', '.join(_formats)}") from None


def fitting_format(fmt: Format | str, shape: Sequence[int]) -> tuple[Format, str | None]:
    """The format for a weight of this shape, and why it differs from the wanted one (or None)."""
    wanted = get_format(fmt) if isinstance(fmt, str) else fmt
    reason = wanted.fits(shape)
    if reason is None:
        return wanted, None
    for name in wanted.fallback:
        substitute = get_format(name)
        if substitute.fits(shape) is None:
            return substitute, f"{wanted.name}: {reason}; stored as {name}"
    raise FormatError(f"no format can replace {wanted.name}: {reason}")
