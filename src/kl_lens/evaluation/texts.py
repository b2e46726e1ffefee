"""The text that models are judged on: its windows, and for each the tokens and words that count."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kl_lens.subjects import content_digest
from kl_lens.text import Windows, evaluation_windows
from kl_lens.text.documents import TextSource


@dataclass(frozen=True)
class TextWindow:
    """One window: all of it is read, the tokens from `first_target` on are scored."""

    ids: tuple[int, ...]
    first_target: int
    words: int  # that begin in the scored tokens
    key: str  # of tokens and first target: what was scored once is known again in any longer text

    @property
    def targets(self) -> int:
        return len(self.ids) - self.first_target


@dataclass(frozen=True, eq=False)
class EvaluationText:
    """A text in windows, with the protocol that a perplexity must name."""

    windows: Windows
    items: tuple[TextWindow, ...]
    limit: int | None

    @property
    def label(self) -> str:
        return self.windows.label

    @property
    def targets(self) -> int:
        return sum(item.targets for item in self.items)

    @cached_property
    def protocol(self) -> dict[str, Any]:
        return {
            "dataset": self.windows.source,
            "split": self.windows.split,
            "window": self.windows.length,
            "stride": self.windows.stride,
            "limit": self.limit,
            "windows": len(self.items),
            "tokens": self.targets,
            "words": sum(item.words for item in self.items),
            "fingerprint": self.windows.fingerprint,
        }

    @property
    def digest(self) -> str:
        return protocol_digest(self.protocol)


def protocol_digest(protocol: dict[str, Any]) -> str:
    """A short name for a protocol; a text that merely moved to another folder keeps it."""
    content = {key: value for key, value in protocol.items() if key != "dataset"}
    return content_digest(content, size=6)


def prepare_text(
    source: TextSource | str,
    tokenizer: Any,
    *,
    window: int = 2048,
    stride: int | None = None,
    limit: int | None = None,
) -> EvaluationText:
    """Cuts a text into windows, one every `stride` tokens, and counts what will be scored.

    With a stride below the window, windows overlap and only the last `stride` tokens of each are scored: every
    token then has at least window − stride tokens of context. Nothing comes before a window's first token, so
    without overlap that token is read and not scored.

    Words are counted where they begin, as pieces between blanks: those of the window's text from one token
    before the first scored one, less those that token holds itself.
    """
    windows = evaluation_windows(source, tokenizer, length=window, stride=stride, limit=limit)
    items = []
    for index in range(len(windows)):
        ids = windows.ids[index].tolist()
        first = windows.first_target(index)
        words = _words(tokenizer, ids[first - 1 :]) - _words(tokenizer, ids[first - 1 : first])
        items.append(TextWindow(tuple(ids), first, words, _key(ids, first)))
    return EvaluationText(windows, tuple(items), limit)


def _words(tokenizer: Any, ids: list[int]) -> int:
    return len(decode(tokenizer, ids).split())


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of tokens, blanks as they are; transformers would tidy them away."""
    if hasattr(tokenizer, "backend_tokenizer"):
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return str(tokenizer.decode(ids))


def _key(ids: list[int], first_target: int) -> str:
    digest = hashlib.blake2b(np.asarray([first_target, *ids], np.int64).tobytes(), digest_size=12)
    return digest.hexdigest()
