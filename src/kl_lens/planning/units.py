"""Numbers as people read them, for messages and tables."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """Decimal units, as file managers and the paper use them."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def human_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


def human_kl(value: float) -> str:
    return f"{value:.4g} nats"
