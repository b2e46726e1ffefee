"""Keys and values in other formats: the graph says which, and OpenVINO loses with them what was predicted."""

from __future__ import annotations

import platform
from pathlib import Path

import openvino as ov
import pytest

from kl_lens.evaluation.torch_session import TorchSession
from kl_lens.model import load
from kl_lens.run.records import Plan
from kl_lens.targets import SessionSettings, get_target
from kl_lens.targets.session import CACHES
from tests.families import token_ids
from tests.targets.gguf.support import kl

KEPT = {"keys": "u4-32", "values": "u4"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its caches are rounded on x86 only")
def test_a_file_runs_with_the_caches_of_its_plan_and_loses_what_was_predicted(tmp_path: Path) -> None:
    model, target, ids = load("reference:hybrid"), get_target("openvino"), token_ids(1, 160)[0].tolist()
    target.export(model, Plan("small", {}, "hand", caches=KEPT), tmp_path / "small")
    bare = ov.Core().compile_model(tmp_path / "small" / "openvino_model.xml", "CPU")
    assert [bare.get_property(f"{kind}_CACHE_GROUP_SIZE") for kind in ("KEY", "VALUE")] == [32, 0]
    assert bare.get_property("VALUE_CACHE_PRECISION") == ov.Type.u4
    rounded, exact = (
        target.open(tmp_path / "small", SessionSettings(threads=1, exact=each)) for each in (False, True)
    )
    assert rounded.description[CACHES] == KEPT
    assert CACHES not in exact.description
    found, _ = kl(exact.logits(ids), rounded.logits(ids))
    expected, _ = kl(TorchSession(model).logits(ids), TorchSession(model, caches=KEPT).logits(ids))
    assert found == pytest.approx(expected, rel=0.1)
    assert expected > 1e-3
