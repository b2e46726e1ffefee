"""Parsing and printing of sizes, speeds and shares."""

from __future__ import annotations

import math
import re

from kl_lens.base.errors import KLLensError

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_LARGEST = 10**18  # bytes


def parse_bytes(text: str) -> int:
    """`90MB`, `1.5GiB`, `4096` → bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]i?)?b?\s*", text.lower())
    if not match:
        raise KLLensError(
            f"{text!r} is not a size; give for example 90MB, 1.5GiB or 4096"
        )
    unit = match[2] or ""
    size = float(match[1]) * (_BINARY.get(unit) or _DECIMAL[unit])
    if size > _LARGEST:
        raise KLLensError(
            f"{text[:20]}… is larger than any disk; give for example 90MB or 1.5GiB"
        )
    return int(size)


def parse_count(text: str) -> int:
    """`4096`, `32k` → 32,768."""
    match = re.fullmatch(r"\s*(\d{1,9})(k?)\s*", text.lower())
    if not match:
        raise KLLensError(
            f"{text!r} is not a number of tokens; give for example 4096 or 32k"
        )
    return int(match[1]) * (1024 if match[2] else 1)


def parse_share(text: str) -> float:
    """`45%` or `0.45` → a share between 0 and 1."""
    try:
        value = float(text.strip().removesuffix("%")) / (
            100 if text.strip().endswith("%") else 1
        )
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise KLLensError(f"{text!r} is not a share; give for example 3% or 0.03")
    return value


def parse_names(text: str) -> tuple[str, ...]:
    """`a, b,` → ("a", "b"), without repeats."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def tag_of(model: str) -> str:
    """A model's name as part of a file name."""
    return re.sub(r"[^\w.-]+", "-", model).strip("-.") or "model"


def spell_bytes(count: int) -> str:
    """Exact inverse of `parse_bytes`."""
    for unit in ("GB", "MB", "kB"):
        size = _DECIMAL[unit[0].lower()]
        text = f"{count / size:.12g}{unit}"
        if count >= size and parse_bytes(text) == count:
            return text
    return str(count)


def spell_share(share: float) -> str:
    """Inverse of `parse_share`."""
    text = f"{100 * share:g}%"
    return text if parse_share(text) == share else repr(share)


def human_bytes(count: float) -> str:
    """Decimal units, as file managers and the paper use them."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def human_speed(seconds: float) -> str:
    """Of seconds per token."""
    return f"{1 / seconds if seconds else math.inf:.4g} tokens/s"


def human_kl(value: float) -> str:
    return f"{value:.4g} nats"
