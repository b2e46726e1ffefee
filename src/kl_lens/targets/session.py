"""A loaded artifact, ready to run. Evaluation, benchmarks and generation use it with any runtime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kl_lens.base.errors import TargetError

Logits = npt.NDArray[np.float32]
Messages = Sequence[Mapping[str, str]]  # role (system, user, assistant) and content
Renderer = Callable[[Messages], str]
# How weights come into memory: read or mapped, repacked for kernels or (plain) as the file has them. lean: mapped, and
# pages of repacked tensors are returned to the system.
LOAD_MODES = ("lean", "read", "mapped", "read-plain", "mapped-plain")
ALL_LAYERS = 999  # on a GPU
CACHES = "caches"  # in an artifact's settings: `keys` and `values` → the format that the runtime keeps them in


@dataclass(frozen=True)
class SessionSettings:
    """How artifacts are run; each target uses the settings that it supports."""

    device: str = "CPU"
    threads: int | None = None
    gpu_layers: int = 0
    exact: bool = False  # float32 arithmetic instead of a deployment's
    load: str = "auto"  # how weights come into memory; llama.cpp
    # Tokens that each sequence has room for; None: the runtime's own choice.
    context: int | None = None
    batch: int = 1  # sequences that memory is kept for

    @property
    def label(self) -> str:
        """The device's name in a profile."""
        return "GPU" if self.gpu_layers else self.device

    @property
    def unusual(self) -> dict[str, Any]:
        """Settings that differ from the defaults, for a subject's record; without threads, which change only speed."""
        layers = "all" if self.gpu_layers >= ALL_LAYERS else self.gpu_layers
        settings = {
            "device": self.device,
            "gpu_layers": layers,
            "load": self.load,
            "exact": self.exact,
        }
        return {
            key: value
            for key, value in settings.items()
            if value not in ("CPU", 0, "auto")
        }


class Session(ABC):
    """One sequence at a time, with the runtime's own state inside. A target's only says how it is fed."""

    path: Path  # for errors
    vocabulary: int  # columns of the logits

    @property
    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Library, version, build flags, device, threads, settings: recorded with every speed figure."""

    @abstractmethod
    def feed(self, tokens: list[int], *, every: bool) -> Logits:
        """Continues after the tokens fed before; logits after every token, or only after the last."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything: the next token is the first."""

    @abstractmethod
    def close(self) -> None:
        """Free the runtime's memory."""

    def prefill(self, ids: Sequence[int]) -> Logits:
        """Feed several tokens after the earlier ones; returns the logits (vocabulary,) after the last."""
        return self.feed(self._checked(ids), every=False)[-1]

    def step(self, token: int) -> Logits:
        """Feed one token; returns the logits (vocabulary,) after it."""
        return self.prefill([token])

    def logits(self, ids: Sequence[int]) -> Logits:
        """Reset, feed all tokens, and return the logits after each: (len(ids), vocabulary)."""
        tokens = self._checked(ids)
        self.reset()
        return self.feed(tokens, every=True)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        return checked_tokens(ids, self.vocabulary, str(self.path))

    def closed(self) -> TargetError:
        return TargetError(f"{self.path}: this session is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class ArtifactTokenizer:
    """Encodes and decodes text."""

    # Recognises special tokens by their text; adds none.
    encode: Callable[[str], list[int]]
    # The same, plus the tokens that the tokenizer adds, such as <s>.
    begin: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]  # tokens that end a text or a turn; empty if unknown
    render: Renderer | None = None  # the chat template, if any


class TokenizingSession(Session):
    """A session that can tokenize with the vocabulary inside its file."""

    @abstractmethod
    def tokenizer(self) -> ArtifactTokenizer:
        """Raises TargetError if this file holds no vocabulary."""


def checked_tokens(ids: Sequence[int], vocabulary: int, source: str) -> list[int]:
    tokens = [int(token) for token in ids]
    if not tokens:
        raise TargetError("no tokens to feed; give at least one")
    if wrong := [token for token in tokens if not 0 <= token < vocabulary]:
        raise TargetError(
            f"{source}: token {wrong[0]} is outside the vocabulary of {vocabulary}; "
            "the text was tokenized for another model: give this one's tokenizer with --tokenizer"
        )
    return tokens
