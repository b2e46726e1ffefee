"""Published sensitivity files: ours can be read by others, and theirs by us."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from kl_lens.base.errors import RunError
from kl_lens.model import LoadedModel
from kl_lens.paper import read_legacy, write_legacy
from kl_lens.run.records import Estimate, Measurement
from tests.families import tiny_model


@pytest.fixture(scope="module")
def mamba() -> LoadedModel:
    return LoadedModel("mamba", Path(), tiny_model("mamba"), None, source="mamba")


def _measurement(component: str, format_name: str, kl: float) -> Measurement:
    metrics = dict.fromkeys(
        ("sqnr_db", "kl_teacher_to_student", "kl_student_to_teacher", "delta_cross_entropy"), Estimate(kl)
    )
    return Measurement(component, format_name, metrics, 1, 1, "float32", 0.0)


def test_one_file_per_bit_width(mamba, tmp_path) -> None:
    name = "backbone.layers.0.mixer.in_proj"
    written = write_legacy(
        tmp_path / "tiny.json", [_measurement(name, "int4", 0.5), _measurement(name, "int8", 0.25)]
    )
    assert [path.name for path in written] == ["tiny_4bit.json", "tiny_8bit.json"]
    four = json.loads(written[0].read_text())
    assert four == {
        name: {
            "sqnr_db": 0.5,
            "kl_teacher_to_student": 0.5,
            "kl_student_to_teacher": 0.5,
            "delta_cross_entropy": 0.5,
        }
    }
    (back,) = read_legacy(written[1], 8, mamba.anatomy)
    assert (back.component, back.format, back.metrics["sqnr_db"].value) == (name, "int8", 0.25)


def test_a_tied_heads_name_finds_its_component(mamba, tmp_path) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"lm_head": {"sqnr_db": 1.0}}))
    (measurement,) = read_legacy(path, 4, mamba.anatomy)
    assert measurement.component == "backbone.embeddings"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "not a published sensitivity file"),
        ('{"backbone.layers.77.mixer.in_proj": {"sqnr_db": 1}}', "names backbone.layers.77.mixer.in_proj"),
        ('{"lm_head": {"sqnr_db": "high"}}', "expected a number"),
        ('{"lm_head": {"sqnr_db": true}}', "expected a number"),
        ('{"lm_head": {"sqnr_db": 1' + "0" * 400 + "}}", "expected a number"),
        ("[" * 100_000, "is not JSON"),
        ('{"lm_head": {"loudness": 3}}', "has none of"),
    ],
)
def test_files_of_another_kind_are_refused(mamba, tmp_path, content, message) -> None:
    path = tmp_path / "f.json"
    path.write_text(content)
    with pytest.raises(RunError, match=message):
        read_legacy(path, 4, mamba.anatomy)


def test_the_published_files_can_be_read(shared: Path) -> None:
    """mamba-130m, as published: 24 blocks of four projections, and the head."""
    small = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=24, state_size=4)
    )
    anatomy = LoadedModel("mamba-130m", Path(), small.eval(), None).anatomy
    for bits in (4, 8):
        found = read_legacy(shared / f"data/seed_sensitivity/mamba-130m_{bits}bit.json", bits, anatomy)
        assert len(found) == 97
        worst = max(found, key=lambda m: m.metrics["kl_student_to_teacher"].value)
        assert worst.component == anatomy.head
