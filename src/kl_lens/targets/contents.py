"""The bytes that one token has to read, taken from the files themselves.

Bytes and formats are those on disk. A runtime that expands weights on loading reads more, and so reaches a smaller
share of the memory bound.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOATS = ("fp16", "fp32", "f16", "f32", "bf16")


@dataclass(frozen=True)
class Contents:
    """What one token reads: of an untied embedding one row, of experts the chosen ones."""

    weight_bytes: float
    state_bytes: int  # of a fixed size: convolutions and states
    kv_bytes_per_position: float  # what attention reads for every earlier token

    def bytes_per_token(self, context: float) -> float:
        return self.weight_bytes + self.state_bytes + self.kv_bytes_per_position * context
