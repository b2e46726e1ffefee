"""What is not what its name says: a pointer, a web page, half a download, another kind of file, a folder, a pipe. Each
command says in one line which file it is, and changes nothing."""

import gzip
import io
import os
import shutil
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kl_lens.base.errors import KLLensError
from kl_lens.text.sources import open_text
from tests.byte_level import save_tokenizer
from tests.families import tiny_model
from tests.hostile.aside import forked_quarantine
from tests.hostile.saying import says_one_line, within_time
from tests.reporting.sample import make_run

Q8_0 = ["--target", "gguf", "--format", "q8_0"]
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
)


def _archive(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("inside", content)
    return buffer.getvalue()


def _array(content: bytes) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.frombuffer(content[:64].ljust(64), np.uint8))
    return buffer.getvalue()


# What stands in a file's place, made from its content.
CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "pointer": lambda _: POINTER,
    "pointer of Windows": lambda _: POINTER.replace(b"\n", b"\r\n"),
    "page": lambda _: PAGE,
    "small page": lambda _: b"<html>404</html>",
    "empty": lambda _: b"",
    "one byte": lambda content: content[:1],
    "half": lambda content: content[: len(content) // 2],
    "all but the end": lambda content: content[:-9],
    "without its beginning": lambda content: content[9:],
    "zeros": lambda content: bytes(len(content)),
    "ones": lambda content: b"\xff" * len(content),
    "compressed": gzip.compress,
    "archive": _archive,
    "array": _array,
    "pickle": lambda _: b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a.",
    "picture": lambda _: b"\x89PNG\r\n\x1a\n" + bytes(64),
    "hub's error": lambda _: b"Entry not found",
    "error as JSON": lambda _: b'{"error": "Repository not found"}',
    "null": lambda _: b"null",
    "UTF-16": lambda _: '{"a": 1}'.encode("utf-16"),
    "merge conflict": lambda content: b"<<<<<<< HEAD\n" + content,
    "text of a link": lambda _: b"../../blobs/0123456789abcdef",
}


def _folder(path: Path) -> None:
    path.mkdir()


def _broken_link(path: Path) -> None:
    path.symlink_to("nowhere")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(before)


PLACES = {
    "folder": _folder,
    "broken link": _broken_link,
    "loop": _loop,
    "pipe": os.mkfifo,
    "socket": _socket,
}
# What the line has to say besides the file's name.
SAID = {
    "pointer": "git lfs pull",
    "pointer of Windows": "git lfs pull",
    "page": "web page",
    "small page": "web page",
    "empty": "is empty",
}


def put(path: Path, kind: str) -> None:
    """Puts something of this kind in a file's place."""
    content = path.read_bytes()
    path.unlink()
    if kind in PLACES:
        PLACES[kind](path)
    else:
        path.write_bytes(CONTENTS[kind](content))


