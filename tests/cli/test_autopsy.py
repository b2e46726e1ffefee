"""`kl-lens autopsy` from the command line: a table, JSON, a run that keeps it, and one clear line."""

import json
import shutil
from pathlib import Path

import pytest

from kl_lens.cli.main import main
from tests.byte_level import save_tokenizer
from tests.cli.commands import done
from tests.families import tiny_model


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer that llama.cpp has too."""
    copy = Path(shutil.copytree(tiny_folder, tmp_path_factory.mktemp("autopsy") / "tiny"))
    tiny_model("mamba", vocabulary=300).save_pretrained(copy)
    save_tokenizer(copy, [(copy / "text.txt").read_text()], vocabulary=300)
    return copy


@pytest.fixture(scope="module")
def file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("file")
    words = f"export {folder} --target gguf --format q8_0 --out {out}".split()
    done(words, "--without-tokenizer")
    return next(out.glob("*.gguf"))


@pytest.fixture
def flags(folder: Path) -> list[str]:
    return (
        f"--text {folder / 'text.txt'} --windows 2 --window-length 32 --threads 1".split()
    )


def test_a_run_keeps_it_and_plans_for_the_same_bytes(
    folder: Path, file: Path, flags: list[str], tmp_path: Path, capsys
) -> None:
    run = str(tmp_path / "run")
    text = str(folder / "text.txt")
    words = f"measure {folder} --run {run} --text {text} --windows 2 --window-length 32".split()
    done(words, "--target gguf --formats q4_0,q8_0")
    capsys.readouterr()
    done(f"autopsy {file} --run {run}", *flags)
    shown = capsys.readouterr().out
    assert "the original with the file's weights" in shown
    assert "Our plan from this run: KL" in shown
    assert "Nothing is wrong: it loses what Q8_0 loses" in shown
    done(f"report --run {run}")
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Autopsies" in page
    assert "Nothing is wrong: it loses what Q8_0 loses" in page


def test_the_file_alone(file: Path, capsys) -> None:
    done(f"autopsy {file} --json")
    report = json.loads(capsys.readouterr().out)
    assert (report["faults"], report["bytes"]) == (0, file.stat().st_size)
    assert "Nothing is wrong that the file alone could show" in report["headline"]
    assert {tensor["type"] for tensor in report["tensors"]} >= {"Q8_0", "F32"}


def test_a_fault_is_exit_code_2(file: Path, tmp_path: Path, capsys) -> None:
    content = file.read_bytes()
    at = content.index(b"general.architecture") + 32
    (tmp_path / "wrong.gguf").write_bytes(content[:at] + b"m4mba" + content[at + 5 :])
    assert main(["autopsy", str(tmp_path / "wrong.gguf")]) == 2
    assert "llama.cpp does not run it" in capsys.readouterr().out
