"""Windows of tokens: drawn at random for calibration, one after the other for evaluation.

**Drawn** windows follow the published protocol: the documents are joined to one long stream of tokens, and
each window begins at a random place in it (`random.Random(seed)`, Python's own generator, the same on every
machine). A place that would overlap an earlier window is drawn again, so that no token counts twice.
Windows are placed one by one without looking at how many are wanted: asking for more extends the earlier
windows and never changes them.

**Evaluation** windows cover the stream from its beginning. What is left at the end, less than a window, is
dropped.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from kl_lens.errors import TextError
from kl_lens.text.documents import TextSource
from kl_lens.text.sources import open_text
from kl_lens.text.tokens import TokenStream, token_stream

# Say here what changed when the same arguments begin to give other windows.
PROTOCOL_VERSION = 1

_TRIES = 200  # for a place that overlaps nothing; then the least overlap of these is taken


@dataclass(frozen=True)
class UsedDocument:
    """A document that has tokens in a window."""

    name: str
    sha256: str


@dataclass(frozen=True, eq=False)
class Windows:
    """Token windows and where they come from."""

    ids: torch.Tensor  # int64 [windows, length]
    source: str
    split: str | None
    order: Literal["drawn", "sequential"]
    seed: int | None  # None for sequential windows
    stride: int | None  # None for drawn windows
    starts: tuple[int, ...]  # where in the token stream each window begins
    documents: tuple[tuple[UsedDocument, ...], ...]  # those of each window
    stream_tokens: int  # in the whole source

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def length(self) -> int:
        return int(self.ids.shape[1])

    @property
    def tokens(self) -> int:
        return self.ids.numel()

    @cached_property
    def used_documents(self) -> tuple[UsedDocument, ...]:
        """Every document that has a token in some window, each once."""
        return tuple(dict.fromkeys(document for window in self.documents for document in window))

    @cached_property
    def overlapping(self) -> int:
        """How many windows share tokens with another: some, where the text is nearly used up."""
        order = sorted(self.starts)
        close = [b - a < self.length for a, b in itertools.pairwise(order)]
        return sum(before or after for before, after in zip([False, *close], [*close, False], strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the tokens and the settings. A text that merely moved to another folder keeps it."""
        settings = {
            "version": PROTOCOL_VERSION,
            "order": self.order,
            "shape": [len(self), self.length],
            "seed": self.seed,
            "stride": self.stride,
            "split": self.split,
        }
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        digest.update(self.ids.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def first(self, count: int) -> Windows:
        """The first `count` windows, the same as if only they had been asked for."""
        if not 1 <= count <= len(self):
            raise TextError(
                f"{self.source}: {count} windows asked for out of {len(self)}: expected 1 to {len(self)}"
            )
        return replace(
            self, ids=self.ids[:count], starts=self.starts[:count], documents=self.documents[:count]
        )

    def after(self, count: int) -> Windows:
        """The windows behind the first `count`."""
        return replace(
            self, ids=self.ids[count:], starts=self.starts[count:], documents=self.documents[count:]
        )

    @property
    def label(self) -> str:
        """The text's name for people: `wikitext2:valid`."""
        return f"{self.source}:{self.split}" if self.split else self.source

    def first_target(self, window: int) -> int:
        """Index of the first token of this window whose prediction counts in a perplexity.

        Nothing precedes token 0; where windows overlap, the tokens an earlier window has scored are context
        only.
        """
        if window == 0 or self.stride is None:
            return 1
        return max(1, self.length - self.stride)

    def provenance(self) -> dict[str, Any]:
        """Everything but the tokens, ready for JSON."""
        return {
            "source": self.source,
            "split": self.split,
            "order": self.order,
            "windows": len(self),
            "length": self.length,
            "seed": self.seed,
            "stride": self.stride,
            "stream_tokens": self.stream_tokens,
            "overlapping": self.overlapping,
            "starts": list(self.starts),
            "documents": [{"name": d.name, "sha256": d.sha256} for d in self.used_documents],
            "version": PROTOCOL_VERSION,
            "fingerprint": self.fingerprint,
        }


def draw_windows(
    source: TextSource | str,
    tokenizer: Any,
    windows: int = 64,
    length: int = 512,
    seed: int = 42,
    split: str | None = None,
) -> Windows:
    """Draw windows at random places of a text; the defaults are the published protocol's.

    Args:
        source: a text, or its name as `open_text` takes it.
        tokenizer: a transformers tokenizer or a `tokenizers.Tokenizer`; no special tokens are added.
        windows: how many. The first k of a larger draw with the same seed are the draw of k.
        length: tokens per window.
        seed: of `random.Random`.
        split: of a text given by name; `train` where neither says.

    Raises:
        TextError: the text is shorter than one window, or has fewer tokens than the windows together.
    """
    source = _opened(source, split, for_evaluation=False)
    _check_sizes(source, windows=windows, length=length)
    stream = _long_enough_stream(source, tokenizer, length)
    available = len(stream.ids)
    if windows * length > available:
        raise TextError(
            f"{source.label}: {windows} windows of {length} tokens need {windows * length:,} tokens, "
            f"the text has {available:,}: ask for at most {available // length} windows, or give more text"
        )
    starts = random_starts(available, windows, length, seed)
    return _cut(source, stream, starts, length, order="drawn", seed=seed, stride=None)


def evaluation_windows(
    source: TextSource | str,
    tokenizer: Any,
    length: int = 2048,
    stride: int | None = None,
    limit: int | None = None,
    split: str | None = None,
) -> Windows:
    """Windows from the beginning of a text on, one every `stride` tokens (default `length`), at most `limit`.

    A text given by name and without a split means its evaluation split (`wikitext2:test`, `c4:validation`).
    """
    source = _opened(source, split, for_evaluation=True)
    stride = length if stride is None else stride
    _check_sizes(source, length=length, stride=stride, limit=1 if limit is None else limit)
    if stride > length:
        raise TextError(
            f"{source.label}: stride {stride} is longer than the window of {length}: tokens would be lost"
        )
    stream = _long_enough_stream(source, tokenizer, length)
    starts = list(range(0, len(stream.ids) - length + 1, stride))[:limit]
    return _cut(source, stream, starts, length, order="sequential", seed=None, stride=stride)


def _opened(source: TextSource | str, split: str | None, *, for_evaluation: bool) -> TextSource:
    if isinstance(source, str):
        return open_text(source, split, for_evaluation=for_evaluation)
    if split is not None and split != source.split:
        raise TextError(f"{source.label}: this text is already open, it cannot be asked for split {split}")
    return source


def _check_sizes(source: TextSource, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < (2 if name == "length" else 1):
            raise TextError(
                f"{source.label}: {name} {size} is too small: expected {2 if name == 'length' else 1} up"
            )


def _long_enough_stream(source: TextSource, tokenizer: Any, length: int) -> TokenStream:
    stream = token_stream(source, tokenizer)
    if len(stream.ids) < length:
        raise TextError(
            f"{source.label}: {len(stream.ids)} tokens, shorter than one window of {length}: "
            "give more text or ask for shorter windows"
        )
    return stream


def random_starts(available: int, windows: int, length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    starts: list[int] = []
    placed: list[int] = []
    for _ in range(windows):
        best, least = 0, length + 1
        for _ in range(_TRIES):
            start = generator.randrange(available - length + 1)
            overlap = _overlap(start, placed, length)
            if overlap < least:
                best, least = start, overlap
            if overlap == 0:
                break
        starts.append(best)
        bisect.insort(placed, best)
    return starts


def _overlap(start: int, placed: list[int], length: int) -> int:
    """Tokens shared with the nearest earlier window on either side."""
    after = bisect.bisect_left(placed, start)
    nearest = placed[max(0, after - 1) : after + 1]
    return max((length - abs(start - other) for other in nearest if abs(start - other) < length), default=0)


def _cut(
    source: TextSource,
    stream: TokenStream,
    starts: list[int],
    length: int,
    *,
    order: Literal["drawn", "sequential"],
    seed: int | None,
    stride: int | None,
) -> Windows:
    ids = np.stack([stream.ids[start : start + length] for start in starts])
    documents = tuple(
        tuple(UsedDocument(d.name, d.sha256) for d in stream.documents_between(start, start + length))
        for start in starts
    )
    return Windows(
        ids=torch.from_numpy(ids),
        source=source.name,
        split=source.split,
        order=order,
        seed=seed,
        stride=stride,
        starts=tuple(starts),
        documents=documents,
        stream_tokens=len(stream.ids),
    )
