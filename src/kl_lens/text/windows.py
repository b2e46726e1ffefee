"""Windows of tokens: drawn at random for calibration, consecutive for evaluation.

**Drawn** windows follow the published protocol: the documents are joined to one long stream of tokens, and each window
begins at a random place in it (`random.Random(seed)`, the same on every machine). A place that would overlap an earlier
window is drawn again, so that no token counts twice. Windows are placed one by one, so asking for more keeps the
earlier ones.

**Evaluation** windows cover the stream from its beginning. An incomplete window at the end is dropped.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import random
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from kl_lens.base.errors import TextError
from kl_lens.text.documents import TextSource
from kl_lens.text.sources import open_text
from kl_lens.text.tokens import TokenStream, token_stream

# Raise it, with the reason, when the same arguments give other windows.
PROTOCOL_VERSION = 1

_TRIES = 200  # to find a place without overlap; then the smallest overlap is taken


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
    documents: tuple[tuple[UsedDocument, ...], ...]  # of each window
    stream_tokens: int  # in the source

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
        """Every document with a token in some window, each once."""
        return tuple(dict.fromkeys(document for window in self.documents for document in window))

    @cached_property
    def overlapping(self) -> int:
        """How many windows share tokens with another; above zero only if the text is nearly used up."""
        order = sorted(self.starts)
        close = [b - a < self.length for a, b in itertools.pairwise(order)]
        return sum(before or after for before, after in zip([False, *close], [*close, False], strict=True))

    @property
    def _protocol(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("order", "seed", "stride", "split")}
        return own | {"version": PROTOCOL_VERSION}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens and the settings; the folder of the text does not matter."""
        settings = self._protocol | {"shape": [len(self), self.length]}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        digest.update(self.ids.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def first(self, count: int) -> Windows:
        """The first `count` windows."""
        if not 1 <= count <= len(self):
            raise TextError(f"{self.source}: {count} of {len(self)} windows: expected 1 to {len(self)}")
        return self._some(slice(count))

    def after(self, count: int) -> Windows:
        """The windows after the first `count`."""
        return self._some(slice(count, None))

    def _some(self, which: slice) -> Windows:
        return replace(self, ids=self.ids[which], starts=self.starts[which], documents=self.documents[which])

    @property
    def label(self) -> str:
        """The text's name: `wikitext2:valid`."""
        return f"{self.source}:{self.split}" if self.split else self.source

    def first_target(self, window: int) -> int:
        """Index of the first token of this window that is scored.

        Nothing precedes token 0. If windows overlap, tokens scored in an earlier window are context only.
        """
        if window == 0 or self.stride is None:
            return 1
        return max(1, self.length - self.stride)

    def provenance(self) -> dict[str, Any]:
        """Everything but the tokens, as JSON."""
        return self._protocol | {
            "source": self.source,
            "windows": len(self),
            "length": self.length,
            "stream_tokens": self.stream_tokens,
            "overlapping": self.overlapping,
            "starts": list(self.starts),
            "documents": [asdict(document) for document in self.used_documents],
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
    """Draws windows at random places of a text; the defaults are the published protocol's.

    Args:
        source: a text, or its name as in `open_text`.
        tokenizer: a transformers tokenizer or a `tokenizers.Tokenizer`; no special tokens are added.
        windows: number of windows. The first k of a larger draw with the same seed are the draw of k.
        length: tokens per window.
        seed: of `random.Random`.
        split: of a text given by name (default: `train`).

    Raises:
        TextError: the text is shorter than one window, or than all windows together.
    """
    source, stream = _stream(source, split, tokenizer, for_evaluation=False, length=length, windows=windows)
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
    """Windows from the beginning of a text, one every `stride` tokens (default `length`), at most `limit`.

    For a name without a split, the evaluation split is used (`wikitext2:test`, `c4:validation`).
    """
    stride = length if stride is None else stride
    sizes = {"length": length, "stride": stride, "limit": 1 if limit is None else limit}
    source, stream = _stream(source, split, tokenizer, for_evaluation=True, **sizes)
    if stride > length:
        raise TextError(
            f"{source.label}: stride {stride} is longer than the window of {length}: tokens would be skipped"
        )
    starts = list(range(0, len(stream.ids) - length + 1, stride))[:limit]
    return _cut(source, stream, starts, length, order="sequential", seed=None, stride=stride)


def _stream(
    source: TextSource | str, split: str | None, tokenizer: Any, *, for_evaluation: bool, **sizes: int
) -> tuple[TextSource, TokenStream]:
    """Opens and tokenizes a text; raises if it is shorter than one window, or if a size is too small."""
    if isinstance(source, str):
        source = open_text(source, split, for_evaluation=for_evaluation)
    elif split not in (None, source.split):
        raise TextError(f"{source.label}: this text is already open, so split {split} cannot be chosen")
    for name, size in sizes.items():
        least = 2 if name == "length" else 1
        if size < least:
            raise TextError(f"{source.label}: {name} {size} is too small: expected at least {least}")
    stream = token_stream(source, tokenizer)
    if len(stream.ids) < sizes["length"]:
        raise TextError(
            f"{source.label}: {len(stream.ids)} tokens, shorter than one window of {sizes['length']}: "
            "give more text or ask for shorter windows"
        )
    return source, stream


def random_starts(available: int, windows: int, length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    starts: list[int] = []
    placed: list[int] = []
    for _ in range(windows):
        best, least = 0, length + 1
        for _ in range(_TRIES):
            start = generator.randrange(available - length + 1)
            after = bisect.bisect_left(placed, start)  # the nearest earlier window on either side
            nearest = placed[max(0, after - 1) : after + 1]
            overlap = max((length - abs(start - other) for other in nearest), default=0)
            if overlap < least:
                best, least = start, max(0, overlap)
            if overlap <= 0:
                break
        starts.append(best)
        bisect.insort(placed, best)
    return starts


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
