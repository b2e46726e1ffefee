"""Windows of tokens: drawn at random for calibration, consecutive for evaluation; and a check that they never overlap.

**Drawn** windows follow the published protocol: the documents are joined to one long stream of tokens, and each window
begins at a random place in it (`random.Random(seed)`, the same on every machine). A place that would overlap an earlier
window is drawn again, so that no token counts twice. Windows are placed one by one, so asking for more keeps the
earlier ones.

**Evaluation** windows cover the stream from its beginning. An incomplete window at the end is dropped.

Where the tokenizer begins a text with a token (BOS), that token takes the place of each window's first, as in
llama.cpp. What the model predicts there, without a word of the text, is not scored.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kl_lens.base.errors import TextError
from kl_lens.text.sources import Document, TextSource, label_of, open_text

_BATCH_CHARACTERS = 2_000_000  # limits the tokenizer's memory
_PIECE_CHARACTERS = 1_000_000  # of a longer document
_CUTS = re.compile(r"(?<=\w)(?= \w)|(?<=\S\n)(?=\S)")  # where no token crosses
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
_streams: OrderedDict[tuple[str, str, int | None], TokenStream] = OrderedDict()


def token_stream(
    source: TextSource, tokenizer: Any, enough: int | None = None
) -> TokenStream:
    """The tokens of a source, without special tokens: all, or of its first batches `enough`.

    `tokenizer` is a transformers tokenizer or a `tokenizers.Tokenizer`; it is not changed.
    """
    if sum(len(document.text) for document in source.documents) <= _BATCH_CHARACTERS:
        enough = None
    backend = _backend(tokenizer)
    if backend is None:
        # Written in Python; `verbose=False` silences its warning about long sequences.
        plain = {
            "add_special_tokens": False,
            "truncation": False,
            "padding": False,
            "verbose": False,
        }
        return _encode(
            source, lambda texts: tokenizer(texts, **plain)["input_ids"], enough
        )
    backend_digest = hashlib.sha256(backend.to_str().encode()).hexdigest()
    key = (source.sha256, backend_digest, enough)
    if key not in _streams:
        _refuse_dropped(source, backend)
        encode = partial(backend.encode_batch_fast, add_special_tokens=False)
        _streams[key] = _encode(
            source, lambda texts: (encoding.ids for encoding in encode(texts)), enough
        )
        if len(_streams) > _KEPT_STREAMS:
            _streams.popitem(last=False)
    _streams.move_to_end(key)
    return _streams[key]


def _refuse_dropped(source: TextSource, backend: Tokenizer) -> None:
    """Raises for letters and digits that become no token at all: the rest would be another text."""
    letters = sorted(
        {c for document in source.documents for c in set(document.text) if c.isalnum()}
    )
    encoded = backend.encode_batch_fast(letters, add_special_tokens=False)
    dropped = [
        letter
        for letter, encoding in zip(letters, encoded, strict=True)
        if not encoding.ids
    ]
    if dropped:  # some may only be in the names of tokens, such as <eos>
        specials = "|".join(
            re.escape(token.content)
            for token in backend.get_added_tokens_decoder().values()
        )
        text = re.sub(specials, "", source.joined()) if specials else source.joined()
        dropped = [letter for letter in dropped if letter in text]
    if dropped:
        raise TextError(
            f"{source.label}: the tokenizer has no token for {', '.join(map(repr, dropped[:5]))}: remove such letters, "
            "or use the tokenizer that the model was trained with"
        )


def beginning_of(tokenizer: Any) -> int | None:
    """The token that the tokenizer itself puts before a text: BOS, where the model expects it."""
    if isinstance(tokenizer, Tokenizer):
        tokenizer = _backend(tokenizer)
    encodings = [
        tokenizer.encode("A", add_special_tokens=added) for added in (False, True)
    ]
    plain, begun = ([*getattr(encoding, "ids", encoding)] for encoding in encodings)
    precedes = len(begun) > len(plain) and begun[1 : len(plain) + 1] == plain
    return int(begun[0]) if precedes else None


def _backend(tokenizer: Any) -> Tokenizer | None:
    """The Rust tokenizer without truncation and padding, which a tokenizer.json may set."""
    backend = (
        tokenizer
        if isinstance(tokenizer, Tokenizer)
        else getattr(tokenizer, "backend_tokenizer", None)
    )
    if not isinstance(backend, Tokenizer):
        return None
    if backend.truncation or backend.padding:
        backend = Tokenizer.from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    return backend


def _encode(
    source: TextSource,
    encode: Callable[[list[str]], Iterable[Sequence[int]]],
    enough: int | None,
) -> TokenStream:
    """Document by document, each with the separator that follows it, in batches that use all cores. For byte-level
    tokenizers (such as GPT-NeoX's) on WikiText this gives exactly the tokens of the joined text, since their words
    never cross the blank lines before a title."""
    lengths = [0] * len(source.documents)
    encoded = [np.empty(0, np.int64)]
    reached = 0
    for batch in _batches(source):
        for (index, _), ids in zip(
            batch, encode([text for _, text in batch]), strict=True
        ):
            encoded.append(np.asarray(ids, dtype=np.int64))
            lengths[index] += len(ids)
            reached = index + 1
        if enough is not None and sum(lengths) >= enough:
            break
    starts = np.cumsum([0, *lengths[:reached]], dtype=np.int64)[:-1]
    return TokenStream(np.concatenate(encoded), starts, source.documents[:reached])


def _batches(source: TextSource) -> Iterator[list[tuple[int, str]]]:
    """(document's number, piece of its text), together as much as a tokenizer is given at once."""
    batch = []
    room = _BATCH_CHARACTERS
    for index, text in enumerate(source.pieces()):
        for piece in _cut_up(text):
            batch.append((index, piece))
            room -= len(piece)
            if room <= 0:
                yield batch
                batch = []
                room = _BATCH_CHARACTERS
    if batch:
        yield batch


def _cut_up(text: str) -> Iterator[str]:
    """Pieces of a long text, cut between two words where there are words."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = start + _PIECE_CHARACTERS
        cuts = [match.start() for match in _CUTS.finditer(text, end - 10_000, end)]
        stop = cuts[-1] if cuts else end
        yield text[start:stop]
        start = stop
    yield text[start:]


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
    seed: int | None  # None for sequential windows
    stride: int | None  # None for drawn windows
    starts: tuple[int, ...]  # where in the token stream each window begins
    documents: tuple[tuple[UsedDocument, ...], ...]  # of each window
    stream_tokens: int  # in the source, or in what was read of it
    note: str = ""  # what the user should know about the text
    bos: int | None = None  # the token that every window begins with, if any

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def order(self) -> str:
        return "drawn" if self.stride is None else "sequential"

    @property
    def length(self) -> int:
        return int(self.ids.shape[1])

    @property
    def tokens(self) -> int:
        return self.ids.numel()

    @cached_property
    def used_documents(self) -> tuple[UsedDocument, ...]:
        """Every document with a token in some window, each once."""
        return tuple(
            dict.fromkeys(document for window in self.documents for document in window)
        )

    @cached_property
    def guessing(self) -> float:
        """The perplexity of whoever knows only how often each token occurs here."""
        _, counts = np.unique(self.ids.numpy(), return_counts=True)
        shares = counts / counts.sum()
        return float(np.exp(-(shares * np.log(shares)).sum()))

    @cached_property
    def overlapping(self) -> int:
        """How many windows share tokens with another; above zero only if the text is nearly used up."""
        order = sorted(self.starts)
        close = [b - a < self.length for a, b in itertools.pairwise(order)]
        return sum(
            before or after
            for before, after in zip([False, *close], [*close, False], strict=True)
        )

    @property
    def _protocol(self) -> dict[str, Any]:
        settings = {
            name: getattr(self, name) for name in ("order", "seed", "stride", "split")
        }
        begun = {} if self.bos is None else {"bos": self.bos}
        return settings | begun | {"version": PROTOCOL_VERSION}

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
            raise TextError(
                f"{self.source}: {count} of {len(self)} windows: expected 1 to {len(self)}"
            )
        return self._some(slice(count))

    def after(self, count: int) -> Windows:
        """The windows after the first `count`."""
        return self._some(slice(count, None))

    def _some(self, selection: slice) -> Windows:
        return replace(
            self,
            ids=self.ids[selection],
            starts=self.starts[selection],
            documents=self.documents[selection],
        )

    @property
    def label(self) -> str:
        """The text's name: `wikitext2:valid`."""
        return label_of(self.source, self.split)

    def first_target(self, window: int) -> int:
        """Index of the first token of this window that is scored.

        Nothing precedes token 0, and only BOS a token behind it. If windows overlap, tokens scored in an earlier window
        are context only.
        """
        first = 1 if self.bos is None else 2
        if window == 0 or self.stride is None:
            return first
        return max(first, self.length - self.stride)

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
) -> Windows:
    """Draws windows at random places of a text; the defaults are the published protocol's.

    Args:
        source: a text, or its name as in `open_text`.
        tokenizer: a transformers tokenizer or a `tokenizers.Tokenizer`; windows begin with BOS if it adds one.
        windows: number of windows. The first k of a larger draw with the same seed are the draw of k.
        length: tokens per window.
        seed: of `random.Random`.

    Raises:
        TextError: the text is shorter than one window, or than all windows together.
    """
    source, stream = _stream(
        source, tokenizer, for_evaluation=False, length=length, windows=windows
    )
    available = len(stream.ids)
    if windows * length > available:
        raise TextError(
            f"{source.label}: {windows} windows of {length} tokens need {windows * length:,} tokens, "
            f"the text has {available:,}: ask for at most {available // length} windows, or give more text"
        )
    starts = random_starts(available, windows, length, seed)
    return _cut(source, stream, starts, length, tokenizer, seed=seed)


def evaluation_windows(
    source: TextSource | str,
    tokenizer: Any,
    length: int = 2048,
    stride: int | None = None,
    limit: int | None = None,
) -> Windows:
    """Windows from the beginning of a text, one every `stride` tokens (default `length`), at most `limit`.

    For a name without a split, the evaluation split is used (`wikitext2:test`).
    """
    stride = length if stride is None else stride
    sizes = {"length": length, "stride": stride, "limit": 1 if limit is None else limit}
    enough = None if limit is None else length + stride * (limit - 1)
    source, stream = _stream(source, tokenizer, enough, for_evaluation=True, **sizes)
    if stride > length:
        raise TextError(
            f"{source.label}: stride {stride} is longer than the window of {length}: tokens would be skipped"
        )
    starts = list(range(0, len(stream.ids) - length + 1, stride))[:limit]
    return _cut(source, stream, starts, length, tokenizer, stride=stride)


def _stream(
    source: TextSource | str,
    tokenizer: Any,
    enough: int | None = None,
    *,
    for_evaluation: bool,
    **sizes: int,
) -> tuple[TextSource, TokenStream]:
    """Opens and tokenizes a text; raises if it is shorter than one window, or if a size is too small."""
    if isinstance(source, str):
        source = open_text(source, for_evaluation=for_evaluation)
    for name, size in sizes.items():
        least = (2 if beginning_of(tokenizer) is None else 3) if name == "length" else 1
        if size < least:
            raise TextError(
                f"{source.label}: {name} {size} is too small: expected at least {least}"
            )
    source = source.for_model(tokenizer)
    stream = token_stream(source, tokenizer, enough)
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
        best = 0
        least = length + 1
        for _ in range(_TRIES):
            start = generator.randrange(available - length + 1)
            # The nearest earlier window on either side.
            after = bisect.bisect_left(placed, start)
            nearest = placed[max(0, after - 1) : after + 1]
            overlap = max(
                (length - abs(start - neighbour) for neighbour in nearest), default=0
            )
            if overlap < least:
                best = start
                least = max(0, overlap)
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
    tokenizer: Any,
    *,
    seed: int | None = None,
    stride: int | None = None,
) -> Windows:
    bos = beginning_of(tokenizer)
    ids = np.stack([stream.ids[start : start + length] for start in starts])
    if bos is not None:
        ids[:, 0] = bos
    documents = tuple(
        tuple(
            UsedDocument(d.name, d.sha256)
            for d in stream.documents_between(start, start + length)
        )
        for start in starts
    )
    return Windows(
        ids=torch.from_numpy(ids),
        source=source.name,
        split=source.split,
        seed=seed,
        stride=stride,
        starts=tuple(starts),
        documents=documents,
        stream_tokens=len(stream.ids),
        note=source.note,
        bos=bos,
    )


