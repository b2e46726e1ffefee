"""Turns text into one long stream of tokens.

Documents are tokenized one by one with the separator that follows them, in batches that use all cores. For byte-level
tokenizers (such as GPT-NeoX's) on WikiText this gives exactly the tokens of the joined text, since their words never
cross the blank lines before a title.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kl_lens.text.documents import Document, TextSource

_BATCH_CHARACTERS = 2_000_000  # limits the tokenizer's memory
_KEPT_STREAMS = 4


@dataclass(frozen=True, eq=False)
class TokenStream:
    ids: NDArray[np.int64]
    document_starts: NDArray[np.int64]  # token index at which each document begins
    documents: tuple[Document, ...]

    def documents_between(self, start: int, stop: int) -> tuple[Document, ...]:
        """The documents that have a token in [start, stop)."""
        first = int(np.searchsorted(self.document_starts, start, side="right")) - 1
        last = int(np.searchsorted(self.document_starts, stop, side="left"))
        return self.documents[first:last]


# The last few streams: a run often reads the same text again.
_streams: OrderedDict[tuple[str, str], TokenStream] = OrderedDict()


def token_stream(source: TextSource, tokenizer: Any) -> TokenStream:
    """All tokens of a source, without special tokens.

    `tokenizer` is a transformers tokenizer or a `tokenizers.Tokenizer`; it is not changed.
    """
    backend = _backend(tokenizer)
    if (
        backend is None
    ):  # a tokenizer written in Python; `verbose=False` silences its warning about long sequences
        plain = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
        return _encode(source, lambda texts: tokenizer(texts, **plain)["input_ids"])
    key = (source.sha256, hashlib.sha256(backend.to_str().encode()).hexdigest())
    if key not in _streams:
        _streams[key] = _encode(
            source,
            lambda texts: (each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)),
        )
        if len(_streams) > _KEPT_STREAMS:
            _streams.popitem(last=False)
    _streams.move_to_end(key)
    return _streams[key]


def _backend(tokenizer: Any) -> Tokenizer | None:
    """The Rust tokenizer without truncation and padding, which a tokenizer.json may set."""
    backend = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return None
    if backend.truncation or backend.padding:
        backend = Tokenizer.from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    return backend


def _encode(source: TextSource, encode: Callable[[list[str]], Iterable[Sequence[int]]]) -> TokenStream:
    encoded: list[NDArray[np.int64]] = []
    batches: list[list[str]] = [[]]
    characters = 0
    for piece in source.pieces():
        if characters >= _BATCH_CHARACTERS:
            batches.append([])
            characters = 0
        batches[-1].append(piece)
        characters += len(piece)
    for batch in batches:
        encoded += [np.asarray(ids, dtype=np.int64) for ids in encode(batch)]
    starts = np.cumsum([0, *(len(ids) for ids in encoded)], dtype=np.int64)[:-1]
    return TokenStream(np.concatenate([np.empty(0, np.int64), *encoded]), starts, source.documents)
