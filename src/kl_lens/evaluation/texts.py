"""Evaluation data: windows of text or of images, and the rows of each that are scored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from kl_lens.model.tasks import IMAGE, TEXT, LanguageTask, Source, Task
from kl_lens.run.subjects import content_digest
from kl_lens.text import Windows
from kl_lens.text.documents import TextSource


@dataclass(frozen=True)
class TextWindow:
    """One window; tokens from `first_target` on are scored."""

    ids: tuple[int, ...]
    first_target: int
    words: int  # words that begin in the scored tokens
    key: str  # hash of tokens and first target, so that stored scores are found again in any longer text

    @property
    def answers(self) -> tuple[int, ...]:
        """The true tokens."""
        return self.ids[self.first_target :]

    @property
    def rows(self) -> slice:
        """The logits that predict the answers."""
        return slice(self.first_target - 1, -1)

    @property
    def targets(self) -> int:
        return len(self.answers)


@dataclass(frozen=True)
class ImageWindow:
    """One window of images, all of them scored."""

    ids: tuple[int, ...]
    answers: tuple[int, ...]
    key: str

    words: ClassVar[int] = 0
    rows: ClassVar[slice] = slice(None)

    @property
    def targets(self) -> int:
        return len(self.answers)


@dataclass(frozen=True, eq=False)
class EvaluationText:
    """A text or images in windows, with the protocol that a perplexity must state."""

    windows: Windows
    items: tuple[TextWindow | ImageWindow, ...]
    limit: int | None
    task: str = TEXT

    @property
    def label(self) -> str:
        return self.windows.label

    @property
    def targets(self) -> int:
        return sum(item.targets for item in self.items)

    def first(self, windows: int) -> EvaluationText:
        return replace(self, items=self.items[:windows])

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
            **({} if self.task == TEXT else {"task": self.task}),
        }

    @property
    def digest(self) -> str:
        return protocol_digest(self.protocol)


def protocol_digest(protocol: dict[str, Any]) -> str:
    """A short digest of a protocol; the folder of the text does not matter."""
    content = {key: value for key, value in protocol.items() if key != "dataset"}
    return content_digest(content, size=6)


def prepare(
    source: Source,
    task: Task,
    *,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
) -> EvaluationText:
    """Evaluation data for a task, in windows of tokens or images."""
    return _PREPARED[task.name](source, task, window=window or task.judged_length, stride=stride, limit=limit)


def _prepare_images(
    source: Source, task: Task, *, window: int, stride: int | None, limit: int | None
) -> EvaluationText:
    windows = task.from_start(source, length=window, limit=limit)
    items = tuple(
        ImageWindow(tuple(ids), tuple(labels), _key(ids, 0))
        for ids, labels in zip(windows.ids.tolist(), task.targets(windows.ids).tolist(), strict=True)
    )
    return EvaluationText(windows, items, limit, IMAGE)


def prepare_text(
    source: TextSource | str,
    tokenizer: Any,
    *,
    window: int = 2048,
    stride: int | None = None,
    limit: int | None = None,
) -> EvaluationText:
    """Cuts a text into windows, one every `stride` tokens, and counts what will be scored.

    With a stride below the window length, windows overlap and only the last `stride` tokens of each are scored, so that
    every token has at least window − stride tokens of context. Without overlap a window's first token is not scored,
    because nothing precedes it.

    A word is counted where it begins: words of the window's text from one token before the first scored one, minus the
    words in that token.
    """
    return _prepare_tokens(source, LanguageTask(tokenizer), window=window, stride=stride, limit=limit)


def _prepare_tokens(
    source: Source, task: Task, *, window: int, stride: int | None, limit: int | None
) -> EvaluationText:
    assert isinstance(task, LanguageTask)
    tokenizer = task.require_tokenizer()
    windows = task.from_start(source, length=window, stride=stride, limit=limit)
    items = []
    for index in range(len(windows)):
        ids = windows.ids[index].tolist()
        first = windows.first_target(index)
        words = _words(tokenizer, ids[first - 1 :]) - _words(tokenizer, ids[first - 1 : first])
        items.append(TextWindow(tuple(ids), first, words, _key(ids, first)))
    return EvaluationText(windows, tuple(items), limit)


_PREPARED = {TEXT: _prepare_tokens, IMAGE: _prepare_images}


def _words(tokenizer: Any, ids: list[int]) -> int:
    return len(decode(tokenizer, ids).split())


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of tokens with spaces as they are; transformers would clean them up."""
    if hasattr(tokenizer, "backend_tokenizer"):
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return str(tokenizer.decode(ids))


def _key(ids: list[int], first_target: int) -> str:
    digest = hashlib.blake2b(np.asarray([first_target, *ids], np.int64).tobytes(), digest_size=12)
    return digest.hexdigest()
