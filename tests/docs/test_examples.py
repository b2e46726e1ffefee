"""The scripts in examples/ run as they are, with little text."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kl_lens.base.environment import for_child
from kl_lens.text.sources import wikitext2
from tests.docs.markdown import ROOT

pytestmark = pytest.mark.slow
pytest.importorskip("gguf", reason="needs the extra gguf")
LITTLE = ["--windows", "2", "--window-length", "32", "--formats", "q4_k,q8_0"]
LITTLE_RUN = [
    *LITTLE,
    "--held-out-windows",
    "4",
    "--evaluation-windows",
    "2",
    "--threads",
    "1",
]


def example(name: str, *words: str, at: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.run(
        ["bash", ROOT / "examples" / name, *words],
        cwd=at,
        env=for_child() | {"PATH": path, "LIMIT": "4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout


def test_board(tmp_path: Path) -> None:
    printed = example("board.sh", "reference:mamba", "4.5MB", *LITTLE_RUN, at=tmp_path)
    assert len(list((tmp_path / "kl-lens-board").glob("*.gguf"))) == 2
    assert "ms/token" in printed


def test_private_text(tmp_path: Path) -> None:
    secret = "The password of the seventh vault is tangerine."
    for name, split in (
        ("calibration", "train"),
        ("held-out", "valid"),
        ("test", "test"),
    ):
        documents = "\n\n".join(
            document.text for document in wikitext2(split).documents[:20]
        )
        (tmp_path / f"{name}.txt").write_text(f"{documents}\n\n{secret} {split}\n")
    example(
        "private-text.sh",
        "reference:mamba",
        "calibration.txt",
        "held-out.txt",
        "test.txt",
        *LITTLE_RUN,
        at=tmp_path,
    )
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert any(path.name == "report.html" for path in files)
    assert not [path for path in files if b"tangerine" in path.read_bytes()], (
        "no word of it is kept"
    )


def test_cluster(tmp_path: Path) -> None:
    example("cluster.sh", "reference:mamba", "4.5MB", "2", *LITTLE, at=tmp_path)
    assert list((tmp_path / "runs/cluster/artifacts/gguf/best").glob("*.gguf"))
    assert (tmp_path / "runs/cluster/report.html").is_file()
