"""`reference/recipe` trains, proves and judges every reference model; here three steps on a page of text."""

import json
import lzma
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kl_lens.base.environment import for_child
from tests.conftest import ROOT

RECIPE = ROOT / "reference/recipe"
STEPS = 3
BATCH = 2
WINDOW = 32
PAGE = 6000  # characters: more than one window to judge, of 512 tokens


def _run(program: str, *arguments: object) -> None:
    command = [sys.executable, str(RECIPE / program), *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, env=for_child())
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the training archive's layout."""
    folder = tmp_path_factory.mktemp("corpus")
    with lzma.open(ROOT / "reference/text/wikitext2/wiki.valid.raw.xz", "rt") as text:
        page = text.read(PAGE)
    files = {
        "enwik8/enwik8_plain.train.txt": page,
        "enwik8/enwik8_plain.valid.txt": page,
        "gutenberg/gutenberg_kg.train.txt": page,
        "gutenberg/index.json": json.dumps(
            [{"split": "train", "bytes": len(page.encode())}]
        ),
        **{f"wikitext-2/wiki.{split}.raw": page for split in ("train", "valid", "test")},
    }
    for name, content in files.items():
        path = folder / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "mamba2", "hybrid", "hymba"])
def test_a_reference_model_is_trained_and_judged(
    name: str, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / name
    settings = {
        "--corpus": corpus,
        "--model": name,
        "--out": folder,
        "--tokenizer": ROOT / "reference/mamba/tokenizer.json",
        "--tokens": STEPS * BATCH * WINDOW,
        "--batch": BATCH,
        "--window": WINDOW,
        "--evaluations": 1,
        "--device": "cpu",
    }
    _run("train.py", *(word for pair in settings.items() for word in pair))
    report = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    proof = report["verification"]
    assert report["steps"] == STEPS
    assert proof["transformers_loss"] == pytest.approx(proof["recipe_loss"], abs=1e-4)
    assert report["test"]["loss"] == pytest.approx(math.log(4096), rel=0.3)
    assert "token perplexity" in (folder / "README.md").read_text(encoding="utf-8")
    if name != "hymba":
        return
    windows = np.arange(32).reshape(2, 16)
    np.savez(tmp_path / "windows.npz", calibration=windows, test=windows)
    options = {
        "--folder": folder,
        "--windows": tmp_path / "windows.npz",
        "--formats": "int8",
        "--out": tmp_path / "damage.json",
        "--device": "cpu",
    }
    _run("damage.py", *(word for pair in options.items() for word in pair))
    damage = json.loads((tmp_path / "damage.json").read_text(encoding="utf-8"))
    for component, results in damage["results"]["int8"].items():
        assert min(results["test"]["kl"]) >= 0, component
