"""Calibration and evaluation never share text."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from kl_lens.base.errors import TextError
from kl_lens.text.sources import TextSource
from kl_lens.text.windows import evaluation_windows, refuse_overlap


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
        TextSource("one", None, source.documents[:1]), tokenizer, 64, limit=2
    )
    begin = windows.first(1)
    end = replace(
        windows,
        ids=windows.ids[1:],
        starts=windows.starts[1:],
        documents=windows.documents[1:],
    )
    with pytest.raises(
        TextError, match="share a document: made-up 1 is made-up 1: use separate texts"
    ):
        refuse_overlap(begin, end)
