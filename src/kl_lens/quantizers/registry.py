"""The quantizers by name."""

from __future__ import annotations

from kl_lens.errors import FormatError
from kl_lens.quantizers.base import Quantizer

_quantizers: dict[str, Quantizer] = {}


def register(quantizer: Quantizer) -> Quantizer:
    if quantizer.name in _quantizers:
        raise FormatError(f"quantizer {quantizer.name!r} is registered twice")
    _quantizers[quantizer.name] = quantizer
    return quantizer


def known_quantizers() -> tuple[str, ...]:
    """The names of all quantizers, in order of registration."""
    return tuple(_quantizers)


def get_quantizer(name: str) -> Quantizer:
    try:
        return _quantizers[name.lower()]
    except KeyError:
        raise FormatError(f"unknown method {name!r}; known: {', '.join(_quantizers)}") from None
