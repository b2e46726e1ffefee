"""WikiText-2 ships with the project, whole, and is joined as the published protocol joins it."""

import lzma

import numpy as np
import pytest

from kl_lens.base.files import reference_path
from kl_lens.text.sources import split_articles, wikitext2
from kl_lens.text.windows import draw_windows, token_stream


@pytest.mark.parametrize(
    ("split", "articles", "lines"),
    [("train", 600, 36718), ("valid", 60, 3760), ("test", 60, 4358)],
)
def test_each_split_is_the_published_text(split: str, articles: int, lines: int) -> None:
    """The rows of `datasets` are the file's lines, newline included; the non-empty ones are joined."""
    with lzma.open(
        reference_path("text", "wikitext2", f"wiki.{split}.raw.xz"),
        "rt",
        encoding="utf-8",
    ) as file:
        rows = list(file)
    documents = wikitext2(split).documents
    assert (len(documents), len(rows)) == (articles, lines)
    assert documents[-1].name.startswith(f"wikitext2:{split}, article {articles} (")
    assert wikitext2(split).joined() == "\n\n".join(row for row in rows if row.strip())


def test_tokens_of_the_documents_are_the_tokens_of_the_joined_text(tokenizer) -> None:
    source = wikitext2("valid")
    in_one_go = tokenizer.encode(source.joined(), add_special_tokens=False).ids
    assert np.array_equal(token_stream(source, tokenizer).ids, in_one_go)
    windows = draw_windows("wikitext2:validation", tokenizer)  # the published protocol
    assert (windows.label, windows.seed) == ("wikitext2:valid", 42)
    assert windows.ids.shape == (64, 512)


def test_a_title_stands_alone_between_blank_lines() -> None:
    first, legend, second = (f" = {name} = \n" for name in ("A", "Goals ; B", "C"))
    lines = ["before\n", "\n", first, "\n", legend, "text\n", legend, " \n", second]
    assert split_articles(lines) == [
        ("untitled", ["before\n"]),
        ("A", [first, legend, "text\n", legend]),
        ("C", [second]),
    ]
    assert split_articles([first, "\n", legend, "\n"]) == [
        ("A", [first]),
        ("Goals ; B", [legend]),
    ]