def listed(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy") / "mamba"
    tiny_model("mamba").save_pretrained(folder)
    save_tokenizer(folder, ["The history of the city. " * 20], vocabulary=90)
    return folder


# Of error as JSON and null a config.json may be made; of others no reader can make anything.
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", [*CONTENTS, *PLACES])
def test_in_a_checkpoint(
    kind: str, name: str, healthy: Path, tmp_path: Path, capsys
) -> None:
    folder = Path(shutil.copytree(healthy, tmp_path / "model"))
    put(folder / name, kind)
    before = listed(folder)
    with within_time(60, (kind, name)):
        line = says_one_line(
            ["inspect", str(folder)], capsys, may_succeed=name == "tokenizer.json"
        )
    assert not line or str(folder) in line
    assert not line or SAID.get(kind, "") in line
    assert listed(folder) == before


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    pytest.importorskip("openvino", reason="needs the extra openvino")
    with forked_quarantine("openvino", "kl_lens.targets.openvino.dissection"):
        yield


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("name", ["model.gguf", "openvino_model.xml", "model-Q4_0"])
def test_as_a_file_of_a_runtime(
    kind: str, name: str, warm: None, tmp_path: Path, capsys
) -> None:
    path = tmp_path / name
    path.write_bytes(b"GGUF" + bytes(range(256)))
    put(path, kind)
    with within_time(60, (kind, name)):
        line = says_one_line(["autopsy", str(path)], capsys)
    assert name in line
    if name.endswith(".gguf"):
        assert SAID.get(kind, "") in line
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_gguf_file_without_its_suffix(tmp_path: Path, capsys) -> None:
    (tmp_path / "model").write_bytes(b"GGUF" + bytes(100))
    for words in (["autopsy"], ["generate", "--prompt", "a"]):
        line = says_one_line([words[0], str(tmp_path / "model"), *words[1:]], capsys)
        assert "is a GGUF file: rename it to model.gguf" in line


# -- texts ------------------------------------------------------------------------------------------------------

ROW = b'{"text": "The history of the city."}\n'
TEXTS: dict[str, tuple[str, bytes]] = {
    "UTF-16": ("a.txt", "The city.".encode("utf-16")),
    "UTF-32": ("a.txt", "The city.".encode("utf-32")),
    "Windows' letters": ("a.txt", "Die Brücke".encode("cp1252")),
    "half a letter at the end": ("a.txt", "Die Brü".encode()[:-1]),
    "compressed text": ("a.txt", gzip.compress(b"The city.")),
    "a picture": ("a.txt", b"\x89PNG\r\n\x1a\n" + bytes(range(256))),
    "an array of rows": ("a.jsonl", b"[" + ROW.strip() + b"]"),
    "rows with a comma": ("a.jsonl", ROW.replace(b"}\n", b"},\n")),
    "single quotes": ("a.jsonl", ROW.replace(b'"', b"'")),
    "no quotes": ("a.jsonl", b"{text: 1}"),
    "a table": ("a.jsonl", b"id,text\n1,The city.\n"),
    "a chat without words": ("a.jsonl", b'{"messages": [{"role": "user"}]}'),
    "a list of texts": ("a.jsonl", b'{"text": ["a", "b"]}'),
    "no text": ("a.jsonl", b'{"text": null}'),
    "Text": ("a.jsonl", ROW.replace(b"text", b"Text")),
    "NaN alone": ("a.jsonl", b"NaN"),
    "a number of 5,000 digits": ("a.jsonl", b'{"id": ' + b"9" * 5000 + b"}"),
    "compressed rows": ("a.jsonl", gzip.compress(ROW)),
    "UTF-16 rows": ("a.jsonl", ROW.decode().encode("utf-16")),
    "rows as parquet": ("a.parquet", ROW),
    "half a parquet": ("a.parquet", b"PAR1" + bytes(50)),
    "two magics": ("a.parquet", b"PAR1" + bytes(8) + b"PAR1"),
    "a pointer as parquet": ("a.parquet", POINTER),
    "a page as parquet": ("a.parquet", PAGE),
    "a page as rows": ("a.jsonl", PAGE),
    "a pointer as rows": ("a.jsonl", POINTER),
    "a pointer as text": ("a.txt", POINTER),
    "a table with a suffix": ("a.csv", b"id,text\n"),
    "a JSON file": ("a.json", b"[]"),
    "compressed, with its suffix": ("a.jsonl.gz", gzip.compress(ROW)),
    "a shell's star": ("*.txt", b""),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_texts(kind: str, tmp_path: Path) -> None:
    name, content = TEXTS[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(KLLensError) as caught:
        open_text(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    if "pointer" in kind:
        assert "git lfs pull" in str(caught.value)


COLUMNS = {
    "numbers": pa.array([1, 2]),
    "lists": pa.array([["a"], ["b"]]),
    "records": pa.array([{"a": "b"}]),
    "bytes": pa.array([b"a", b"b"]),
    "nothing": pa.array([None, None], pa.string()),
    "blank": pa.array(["", " "]),
    "no rows": pa.array([], pa.string()),
    "bytes that are no text": pa.array([b"\xff\xfe"]).cast(pa.string(), safe=False),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns(kind: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": COLUMNS[kind]}), tmp_path / "a.parquet")
    with pytest.raises(KLLensError, match=r"a\.parquet"):
        open_text(tmp_path / "a.parquet")


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_texts_that_are_no_files(kind: str, name: str, tmp_path: Path) -> None:
    PLACES[kind](tmp_path / name)
    with (
        within_time(20, kind),
        pytest.raises(KLLensError, match=name.replace(".", r"\.")),
    ):
        open_text(tmp_path / name)


# -- runs and settings ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run", stages=("plan",))


@pytest.mark.parametrize("name", ["run.sqlite", "plans/small.json"])
@pytest.mark.parametrize("kind", [*CONTENTS, *PLACES])
def test_in_a_run(
    kind: str, name: str, healthy_run: Path, tmp_path: Path, capsys
) -> None:
    run = Path(shutil.copytree(healthy_run, tmp_path / "run"))
    for beside in run.glob("run.sqlite-*"):
        beside.unlink()
    put(run / name, kind)
    with within_time(60, (kind, name)):
        # The last bytes of a journal may hold nothing.
        harmless = kind == "all but the end" and name == "run.sqlite"
        words = ["report", "--run", str(run)]
        line = says_one_line(words, capsys, may_succeed=harmless)
    assert not line or str(run) in line
    assert bool(line) != (run / "report.html").exists()


@pytest.mark.parametrize("kind", CONTENTS)
def test_as_settings(kind: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(b"windows: 8\ntext: wikitext2\nnothing-of-that-name: 1\n")
    put(file, kind)
    with within_time(20, kind):
        line = says_one_line(["run", "nowhere/model", "--config", str(file)], capsys)
    assert "settings.yaml" in line or "nowhere/model" in line
