"""GGUF files that end or hang llama.cpp's process: an error about that file, and the others go on."""

import random
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="needs the extra gguf")

from kl_lens.base.errors import TargetError
from kl_lens.cli.main import main
from kl_lens.model import load
from kl_lens.run.records import Plan
from kl_lens.targets import export, open_session
from kl_lens.targets.gguf.library import find_library
from tests.families import plain
from tests.hostile.aside import forked_quarantine, opens
from tests.hostile.saying import cases, says_one_line

try:
    find_library()
except TargetError:
    pytest.skip("needs a llama.cpp library", allow_module_level=True)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    artifact = export(
        plain(load("reference:mamba")), Plan("plain", {}, "hand"), "gguf", folder
    )
    return folder / artifact.files[0]


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    with forked_quarantine("kl_lens.targets.gguf.session", "gguf", __name__):
        yield


def with_number(healthy: Path, path: Path, key: str, code: str, value: float) -> Path:
    """A copy beside which no record lies, with another number behind a key."""
    data = bytearray(healthy.read_bytes())
    at = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4
    data[at : at + struct.calcsize(code)] = struct.pack("<" + code, value)
    path.write_bytes(data)
    return path


CONTRADICTIONS = {
    "no blocks": ("mamba.block_count", "I", 0),
    "many blocks": ("mamba.block_count", "I", 65536),
    "a negative epsilon": ("mamba.attention.layer_norm_rms_epsilon", "f", -1.0),
    "an epsilon of NaN": ("mamba.attention.layer_norm_rms_epsilon", "f", float("nan")),
    "another width": ("mamba.embedding_length", "I", 255),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_would_end_llama_cpp_ends_another_process(
    name: str, healthy: Path, tmp_path: Path, capsys
) -> None:
    file = with_number(healthy, tmp_path / "bad.gguf", *CONTRADICTIONS[name])
    line = says_one_line(
        ["generate", str(file), "--prompt", "The", "--max-new-tokens", "2"], capsys
    )
    assert "bad.gguf: llama.cpp c" in line  # crashes on it, or cannot load it


def test_a_file_of_ours_is_not_opened_twice(
    healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "subprocess.run", lambda *_, **__: pytest.fail("a second process")
    )
    for path in (healthy, healthy.parent):
        open_session(path, threads=1).close()


def test_the_other_files_go_on(healthy: Path, tmp_path: Path, capsys) -> None:
    bad = with_number(healthy, tmp_path / "bad.gguf", *CONTRADICTIONS["no blocks"])
    text = tmp_path / "text.txt"
    text.write_text("The history of the city begins with a river and a road. " * 40)
    good = tmp_path / "good.gguf"
    shutil.copy(healthy, good)
    words = f"evaluate {bad} {good} --model reference:mamba --perplexity {text} --windows 1 --window-length 64"
    code = main(words.split())
    printed = capsys.readouterr()
    assert code != 0
    assert "bad.gguf" in printed.err
    assert "good.gguf" in printed.out


def changed(data: bytes, draw: random.Random) -> bytes:
    """Another byte in the header, another number behind a key, a string of another kind, or less of all."""
    content = bytearray(data)
    chance = draw.random()
    if chance < 0.4:
        content[draw.randrange(24, 4000)] = draw.randrange(256)
    elif chance < 0.6:
        at = draw.choice(
            [
                match.end()
                for match in re.finditer(rb"[a-z0-9_.]{6,40}\x04\0\0\0", data[:200_000])
            ]
        )
        content[at : at + 4] = struct.pack(
            "<I", draw.choice([0, 1, 3, 255, 2**16, 2**31, 2**32 - 1])
        )
    elif chance < 0.75:
        at = draw.choice(
            [
                match.start()
                for match in re.finditer(rb"blk\.\d+\.[a-z0-9_.]+", data[:400_000])
            ]
        )
        content[at + draw.randrange(60)] ^= 1 << draw.randrange(8)
    elif chance < 0.9:
        for _ in range(draw.choice([1, 8, 64])):
            content[draw.randrange(4000, 100_000)] = draw.randrange(256)
    else:
        del content[draw.randrange(len(content)) :]
    return bytes(content)


@cases(3, 400)
def test_changed_files_never_end_the_process(
    cases: int, healthy: Path, tmp_path: Path
) -> None:
    draw = random.Random(cases)
    data = healthy.read_bytes()
    for case in range(cases):
        file = tmp_path / f"{case}.gguf"
        file.write_bytes(changed(data, draw))
        opens(file)
        file.unlink()
