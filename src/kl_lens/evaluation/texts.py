"""What models are judged on: windows of text or of images, and for each the rows that count."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from kl_lens.checkpoints.tasks import IMAGE, TEXT, LanguageTask, Source, Task
from kl_lens.subjects import content_digest
from kl_lens.text import Windows
from kl_lens.text.documents import TextSource


@dataclass(frozen=True)
class TextWindow:
    """One window: all of it is read, the tokens from `first_target` on are scored."""

    ids: tuple[int, ...]
    first_target: int
    words: int  # that begin in the scored tokens
    key: str  # of tokens and first target: what was scored once is known again in any longer text

    @property
    def answers(self) -> tuple[int, ...]:
        """What should have been predicted."""
        return self.ids[self.first_target :]

    @property
    def rows(self) -> slice:
        """Of the logits: those that predict the answers."""
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
    """A text, or images, in windows, with the protocol that a perplexity must name."""

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
    """A short name for a protocol; a text that merely moved to another folder keeps it."""
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
    """What a model with this task is judged on, in windows of so many tokens or images."""
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

    With a stride below the window, windows overlap and only the last `stride` tokens of each are scored: every
    token then has at least window − stride tokens of context. Nothing comes before a window's first token, so
    without overlap that token is read and not scored.

    Words are counted where they begin, as pieces between blanks: those of the window's text from one token
    before the first scored one, less those that token holds itself.
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
    """The text of tokens, blanks as they are; transformers would tidy them away."""
    if hasattr(tokenizer, "backend_tokenizer"):
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return str(tokenizer.decode(ids))


def _key(ids: list[int], first_target: int) -> str:
    digest = hashlib.blake2b(np.asarray([first_target, *ids], np.int64).tobytes(), digest_size=12)
    return digest.hexdigest()
