"""Calibration and evaluation never share text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

from kl_lens.base.errors import TextError
from kl_lens.text.sources import TextSource
from kl_lens.text.windows import evaluation_windows, ngram_hashes, refuse_overlap


@pytest.mark.parametrize(("shared_tokens", "refused"), [(100, False), (200, True)])
def test_boilerplate_is_allowed_and_a_copied_page_is_not(
    source: TextSource, tokenizer: Tokenizer, shared_tokens: int, refused: bool
) -> None:
    calibration = evaluation_windows(TextSource("a", None, source.documents[:20]), tokenizer, 512)
    evaluation = evaluation_windows(TextSource("b", None, source.documents[20:]), tokenizer, 512)
    copied = evaluation.ids.clone()
    copied[1, 300 : 300 + shared_tokens] = calibration.ids[2, 40 : 40 + shared_tokens]
    evaluation = replace(evaluation, ids=copied)
    if not refused:
        refuse_overlap(calibration, evaluation)
        return
    with pytest.raises(
        TextError, match=r"192 tokens in a row: window 2, token 40 .* and window 1, token 300 "
    ):
        refuse_overlap(calibration, evaluation)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["valid", "test"])
def test_all_of_wikitexts_own_splits_pass(shared: Path, split: str) -> None:
    """Their articles do share boilerplate, which must not stop the default run."""
    neox = Tokenizer.from_file(str(shared / "data" / "tokenizers" / "gpt_neox_20b_tokenizer.json"))
    refuse_overlap(
        evaluation_windows("wikitext2:train", neox, 512), evaluation_windows(f"wikitext2:{split}", neox, 512)
    )


def test_same_document_on_both_sides_is_refused_by_name(source: TextSource, tokenizer: Tokenizer) -> None:
    """Even where the windows themselves share no token."""
    both = evaluation_windows(TextSource("one", None, source.documents[:1]), tokenizer, 64, limit=2)
    begin = both.first(1)
    end = replace(both, ids=both.ids[1:], starts=both.starts[1:], documents=both.documents[1:])
    with pytest.raises(TextError, match="share a document: made-up 1 is made-up 1: use separate texts"):
        refuse_overlap(begin, end)


@settings(max_examples=60)
@given(
    st.integers(1, 9),
    st.lists(st.lists(st.integers(0, 2), min_size=9, max_size=9), min_size=1, max_size=3),
)
def test_ngram_hashes_are_equal_just_where_the_ngrams_are(size: int, rows: list[list[int]]) -> None:
    found = ngram_hashes(np.array(rows, dtype=np.int64), size)
    assert found.shape == (len(rows), 10 - size)
    by_hash: dict[int, tuple[int, ...]] = {}
    by_ngram: dict[tuple[int, ...], int] = {}
    for r, row in enumerate(rows):
        for at in range(10 - size):
            ngram, hash_ = tuple(row[at : at + size]), int(found[r, at])
            assert by_hash.setdefault(hash_, ngram) == ngram
            assert by_ngram.setdefault(ngram, hash_) == hash_
