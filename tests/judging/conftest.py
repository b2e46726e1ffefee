"""A tiny model, its text, and files exported from it."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kl_lens.judging import EvaluationText, prepare
from kl_lens.model import LoadedModel, load
from kl_lens.run.records import Plan
from kl_lens.targets import export
from tests.cli.conftest import tiny_folder  # noqa: F401


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> LoadedModel:  # noqa: F811
    loaded = load(tiny_folder)
    loaded.tokenizer.eos_token = "[UNK]"  # lm-eval wants a token to begin with
    return loaded


@pytest.fixture(scope="session")
def text(model: LoadedModel, tiny_folder: Path) -> EvaluationText:  # noqa: F811
    return prepare(str(tiny_folder / "text.txt"), model.task, window=48, limit=6)


@pytest.fixture(scope="session")
def exported(
    model: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A fresh copy of the tiny model as files of a target: every matrix in 8 bits."""
    folders: dict[str, Path] = {}

    def make(target: str) -> Path:
        if target not in folders:
            fmt = {"gguf": "q8_0", "openvino": "int8"}[target]
            formats = {
                c.name: fmt
                for c in model.anatomy.candidates
                if not c.name.endswith("dt_proj")
            }
            folder = tmp_path_factory.mktemp("exported") / target
            # A GGUF file has no place for a word-level tokenizer; it then works with token ids.
            bare = (
                dataclasses.replace(model, tokenizer=None) if target == "gguf" else model
            )
            export(bare, Plan("eight", formats, "test"), target, folder)
            folders[target] = folder
        copy = tmp_path_factory.mktemp("copy") / target
        shutil.copytree(folders[target], copy)
        return copy

    return make
