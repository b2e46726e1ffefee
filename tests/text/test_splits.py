"""Calibration and evaluation never share text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

from kl_lens.base.errors import TextError
from kl_lens.text import (
    Document,
    TextSource,
    draw_windows,
    evaluation_windows,
    open_text,
    refuse_overlap,
    split_documents,
)
from kl_lens.text.splits import ngram_hashes, sections_of


def hashes(source: TextSource) -> set[str]:
    return {document.sha256 for document in source.documents}


# Splitting


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_split_is_disjoint_complete_and_of_the_size_asked_for(source: TextSource, share: float) -> None:
    calibration, evaluation = split_documents(source, evaluation_share=share)
    assert not hashes(calibration) & hashes(evaluation)
    assert hashes(calibration) | hashes(evaluation) == hashes(source)
    assert evaluation.characters / source.characters == pytest.approx(share, abs=0.05)
    assert (calibration.split, evaluation.split) == ("calibration", "evaluation")


def test_split_depends_on_the_seed_alone(source: TextSource) -> None:
    backwards = TextSource("other name", None, source.documents[::-1])
    assert hashes(split_documents(source, seed=3)[0]) == hashes(split_documents(backwards, seed=3)[0])
    assert hashes(split_documents(source, seed=3)[0]) != hashes(split_documents(source, seed=4)[0])


def test_equal_documents_go_to_the_same_side(source: TextSource) -> None:
    copies = tuple(Document(f"copy of {d.name}", d.text + "\n") for d in source.documents)
    doubled = TextSource("doubled", None, source.documents + copies)
    for part in split_documents(doubled):
        assert len(part.documents) == 2 * len(hashes(part))


def test_one_long_file_is_cut_into_sections_at_blank_lines(tmp_path: Path, source: TextSource) -> None:
    (tmp_path / "book.txt").write_text(source.joined(), encoding="utf-8")
    book = open_text(tmp_path / "book.txt")
    calibration, evaluation = split_documents(book)
    sections = sorted(
        calibration.documents + evaluation.documents, key=lambda d: int(d.name.rpartition(" ")[2])
    )
    assert len(sections) > 16
    assert "".join(section.text for section in sections) == book.joined()
    assert all(section.text.endswith("\n\n") for section in sections[:-1])
    assert evaluation.characters / book.characters == pytest.approx(0.5, abs=0.05)


def test_file_without_blank_lines_is_cut_at_line_ends() -> None:
    text = "".join(f"line {n} of a poem\n" for n in range(500))
    for part in split_documents(TextSource("poem", None, (Document("poem", text),))):
        assert all(section.text.endswith("poem\n") for section in part.documents)


@given(st.text(alphabet="ab \n", max_size=300), st.integers(0, 40))
def test_sections_put_together_are_the_document(text: str, longest: int) -> None:
    sections = sections_of(Document("d", text), longest)
    assert "".join(section.text for section in sections) == text
    assert all(section.text.strip() for section in sections) or not text.strip()


def test_what_cannot_be_split_is_refused() -> None:
    line = TextSource("line.txt", None, (Document("line.txt", "one long line " * 100),))
    with pytest.raises(TextError, match=r"line.txt: a single document without line breaks cannot be split"):
        split_documents(line)
    for share in (0, 1, -0.5):
        with pytest.raises(TextError, match="must lie between 0 and 1"):
            split_documents(line, evaluation_share=share)


# Checking


def test_windows_of_a_split_pass(source: TextSource, tokenizer: Tokenizer) -> None:
    calibration, evaluation = split_documents(source)
    refuse_overlap(
        draw_windows(calibration, tokenizer, windows=16, length=64),
        evaluation_windows(evaluation, tokenizer, 64),
    )


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


def test_same_article_under_another_file_name_is_refused(
    tmp_path: Path, source, tokenizer: Tokenizer
) -> None:
    """The copy stands in the middle of a longer file: no document hash is the same, the tokens are."""
    inserted = source.documents[7].text
    surroundings = [document.text for document in source.documents[20:24]]
    (tmp_path / "mixed.txt").write_text(
        "\n\n".join([*surroundings[:2], inserted, *surroundings[2:]]), encoding="utf-8"
    )
    calibration = evaluation_windows(TextSource("a", None, source.documents[5:10]), tokenizer, 256)
    evaluation = evaluation_windows(str(tmp_path / "mixed.txt"), tokenizer, 256)
    with pytest.raises(
        TextError, match=r"share 128 tokens in a row: window .*made-up 8.*mixed\.txt"
    ) as caught:
        refuse_overlap(calibration, evaluation)
    assert "\n" not in str(caught.value)


def test_trailing_blank_space_makes_no_new_document(source: TextSource, tokenizer: Tokenizer) -> None:
    copies = tuple(Document(f"copy {d.name}", f"\n{d.text}  \n\n") for d in source.documents)
    with pytest.raises(TextError, match="share a document"):
        refuse_overlap(
            draw_windows(source, tokenizer, windows=64, length=64),
            evaluation_windows(TextSource("copies", None, copies), tokenizer, 64),
        )


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
