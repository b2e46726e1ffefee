"""GGUF files that end or hang llama.cpp's process: an error about that file, and the others go on."""

from __future__ import annotations

import random
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="needs the extra gguf")

from kl_lens.cli.main import main
from kl_lens.errors import TargetError
from kl_lens.records import Plan
from kl_lens.resources import reference_path
from kl_lens.targets import export, open_session
from kl_lens.targets.gguf import glass
from kl_lens.targets.gguf.library import find_library
from tests.hostile.saying import says_one_line

try:
    find_library()
except TargetError:
    pytest.skip("needs a llama.cpp library", allow_module_level=True)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    artifact = export(reference_path("mamba"), Plan("plain", {}, "hand"), "gguf", folder)
    return folder / artifact.files[0]


def with_number(healthy: Path, place: Path, key: str, code: str, value: float) -> Path:
    """A copy beside which no record lies, with another number behind a key."""
    data = bytearray(healthy.read_bytes())
    at = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4
    data[at : at + struct.calcsize(code)] = struct.pack("<" + code, value)
    place.write_bytes(data)
    return place


KILLERS = {
    "no blocks": ("mamba.block_count", "I", 0),
    "many blocks": ("mamba.block_count", "I", 65536),
    "a negative epsilon": ("mamba.attention.layer_norm_rms_epsilon", "f", -1.0),
    "an epsilon that is no number": ("mamba.attention.layer_norm_rms_epsilon", "f", float("nan")),
}


@pytest.mark.parametrize("name", KILLERS)
def test_what_ends_llama_cpp_is_one_line(name: str, healthy: Path, tmp_path: Path, capsys) -> None:
    file = with_number(healthy, tmp_path / "bad.gguf", *KILLERS[name])
    line = says_one_line(["generate", str(file), "--prompt", "The", "--max-new-tokens", "2"], capsys)
    assert "bad.gguf: llama.cpp ends the process on it with SIGABRT" in line


def test_a_signal_in_the_glass_is_an_error_about_the_file(
    healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the file: here the child ends itself as llama.cpp does."""
    (tmp_path / "ending.py").write_text(
        "import os; print('GGML_ASSERT(x) failed', file=__import__('sys').stderr, flush=True); os.abort()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(glass, "__name__", "ending")
    bare = tmp_path / "bare.gguf"
    shutil.copy(healthy, bare)
    with pytest.raises(
        TargetError, match=r"bare\.gguf: llama\.cpp ends the process .* SIGABRT \(GGML_ASSERT"
    ):
        open_session(bare)


def test_a_file_of_ours_is_not_opened_twice(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a second process"))
    for place in (healthy, healthy.parent):
        open_session(place, threads=1).close()


def test_the_other_files_go_on(healthy: Path, tmp_path: Path, capsys) -> None:
    bad = with_number(healthy, tmp_path / "bad.gguf", *KILLERS["no blocks"])
    text = tmp_path / "text.txt"
    text.write_text("The history of the city begins with a river and a road. " * 40)
    good = tmp_path / "good.gguf"
    shutil.copy(healthy, good)
    words = [
        "evaluate",
        str(bad),
        str(good),
        "--model",
        "reference:mamba",
        "--perplexity",
        str(text),
    ]
    code = main([*words, "--limit", "1", "--window", "64"])
    printed = capsys.readouterr()
    assert code != 0
    assert "bad.gguf" in printed.err
    assert "good.gguf" in printed.out


@pytest.mark.slow
def test_changed_headers_never_end_the_process(healthy: Path, tmp_path: Path) -> None:
    draw, data = random.Random(1), healthy.read_bytes()
    for case in range(60):
        changed = bytearray(data)
        changed[draw.randrange(24, 4000)] = draw.randrange(256)
        file = tmp_path / f"{case}.gguf"
        file.write_bytes(changed)
        with suppress(TargetError):
            open_session(file, threads=1).close()
        file.unlink()
