"""Windows: drawn with a seed, extendable, and with their origin written down."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from kl_lens.base.errors import TextError
from kl_lens.text import windows as windows_module
from kl_lens.text.sources import Document, TextSource
from kl_lens.text.windows import (
    beginning_of,
    draw_windows,
    evaluation_windows,
    random_starts,
    token_stream,
)


def test_windows_are_pieces_of_the_token_stream(
    source: TextSource, tokenizer: Tokenizer
) -> None:
    windows = draw_windows(source, tokenizer, windows=8, length=64)
    ids = token_stream(source, tokenizer).ids
    assert tokenizer.decode(ids.tolist()) == source.joined()
    assert (windows.ids.dtype, windows.ids.shape) == (torch.int64, (8, 64))
    lengths = [len(tokenizer.encode(piece).ids) for piece in source.pieces()]
    owners = np.repeat([document.name for document in source.documents], lengths)
    for row, start, documents in zip(
        windows.ids, windows.starts, windows.documents, strict=True
    ):
        assert row.tolist() == ids[start : start + 64].tolist()
        names = [document.name for document in documents]
        assert names == [*dict.fromkeys(owners[start : start + 64])]


@settings(max_examples=50)
@given(st.integers(2, 40), st.integers(1, 30), st.integers(0, 400), st.integers(0, 10**9))
def test_a_start_is_the_first_of_200_draws_without_overlap_or_with_the_least(
    length: int, windows: int, spare: int, seed: int
) -> None:
    available = windows * length + spare
    generator = random.Random(seed)
    expected: list[int] = []
    for _ in range(windows):
        starts: dict[int, int] = {}  # overlap with earlier windows → the first such start
        for _ in range(200):
            start = generator.randrange(available - length + 1)
            nearest = min((abs(start - other) for other in expected), default=length)
            starts.setdefault(max(0, length - nearest), start)
            if nearest >= length:
                break
        expected.append(starts[min(starts)])
    assert random_starts(available, windows, length, seed) == expected


def test_windows_do_not_overlap_while_there_is_room(
    source: TextSource, tokenizer: Tokenizer
) -> None:
    available = len(token_stream(source, tokenizer).ids)
    half_full = available // 64 // 2
    assert draw_windows(source, tokenizer, windows=half_full, length=64).overlapping == 0
    brim_full = draw_windows(source, tokenizer, windows=available // 64, length=64)
    assert brim_full.overlapping > 0
    record = json.loads(json.dumps(brim_full.provenance()))
    expected = {"seed": 42, "length": 64, "overlapping": brim_full.overlapping}
    assert record | expected == record
    assert [d["sha256"] for d in record["documents"]] == [
        d.sha256 for d in brim_full.used_documents
    ]


@pytest.mark.parametrize(
    ("stride", "overlapping"), [(64, 0), (63, 5), (1, 5)], ids=["beside", "by one", "all"]
)
def test_a_window_overlaps_if_it_shares_a_token(
    source: TextSource, tokenizer: Tokenizer, stride: int, overlapping: int
) -> None:
    windows = evaluation_windows(source, tokenizer, 64, stride, limit=5)
    assert windows.overlapping == overlapping
    assert windows.first(1).overlapping == windows.after(4).overlapping == 0
    for count in (0, 6):
        with pytest.raises(TextError, match=f"{count} of 5 windows: expected 1 to 5"):
            windows.first(count)


def test_guessing_is_the_perplexity_of_the_tokens_shares(
    source: TextSource, tokenizer: Tokenizer
) -> None:
    windows = evaluation_windows(source, tokenizer, length=8, limit=1)
    ids = torch.tensor([[5, 5, 5, 5, 7, 7, 9, 11]])  # shares 1/2, 1/4, 1/8, 1/8
    assert replace(windows, ids=ids).guessing == pytest.approx(2**1.75)


def test_long_documents_are_tokenized_in_pieces_and_no_further_than_needed(
    source: TextSource, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = token_stream(source, tokenizer)
    known = evaluation_windows(source, tokenizer, length=64, limit=3)
    for name, size in {"_PIECE_CHARACTERS": 500, "_BATCH_CHARACTERS": 3000}.items():
        monkeypatch.setattr(windows_module, name, size)
    windows_module._streams.clear()
    again = token_stream(source, tokenizer)
    assert np.array_equal(again.ids, whole.ids)
    assert np.array_equal(again.document_starts, whole.document_starts)
    first = evaluation_windows(source, tokenizer, length=64, limit=3)
    assert first.fingerprint == known.fingerprint
    assert first.used_documents == known.used_documents
    assert first.stream_tokens < len(whole.ids) / 10
    for stride in (64, 10):
        assert len(evaluation_windows(source, tokenizer, 64, stride, limit=99)) == 99
    dense = TextSource("dense", None, (Document("dense", "x" * 4321),))
    assert tokenizer.decode(token_stream(dense, tokenizer).ids.tolist()) == "x" * 4321


def test_fingerprint_follows_the_tokens_and_not_the_path(
    tmp_path: Path, source: TextSource, tokenizer
) -> None:
    prints = set()
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(source.joined(), encoding="utf-8")
        prints.add(
            draw_windows(
                str(tmp_path / folder / "a.txt"), tokenizer, windows=4, length=64
            ).fingerprint
        )
    assert len(prints) == 1
    windows = draw_windows(source, tokenizer, windows=4, length=64)
    changed = windows.ids.clone()
    changed[3, 63] += 1
    assert replace(windows, ids=changed).fingerprint != windows.fingerprint


def test_evaluation_windows_cover_the_text_in_order(
    source: TextSource, tokenizer: Tokenizer
) -> None:
    ids = token_stream(source, tokenizer).ids
    windows = evaluation_windows(source, tokenizer, length=100)
    assert len(windows) == len(ids) // 100
    assert np.array_equal(windows.ids.flatten().numpy(), ids[: len(windows) * 100])
    assert torch.equal(
        evaluation_windows(source, tokenizer, length=100, limit=3).ids, windows.ids[:3]
    )


@pytest.mark.parametrize("stride", [1, 30, 100])
def test_with_a_stride_every_token_but_the_first_is_scored_once(
    source, tokenizer, stride: int
) -> None:
    windows = evaluation_windows(source, tokenizer, length=100, stride=stride, limit=20)
    scored = [
        s + t
        for w, s in enumerate(windows.starts)
        for t in range(windows.first_target(w), 100)
    ]
    unscored = set(range(windows.starts[-1] + 100)) - set(scored)
    assert len(set(scored)) == len(scored)
    # Without overlap nothing precedes the first token of a window, so that it cannot be scored.
    assert unscored == (set(windows.starts) if stride == 100 else {0})


def test_a_text_may_be_just_as_long_as_its_windows(tokenizer: Tokenizer) -> None:
    text = TextSource("exact", None, (Document("exact", "bar " * 60),))
    available = len(token_stream(text, tokenizer).ids)
    for windows in (
        draw_windows(text, tokenizer, windows=1, length=available),
        draw_windows(text, tokenizer, windows=2, length=available // 2).first(1),
        evaluation_windows(text, tokenizer, length=available),
        evaluation_windows(text, tokenizer, length=2, limit=1),
    ):
        assert (len(windows), windows.stream_tokens) == (1, available)
    needed = f"2 windows of {available} tokens need {2 * available} tokens"
    too_many = f"{needed}, the text has {available}: ask for at most 1 windows"
    with pytest.raises(TextError, match=too_many):
        draw_windows(text, tokenizer, windows=2, length=available)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"length": 512}, r"\d+ tokens, shorter than one window of 512: give more text"),
        ({"length": 1}, "length 1 is too small: expected at least 2"),
        ({"windows": 0}, "windows 0 is too small: expected at least 1"),
        ({"limit": 0}, "limit 0 is too small: expected at least 1"),
        ({"stride": 0}, "stride 0 is too small: expected at least 1"),
        (
            {"stride": 9},
            "stride 9 is longer than the window of 8: tokens would be skipped",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    sizes: dict[str, int], complaint: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "a.txt").write_text("Too short for some windows.", encoding="utf-8")
    kinds = {draw_windows: {"windows"}, evaluation_windows: {"limit", "stride"}}
    for cut, names in kinds.items():
        if sizes.keys() <= names | {"length"}:
            with pytest.raises(TextError, match=rf"a\.txt: {complaint}"):
                cut(str(tmp_path / "a.txt"), tokenizer, **{"length": 8, **sizes})


def test_letters_without_a_token_are_named_unless_they_are_in_the_name_of_one() -> None:
    letters = {letter: number for number, letter in enumerate("abc d")}
    lacking = Tokenizer(models.BPE(letters, []))
    lacking.add_special_tokens(["<eos>"])
    for text in ("a cab", "a<eos>d", "cab!"):  # a mark may be dropped
        token_stream(TextSource("some", None, (Document("some", text),)), lacking)
    text = TextSource("some", None, (Document("some", "a zebra<eos> quickly"),))
    with pytest.raises(TextError, match=r"no token for 'e', 'i', 'k', 'l', 'q': remove"):
        token_stream(text, lacking)


@pytest.fixture
def fussy(tokenizer: Tokenizer) -> Tokenizer:
    """Puts <s> before a text; and cuts and fills texts, as after some training."""
    fussy = Tokenizer.from_str(tokenizer.to_str())
    fussy.add_special_tokens(["<s>"])
    fussy.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", fussy.token_to_id("<s>"))]
    )
    fussy.enable_truncation(16)
    fussy.enable_padding(length=4096)
    return fussy


def test_truncation_padding_and_special_tokens_are_not_in_the_stream(
    source: TextSource, tokenizer: Tokenizer, fussy: Tokenizer
) -> None:
    plain = token_stream(source, tokenizer).ids
    assert np.array_equal(token_stream(source, fussy).ids, plain)
    assert fussy.truncation["max_length"] == 16  # the caller's tokenizer is as it was


@pytest.mark.parametrize("cut", [draw_windows, evaluation_windows])
def test_windows_begin_with_bos_where_the_tokenizer_does(
    source: TextSource, tokenizer: Tokenizer, fussy: Tokenizer, cut: Any
) -> None:
    """In place of the first token, as llama.cpp does it; nothing is scored from it alone."""
    bos = fussy.token_to_id("<s>")
    plain = cut(source, tokenizer, length=64).first(4)
    begun = cut(source, fussy, length=64).first(4)
    assert (beginning_of(tokenizer), beginning_of(fussy)) == (None, bos)
    assert (plain.bos, begun.bos) == (None, bos)
    assert begun.ids[:, 0].tolist() == [bos] * 4
    assert torch.equal(begun.ids[:, 1:], plain.ids[:, 1:])
    assert (plain.first_target(0), begun.first_target(0)) == (1, 2)
    assert begun.provenance()["bos"] == bos
    assert "bos" not in plain.provenance()
    assert begun.fingerprint != replace(begun, bos=None).fingerprint
    with pytest.raises(TextError, match="length 2 is too small: expected at least 3"):
        cut(source, fussy, length=2)