# How long a shared run of tokens must be to count as overlap. Similar articles share boilerplate: with an 8k BPE the
# longest run shared by WikiText-2's own train and test is 84 tokens (a typhoon's path), by train and valid 165 (the
# rules of the Boat Race).
OVERLAP_TOKENS = 192


def refuse_overlap(calibration: Windows, evaluation: Windows) -> None:
    """Raises TextError if the two share a document, or `OVERLAP_TOKENS` in a row (half a window if less).

    The run of tokens catches what hashes of documents miss: an article inside another file, or a copy that differs by a
    word.
    """
    names = {document.sha256: document.name for document in calibration.used_documents}
    shared = [
        document for document in evaluation.used_documents if document.sha256 in names
    ]
    if shared:
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        raise TextError(
            f"calibration and evaluation share a document: {names[shared[0].sha256]} is {shared[0].name}"
            f"{more}: use separate texts"
        )
    overlap = shared_run(calibration, evaluation)
    if overlap:
        (window_c, at_c), (window_e, at_e), run = overlap
        raise TextError(
            f"calibration and evaluation share {run} tokens in a row: {_place(calibration, window_c, at_c)} "
            f"and {_place(evaluation, window_e, at_e)}: use separate texts"
        )


def shared_run(
    a: Windows, b: Windows
) -> tuple[tuple[int, int], tuple[int, int], int] | None:
    """((window, token) in `a`, (window, token) in `b`, length) of a shared run that counts as overlap, or None."""
    # Windows of the same text begin at different places, so short ones may share only half.
    least = min(OVERLAP_TOKENS, max(1, min(a.length, b.length) // 2))
    # Every such run holds one of the pieces into which the windows of `a` are cut.
    size = max(1, least // 2)
    pieces: dict[bytes, list[tuple[int, int]]] = {}
    rows_a = a.ids.tolist()
    rows_b = b.ids.tolist()
    for window, row in enumerate(a.ids.numpy()):
        for at in range(0, a.length - size + 1, size):
            pieces.setdefault(row[at : at + size].tobytes(), []).append((window, at))
    for window, row in enumerate(b.ids.numpy()):
        for at in range(b.length - size + 1):
            for index, offset in pieces.get(row[at : at + size].tobytes(), ()):
                tokens_a = rows_a[index]
                tokens_b = rows_b[window]
                before = _same(tokens_a[:offset][::-1], tokens_b[:at][::-1])
                run = before + _same(tokens_a[offset:], tokens_b[at:])
                if run >= least:
                    return (index, offset - before), (window, at - before), run
    return None


def _same(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens they begin with that are the same."""
    pairs = zip(first, second, strict=False)
    return next(
        (index for index, (a, b) in enumerate(pairs) if a != b),
        min(len(first), len(second)),
    )


def _place(windows: Windows, window: int, token: int) -> str:
    names = ", ".join(document.name for document in windows.documents[window])
    return f"window {window}, token {token} ({names})"
