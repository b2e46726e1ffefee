"""`kl-lens doctor`: with the wheel, with a llama.cpp that the user named, and with nothing installed."""

import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kl_lens.cli.main import main
from kl_lens.study import doctor as doctoring
from kl_lens.targets.gguf import library
from tests.cli.commands import refused

pytest.importorskip("gguf", reason="needs the extra gguf")
FASTER = "a llama.cpp built for this processor is faster"
KERNELS = functools.cache(
    doctoring._kernels
)  # takes seconds, and is not what these tests are about


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without what the user has named, and what a test names is forgotten."""
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, "")
    monkeypatch.setattr(doctoring, "_kernels", KERNELS)
    yield
    library.found_library.cache_clear()


def doctor(capsys, *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    capsys.readouterr()
    code = main([*words, "doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)["parts"]


def test_the_wheel_works_and_a_native_build_is_faster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, parts = doctor(capsys)
    assert code == 0
    assert all(part["problem"] == "" for part in parts.values())
    assert FASTER in str(parts["llama.cpp"]["facts"])


def test_a_library_is_named_by_its_path_or_its_folder(tmp_path: Path, capsys) -> None:
    """However deep in a package, under whatever version's name; processes that are started use it too."""
    package = tmp_path / "bins/linux"
    package.mkdir(parents=True)
    file = shutil.copy(library.wheel() or "", package / "libllama.v0.5.0.so")
    for path in (tmp_path, file):
        code, parts = doctor(capsys, "--llama-cpp", str(path))
        assert code == 0
        assert f"from your choice: {file}" in parts["llama.cpp"]["facts"]
        assert FASTER not in str(parts["llama.cpp"]["facts"])
        assert os.environ[library.ENVIRONMENT_VARIABLE] == str(path)


def test_what_is_no_library_is_refused_and_not_kept(tmp_path: Path, capsys) -> None:
    assert f"{tmp_path}: no llama.cpp library there" in refused(
        capsys, f"--llama-cpp {tmp_path} doctor"
    )
    (tmp_path / "libllama.so").write_bytes(b"no library")
    assert "libllama.so cannot be loaded" in refused(
        capsys, f"--llama-cpp {tmp_path} doctor"
    )
    assert os.environ[library.ENVIRONMENT_VARIABLE] == ""


def test_nothing_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "wheel", lambda: None)
    library.found_library.cache_clear()
    code, parts = doctor(capsys)
    assert code == 1
    assert parts["llama.cpp"]["mend"] == "pip install 'kl-lens[gguf]'"
