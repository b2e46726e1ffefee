"""Models from the hub, with the real client, from a small hub on this machine."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kl_lens.base.errors import CheckpointError
from kl_lens.measuring.sweep import model_identity
from kl_lens.model import load, model_folder
from kl_lens.model.hub import pinned_name
from kl_lens.run.folder import Run
from kl_lens.study.session import Session
from tests.hub_server import Hub

SHARDED = {"max_shard_size": "100KB"}


@pytest.fixture
def tiny(hub: Hub, saved: Callable[..., Path]) -> Hub:
    """`org/tiny`: sharded, with the twins and the rest that repositories collect."""
    repository = hub.add("org/tiny", saved("llama", **SHARDED))
    names = [name for name in repository.files if name.endswith(".safetensors")]
    assert len(names) > 1
    index = json.dumps(
        {"metadata": {}, "weight_map": {"a": "pytorch_model-1-of-1.bin"}}
    ).encode()
    repository.files |= {
        "pytorch_model-1-of-1.bin": b"x" * 1000,
        "pytorch_model.bin.index.json": index,
        "consolidated.safetensors": b"x" * 1000,
        "onnx/config.json": b"{}",
        "model.gguf": b"x" * 1000,
        "README.md": b"# Tiny",
    }
    return hub


def test_only_the_files_that_are_needed_come(tiny: Hub) -> None:
    model = load("org/tiny")
    commit = tiny.repositories["org/tiny"].commit
    assert (model.name, model.source) == ("org/tiny", f"org/tiny@{commit}")
    come = {path.name for path in model.folder.iterdir()}
    assert come == {
        n
        for n in tiny.repositories["org/tiny"].files
        if n.startswith(("model-", "model.safetensors"))
    } | {"config.json", "generation_config.json", "README.md"}
    assert (
        not {"pytorch_model-1-of-1.bin", "consolidated.safetensors", "model.gguf"}
        & tiny.downloaded()
    )


def test_a_commit_in_the_cache_asks_the_hub_nothing(tiny: Hub) -> None:
    folder = model_folder("org/tiny")
    tiny.requests.clear()
    assert model_folder(f"org/tiny@{folder.name}") == folder
    assert not tiny.requests


@pytest.mark.parametrize(
    "change", [("HF_HUB_OFFLINE", True), ("ENDPOINT", "http://127.0.0.1:9")]
)
def test_without_the_hub_the_cache_is_used_and_a_part_is_not_taken_for_the_whole(
    change: tuple[str, object], tiny: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("org/tiny")
    monkeypatch.setattr(f"huggingface_hub.constants.{change[0]}", change[1])
    assert model_folder("org/tiny") == folder
    with pytest.raises(
        CheckpointError, match=r"org/other at revision v2 .*the hub cannot be reached"
    ):
        model_folder("org/other@v2")
    next(folder.glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(
        CheckpointError, match=r"org/tiny .*local hub cache as a whole.*go online once"
    ):
        model_folder("org/tiny")


def test_a_name_may_hold_what_stands_between_owner_and_name_in_the_cache() -> None:
    folder = Path("models--org--a--b/snapshots/c0ffee")
    assert pinned_name(folder) == "org/a--b@c0ffee"


def test_a_run_records_the_commit_and_opens_it_again(tiny: Hub, tmp_path: Path) -> None:
    repository = tiny.repositories["org/tiny"]
    commit = repository.commit
    session = Session()
    with Run.create(tmp_path / "run") as run:
        run.identify(model_identity(session.model("org/tiny")))
        repository.files["README.md"] = b"# Changed"  # main moves on
        assert repository.commit != commit
        assert run.identity["source"] == f"org/tiny@{commit}"
        again = session.model_of(run)
        assert again.folder.name == commit
        assert again.model is session.model("org/tiny").model, "opened once"


def test_a_name_may_be_an_old_one_or_have_a_revision_behind_it(tiny: Hub) -> None:
    tiny.add("old/name", renamed_to="org/tiny")
    assert load("old/name").source == f"org/tiny@{tiny.repositories['org/tiny'].commit}"
    tiny.repositories["org/tiny"].tags["v1"] = tiny.repositories["org/tiny"].commit
    assert model_folder("org/tiny@v1") == model_folder("org/tiny")
    with pytest.raises(CheckpointError, match="org/tiny has no revision 'v9'"):
        model_folder("org/tiny@v9")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "org/missing",
            r"org/missing: no such folder here and no such repository on the hub \(private ones",
        ),
        (
            "org/private",
            r"org/private: no such folder here and no such repository on the hub \(private ones",
        ),
        (
            "org/gated",
            r"org/gated is gated; accept its terms on the hub and run `hf auth login`",
        ),
        (
            "org/gguf",
            r"org/gguf has no safetensors weights \(it has model.gguf\); name the original",
        ),
        (
            "org/lost",
            r"org/lost: model.safetensors.index.json names gone.safetensors, which the hub does not have",
        ),
    ],
)
def test_one_line_says_what_is_wrong(
    hub: Hub, saved: Callable[..., Path], name: str, says: str
) -> None:
    folder = saved("llama")
    hub.add("org/private", folder, private=True)
    hub.add("org/gated", folder, gated=True)
    hub.add("org/gguf").files |= {"model.gguf": b"GGUF", "README.md": b""}
    hub.add("org/lost").files["model.safetensors.index.json"] = (
        b'{"weight_map": {"a": "gone.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match=says) as error:
        load(name)
    assert "\n" not in str(error.value)
