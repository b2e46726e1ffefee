"""The bytes that one token has to read, taken from the files themselves.

Bytes and formats are those on disk. A runtime that expands weights on loading reads more, and so reaches a smaller
share of the memory bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BODY, HEAD, LOOKUP = "body", "head", "lookup"
FLOATS = ("fp16", "fp32", "f16", "f32", "bf16")


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of an artifact."""

    name: str
    bytes: int
    parameters: int
    role: str  # body: used for every token; head: only for the last; lookup: rows are picked
    share: float = 1.0  # the part that one token reads


@dataclass(frozen=True)
class Contents:
    """The weights, and the state of a sequence."""

    weights: tuple[StoredWeight, ...]
    state_bytes: int  # of a fixed size: convolutions and states
    kv_bytes_per_position: float  # what attention reads for every earlier token

    @property
    def weight_bytes_per_token(self) -> float:
        return math.fsum(w.bytes * w.share for w in self.weights)

    @property
    def body_parameters(self) -> float:
        return math.fsum(w.parameters * w.share for w in self.weights if w.role == BODY)

    @property
    def head_parameters(self) -> float:
        return math.fsum(w.parameters * w.share for w in self.weights if w.role == HEAD)

    def bytes_per_token(self, context: float) -> float:
        return self.weight_bytes_per_token + self.state_bytes + self.kv_bytes_per_position * context
