"""Keys and values in other formats: what the plan says, the record holds and the runtime runs with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kl_lens.base.system import ON_X86
from kl_lens.judging.torch_session import TorchSession
from kl_lens.model import load
from kl_lens.run.records import Plan
from kl_lens.targets import SessionSettings, get_target, read_artifact
from kl_lens.targets.session import CACHES
from tests.families import token_ids
from tests.targets.gguf.support import kl

GGUF = {"keys": "q8_0", "values": "q4_0"}
OPENVINO = {"keys": "u4-32", "values": "u4"}
X86 = pytest.mark.skipif(not ON_X86, reason="its caches are rounded on x86 only")


@pytest.mark.parametrize(
    ("name", "caches", "within"),
    [("gguf", GGUF, 0.25), pytest.param("openvino", OPENVINO, 0.1, marks=X86)],
)
def test_a_file_runs_with_the_caches_of_its_plan_and_loses_what_was_predicted(
    tmp_path: Path, name: str, caches: dict[str, str], within: float
) -> None:
    model = load("reference:hybrid")
    target = get_target(name)
    ids = token_ids(1, 160)[0].tolist()
    folder = tmp_path / "small"
    artifact = target.export(model, Plan("small", {}, "hand", caches=caches), folder)
    assert read_artifact(folder).settings[CACHES] == artifact.settings[CACHES] == caches
    rounded = target.open(folder, SessionSettings(threads=1))
    assert rounded.description[CACHES] == caches
    if name == "gguf":
        assert "--cache-type-k q8_0 --cache-type-v q4_0" in target.how_to_run(
            "me/small", artifact
        )
        plain = target.open(target.loaded_files(folder)[0], SessionSettings(threads=1))
    else:
        _other_programs_see_them(folder)
        plain = target.open(folder, SessionSettings(threads=1, exact=True))
    assert CACHES not in plain.description
    divergence, _ = kl(plain.logits(ids), rounded.logits(ids))
    expected, _ = kl(
        TorchSession(model).logits(ids), TorchSession(model, caches=caches).logits(ids)
    )
    assert divergence == pytest.approx(expected, rel=within)
    assert expected > 1e-4


def _other_programs_see_them(folder: Path) -> None:
    import openvino as ov

    bare = ov.Core().compile_model(folder / "openvino_model.xml", "CPU")
    assert [
        bare.get_property(f"{kind}_CACHE_GROUP_SIZE") for kind in ("KEY", "VALUE")
    ] == [32, 0]
    assert bare.get_property("VALUE_CACHE_PRECISION") == ov.Type.u4


def test_room_for_several_sequences(tmp_path: Path) -> None:
    target = get_target("gguf")
    target.export(load("reference:hybrid"), Plan("small", {}, "hand"), tmp_path / "small")
    session = target.open(
        tmp_path / "small", SessionSettings(threads=1, context=512, batch=4)
    )
    assert session.description["context"] == 512
    assert np.isfinite(session.prefill([1, 2, 3])).all()
