"""Keys and values in other formats: what the plan says, the record holds and llama.cpp runs with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kl_lens.evaluation.torch_session import TorchSession
from kl_lens.model import load
from kl_lens.run.records import Plan
from kl_lens.targets import SessionSettings, get_target, read_artifact
from kl_lens.targets.session import CACHES
from tests.families import token_ids
from tests.targets.gguf.support import kl

KEPT = {"keys": "q8_0", "values": "q4_0"}


def test_a_file_runs_with_the_caches_of_its_plan_and_loses_what_was_predicted(tmp_path: Path) -> None:
    model, target, ids = load("reference:hybrid"), get_target("gguf"), token_ids(1, 160)[0].tolist()
    plan = Plan("small", {}, "hand", caches=KEPT)
    artifact = target.export(model, plan, tmp_path / "small")
    assert read_artifact(tmp_path / "small").settings[CACHES] == artifact.settings[CACHES] == KEPT
    assert "--cache-type-k q8_0 --cache-type-v q4_0" in target.how_to_run("me/small", artifact)
    rounded = target.open(tmp_path / "small", SessionSettings(threads=1))
    plain = target.open(target.loaded_files(tmp_path / "small")[0], SessionSettings(threads=1))
    assert rounded.description[CACHES] == KEPT
    assert CACHES not in plain.description
    found, _ = kl(plain.logits(ids), rounded.logits(ids))
    expected, _ = kl(TorchSession(model).logits(ids), TorchSession(model, caches=KEPT).logits(ids))
    assert found == pytest.approx(expected, rel=0.25)
    assert expected > 1e-4


def test_room_for_several_sequences(tmp_path: Path) -> None:
    target = get_target("gguf")
    target.export(load("reference:hybrid"), Plan("small", {}, "hand"), tmp_path / "small")
    session = target.open(tmp_path / "small", SessionSettings(threads=1, context=512, batch=4))
    assert session.description["context"] == 512
    assert np.isfinite(session.prefill([1, 2, 3])).all()
