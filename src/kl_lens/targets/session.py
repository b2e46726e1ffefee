"""A loaded artifact, ready to run. Evaluation, benchmarks and generation use it with any runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kl_lens.base.errors import TargetError

if TYPE_CHECKING:
    from kl_lens.targets.chat import Renderer

Logits = npt.NDArray[np.float32]
# How weights come into memory: read or mapped, repacked for kernels or (plain) as the file has them. lean: mapped, and
# pages of repacked tensors are returned to the system.
LOAD_MODES = ("lean", "read", "mapped", "read-plain", "mapped-plain")
ALL_LAYERS = 999  # on a GPU


@dataclass(frozen=True)
class SessionSettings:
    """How artifacts are run; each target uses the settings that it supports."""

    device: str = "CPU"
    threads: int | None = None
    gpu_layers: int = 0
    exact: bool = False  # float32 arithmetic instead of a deployment's
    load: str = "auto"  # how weights come into memory; llama.cpp

    @property
    def unusual(self) -> dict[str, Any]:
        """Settings that differ from the defaults, for a subject's record; without threads, which change only speed."""
        layers = "all" if self.gpu_layers >= ALL_LAYERS else self.gpu_layers
        settings = {"device": self.device, "gpu_layers": layers, "load": self.load, "exact": self.exact}
        return {key: value for key, value in settings.items() if value not in ("CPU", 0, "auto")}


@runtime_checkable
class Session(Protocol):
    """One sequence at a time, with the runtime's own state inside."""

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""

    @property
    def description(self) -> dict[str, Any]:
        """Library, version, build flags, device, threads, settings: recorded with every speed figure."""

    def reset(self) -> None:
        """Forget everything: the next token is the first."""

    def prefill(self, ids: Sequence[int]) -> Logits:
        """Feed several tokens after the earlier ones; returns the logits (vocabulary,) after the last."""

    def step(self, token: int) -> Logits:
        """Feed one token; returns the logits (vocabulary,) after it."""

    def logits(self, ids: Sequence[int]) -> Logits:
        """Reset, feed all tokens, and return the logits after each: (len(ids), vocabulary)."""

    def close(self) -> None:
        """Free the runtime's memory."""


@runtime_checkable
class TokenizingSession(Session, Protocol):
    """A session that can tokenize with the vocabulary inside its file."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a text or a turn, according to the runtime."""

    def require_vocabulary(self) -> None:
        """Raises TargetError if this file holds no vocabulary."""

    def tokenize(self, text: str, *, begin: bool = False) -> list[int]:
        """Special tokens are recognised by their text. `begin`: add the tokens that the file puts around a text."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones; an incomplete character becomes U+FFFD."""

    def chat_renderer(self) -> Renderer | None:
        """The chat template inside the file, or None."""


def checked_tokens(ids: Sequence[int], vocabulary: int, where: str) -> list[int]:
    """The tokens as integers; TargetError if there are none or one is outside the vocabulary."""
    tokens = [int(token) for token in ids]
    if not tokens:
        raise TargetError("no tokens to feed; give at least one")
    if wrong := [token for token in tokens if not 0 <= token < vocabulary]:
        raise TargetError(
            f"{where}: token {wrong[0]} is outside the vocabulary of {vocabulary}; "
            "the text was tokenized for another model: give this one's tokenizer with --tokenizer"
        )
    return tokens
