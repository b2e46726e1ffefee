"""Calibration and evaluation never share text."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from tokenizers import Tokenizer

from kl_lens.base.errors import TextError
from kl_lens.text.sources import TextSource
from kl_lens.text.windows import Windows, evaluation_windows, refuse_overlap, shared_run


def _windows(rows: list[list[int]]) -> Windows:
    return Windows(torch.tensor(rows), "made-up", None, 1, None, (), (), 0)


def _texts(length: int) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    return st.lists(row, min_size=1, max_size=2)


def _runs(rows: list[list[int]], length: int) -> set[tuple[int, ...]]:
    starts = range(len(rows[0]) - length + 1)
    return {tuple(row[start : start + length]) for row in rows for start in starts}


_LENGTHS = st.tuples(st.integers(1, 12), st.integers(1, 12))


@settings(max_examples=100)
@given(_LENGTHS.flatmap(lambda lengths: st.tuples(*map(_texts, lengths))))
@example(([[0] * 5 + [1] * 5], [[1] * 5 + [0] * 5]))
@example(([[0, 1, 0, 1, 1, 0, 0, 1]], [[1, 1, 0, 0, 0, 0, 0, 0]]))
def test_a_run_of_half_a_window_is_found_as_a_whole_wherever_it_is(texts) -> None:
    least = max(1, min(len(rows[0]) for rows in texts) // 2)
    overlap = shared_run(*map(_windows, texts))
    assert (overlap is None) == _runs(texts[0], least).isdisjoint(_runs(texts[1], least))
    if overlap is None:
        return
    (window_a, start_a), (window_b, start_b), length = overlap
    a = texts[0][window_a]
    b = texts[1][window_b]
    end_a = start_a + length
    end_b = start_b + length
    assert length >= least
    assert a[start_a:end_a] == b[start_b:end_b]
    assert min(start_a, start_b) == 0 or a[start_a - 1] != b[start_b - 1]
    assert end_a == len(a) or end_b == len(b) or a[end_a] != b[end_b]


@pytest.mark.parametrize(("shared_tokens", "refused"), [(100, False), (200, True)])
def test_boilerplate_is_allowed_and_a_copied_page_is_not(
    source: TextSource, tokenizer: Tokenizer, shared_tokens: int, refused: bool
) -> None:
    calibration = evaluation_windows(
        TextSource("a", None, source.documents[:20]), tokenizer, 512
    )
    evaluation = evaluation_windows(
        TextSource("b", None, source.documents[20:]), tokenizer, 512
    )
    copied = evaluation.ids.clone()
    copied[1, 300 : 300 + shared_tokens] = calibration.ids[2, 40 : 40 + shared_tokens]
    evaluation = replace(evaluation, ids=copied)
    if not refused:
        refuse_overlap(calibration, evaluation)
        return
    with pytest.raises(
        TextError,
        match=r"200 tokens in a row: window 2, token 40 .* and window 1, token 300 ",
    ):
        refuse_overlap(calibration, evaluation)


def test_same_document_on_both_sides_is_refused_by_name(
    source: TextSource, tokenizer: Tokenizer
) -> None:
    """Even where the windows themselves share no token."""
    windows = evaluation_windows(
        TextSource("some", None, source.documents), tokenizer, 64
    )
    begin = windows.first(1)
    [document] = begin.used_documents
    later = windows.after(1).first(1)
    second = replace(document, name="second", sha256="2")
    third = replace(document, name="copy of third", sha256="3")
    begin = replace(begin, documents=((document, second, third),))
    for shared, message in (
        ([document], "made-up 1 is made-up 1: use separate texts"),
        ([third, document], "copy of third is copy of third and 1 more: use separate"),
    ):
        with pytest.raises(TextError, match=f"share a document: {message}"):
            refuse_overlap(begin, replace(later, documents=(tuple(shared),)))
