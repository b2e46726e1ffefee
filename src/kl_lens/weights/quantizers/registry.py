"""The quantizers by name."""

from __future__ import annotations

from kl_lens.base.errors import FormatError
from kl_lens.weights.quantizers.base import Quantizer

TUNED = "tuned"  # recipes spell it with the digest of a tuning: `q4_k+tuned-1f2e3d4c`
QUANTIZERS: dict[str, Quantizer] = {}


def register(quantizer: Quantizer) -> Quantizer:
    if quantizer.name in QUANTIZERS:
        raise FormatError(f"quantizer {quantizer.name!r} is registered twice")
    QUANTIZERS[quantizer.name] = quantizer
    return quantizer


def known_quantizers() -> tuple[str, ...]:
    """The names of all quantizers, in order of registration."""
    return tuple(QUANTIZERS)


def get_quantizer(name: str) -> Quantizer:
    try:
        return QUANTIZERS[TUNED if name.lower().startswith(f"{TUNED}-") else name.lower()]
    except KeyError:
        raise FormatError(f"unknown method {name!r}; known: {', '.join(QUANTIZERS)}") from None
