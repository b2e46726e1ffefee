"""What people expect of any command line: completion, versions, no colours on demand."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kl_lens.base.version import __version__
from kl_lens.cli.main import VERBS, main


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kl_lens.cli.flags import completion
    from kl_lens.cli.main import build_parser

    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        (folder / shell).write_text(completion(shell, build_parser()))
    return folder


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kl-lens mea", "measure"),
        ("kl-lens --comp", "--completion"),
        ("kl-lens run --men", "--menu"),
        ("kl-lens run --menu s", "short small"),
        ("kl-lens export --target g", "gguf"),
        ("kl-lens run --run r", ""),  # any name: bash offers files
        ("kl-lens --debug plan --max-b", "--max-bytes --max-bpw"),
    ],
)
def test_bash_completes(scripts: Path, typed: str, offered: str) -> None:
    words = " ".join(f'"{word}"' for word in typed.split())
    asked = (
        f"source {scripts / 'bash'}; COMP_WORDS=({words}); COMP_CWORD={len(typed.split()) - 1}; _kl_lens; "
    )
    asked += 'echo "${COMPREPLY[*]}"'
    answer = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert (answer.stdout.strip(), answer.stderr) == (offered, "")


def test_every_verb_and_flag_is_in_every_script(scripts: Path) -> None:
    for script in scripts.iterdir():
        text = script.read_text()
        assert all(verb in text for verb in VERBS)
        assert "write-config" in text


def test_versions(capsys) -> None:
    assert main(["--version"]) == 0
    first, _, *rest = capsys.readouterr().out.splitlines()
    assert first == f"kl-lens {__version__}"
    assert {"torch", "transformers"} <= {line.split()[0] for line in rest}
