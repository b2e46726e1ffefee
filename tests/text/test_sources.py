"""Text by name or path; whatever is wrong with it is said in one line."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kl_lens.base.errors import TextError
from kl_lens.base.files import LFS_POINTER
from kl_lens.text import sources
from kl_lens.text.sources import open_text

ROWS = ["First row.", "Second row,\nof two lines.", "Dritte Zeile: Übermut."]


def jsonl(rows: list[object]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def texts(name: str) -> list[str]:
    return [document.text for document in open_text(name).documents]


# What can be read


MANY = (
    jsonl([*({"text": text, "id": 1} for text in ROWS), {"text": "  \n"}]) + b"\n"
)  # blank rows are none


@pytest.mark.parametrize(
    ("filename", "content", "read"),
    [
        ("a.txt", b"One.\n\nTwo.\n", ["One.\n\nTwo.\n"]),
        ("a.txt", b"\xef\xbb\xbfOne.", ["One."]),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "One."}', ["One."]),
        ("a.jsonl", MANY, ROWS),
        ("a.json", jsonl([{"text": text} for text in ROWS]), ROWS),
        ("a.json", json.dumps([{"text": text} for text in ROWS]).encode(), ROWS),
        ("a.json", b'{"text": "One."}', ["One."]),
    ],
)
def test_files_that_can_be_read(
    filename: str, content: bytes, read: list[str], tmp_path: Path
) -> None:
    assert texts(write(tmp_path / filename, content)) == read


def test_every_parquet_row_is_a_document(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"id": [1, 2, 3], "text": ROWS}),
        tmp_path / "a.parquet",
        row_group_size=2,
    )
    assert texts(str(tmp_path / "a.parquet")) == ROWS


def test_folder_gives_all_its_text_files_in_order_of_their_paths(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", b"from b")
    write(tmp_path / "a" / "rows.jsonl", jsonl([{"text": "from a"}]))
    write(tmp_path / "picture.png", b"\x89PNG")
    write(tmp_path / "about.json", b'{"rows": 2}')
    write(tmp_path / ".cache" / "c.txt", b"hidden")
    assert texts(f"{tmp_path}/") == ["from a", "from b"]


def test_names_with_and_without_split() -> None:
    assert open_text("wikitext2:valid").label == "wikitext2:valid"
    assert open_text("wikitext2").label == "wikitext2:train"
    assert open_text("wikitext2", for_evaluation=True).label == "wikitext2:test"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", ""])
def test_of_a_long_text_only_the_beginning_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And files behind it are not opened."""
    monkeypatch.setattr(sources, "MOST_CHARACTERS", 1000)
    text = "Übermut. " * 100
    write(tmp_path / "a.txt", text.encode() * 2)
    write(tmp_path / "a.jsonl", jsonl([{"text": text}] * 1100) + b"no JSON")
    pq.write_table(pa.table({"text": [text] * 1100 + [None]}), tmp_path / "a.parquet")
    opened = open_text(tmp_path / name)
    assert "".join(document.text for document in opened.documents) == (text * 2)[:1000]
    assert opened.note.endswith("is long: its first 1,000 characters are used")
    write(tmp_path / "exact" / "a.txt", ("x" * 1000).encode())
    assert not open_text(tmp_path / "exact").note


# What cannot


BAD_FILES = {
    "empty txt": ("a.txt", b"", "a.txt: empty"),
    "blank txt": ("a.txt", b" \n\n", "a.txt: holds only blank text"),
    "latin-1 txt": (
        "a.txt",
        b"caf\xe9 au lait",
        "a.txt: not UTF-8 .byte 0xe9 at offset 3",
    ),
    "latin-1 row": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "\xe9"}',
        "line 2: not UTF-8 .byte 0xe9 at offset 24",
    ),
    "only blank rows": ("a.jsonl", b'{"text": ""}\n', "a.jsonl: holds only blank text"),
    "broken json": ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: not valid JSON"),
    "very deep json": ("a.jsonl", b"[" * 200_000, "line 1: not valid JSON"),
    "no text": (
        "a.jsonl",
        b'{"text": "a"}\n{"body": "b", "id": 1}',
        "line 2: no text and no chat .found: body, id.: expected `text`",
    ),
    "text is a number": (
        "a.jsonl",
        b'{"text": 7}\n',
        "line 1: no text and no chat .found: text.",
    ),
    "row is a list": (
        "a.jsonl",
        b'["text"]\n',
        "line 1: no text and no chat .found: list.",
    ),
    "broken array": ("a.json", b'[{"text": "a"},', "line 1: not valid JSON"),
    "latin-1 array": ("a.json", b'["\xe9"]', "a.json: not UTF-8 .byte 0xe9 at offset 2"),
    "message without a role": (
        "a.jsonl",
        b'{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}',
        "line 1, `messages`, message 2: no role with a content",
    ),
    "no list of messages": (
        "a.jsonl",
        b'{"prompt": 1, "completion": "b"}',
        "line 1, `prompt`, message 1: no role",
    ),
    "half a surrogate": (
        "a.jsonl",
        b'{"text": "ab\\ud800"}',
        "line 1: half a surrogate pair at character 2",
    ),
    "no parquet at all": ("a.parquet", b"plain text", "not a readable Parquet file"),
    "empty parquet": ("a.parquet", b"", "empty"),
    "pointer": ("a.txt", LFS_POINTER + b"/spec/v1", "a pointer of Git LFS; run `git lfs"),
    "unknown suffix": (
        "a.docx",
        b"x",
        "a.docx: not a text file.*.txt, .json, .jsonl, .parquet",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    filename, content, complaint = BAD_FILES[case]
    with pytest.raises(TextError, match=complaint) as caught:
        open_text(write(tmp_path / filename, content))
    assert "\n" not in str(caught.value)
    assert filename in str(caught.value)


def test_bad_parquet_columns_and_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), path)
    with pytest.raises(
        TextError, match=r"a.parquet: no text and no chat .found: id, body"
    ):
        open_text(path)
    pq.write_table(pa.table({"text": ["x", None]}), path)
    with pytest.raises(TextError, match=r"a.parquet, row 2: no text and no chat"):
        open_text(path)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nowhere.txt", "nowhere.txt: no such file or folder"),
        ("FOLDER", "no text files in this folder: expected .txt"),
        ("wikitext3", "wikitext3: no text of that name: use wikitext2"),
        ("", "an empty name: no text of that name"),  # and not the current folder
        ("wikitext2:dev", "wikitext2:dev: no such split: use one of train, valid, test"),
    ],
)
def test_names_that_mean_nothing(name: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(TextError, match=complaint):
        open_text(tmp_path if name == "FOLDER" else name)
