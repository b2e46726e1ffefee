"""Evaluation data: windows of text or of images, and the rows of each that are scored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kl_lens.model.tasks import TEXT, LanguageTask, Source, Task
from kl_lens.run.subjects import content_digest
from kl_lens.text.windows import Windows


@dataclass(frozen=True)
class Window:
    """One window of tokens or images."""

    ids: tuple[int, ...]
    first_row: int  # of the logits that are scored
    answers: tuple[int, ...]  # the true tokens or classes of those rows
    words: int = 0  # that begin in the scored tokens

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + len(self.answers))

    @property
    def targets(self) -> int:
        return len(self.answers)

    @cached_property
    def key(self) -> str:
        """By what is scored, so that stored scores are found again in any longer text."""
        content = np.asarray([self.first_row + 1, *self.ids], np.int64)
        return hashlib.blake2b(content.tobytes(), digest_size=12).hexdigest()


def text_window(ids: tuple[int, ...], first_target: int = 1, words: int = 0) -> Window:
    """Tokens from `first_target` on are scored: each by the logits before it."""
    return Window(ids, first_target - 1, ids[first_target:], words)


@dataclass(frozen=True, eq=False)
class EvaluationText:
    """A text or images in windows, with the protocol that a perplexity must state."""

    windows: Windows
    items: tuple[Window, ...]
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
    """Cuts a text or images into windows, one every `stride` tokens, and counts what will be scored.

    With a stride below the window length, windows of text overlap and only the last `stride` tokens of each are scored,
    so that every token has at least window − stride tokens of context. Without overlap a window's first token is not
    scored, because nothing precedes it.

    A word is counted where it begins: words of the window's text from one token before the first scored one, minus the
    words in that token.
    """
    windows = task.from_start(
        source, length=window or task.judged_length, stride=stride, limit=limit
    )
    items = []
    every = windows.ids.tolist()
    if isinstance(task, LanguageTask):
        tokenizer = task.require_tokenizer()
        for index, ids in enumerate(every):
            before = (first := windows.first_target(index)) - 1
            words = [
                len(decode(tokenizer, part).split())
                for part in (ids[before:], ids[before:first])
            ]
            items.append(text_window(tuple(ids), first, words[0] - words[1]))
    else:
        for ids, labels in zip(every, task.targets(windows.ids).tolist(), strict=True):
            items.append(Window(tuple(ids), 0, tuple(labels)))
    return EvaluationText(windows, tuple(items), limit, task.name)


def decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of tokens with spaces as they are; transformers would clean them up."""
    if hasattr(tokenizer, "backend_tokenizer"):
        return str(
            tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
    return str(tokenizer.decode(ids))
