"""Published sensitivity files: ours can be read by others, and theirs by us."""

import json
from pathlib import Path

import pytest

from kl_lens.base.errors import RunError
from kl_lens.model import LoadedModel
from kl_lens.paper.layouts import read_legacy, write_legacy
from kl_lens.planning import prediction_metric
from kl_lens.run.records import SensitivityTable
from tests.families import tiny_model
from tests.planning.tables import best, component, measurement


@pytest.fixture(scope="module")
def mamba() -> LoadedModel:
    return LoadedModel("mamba", Path(), tiny_model("mamba"), None, source="mamba")


KEYS = (
    "sqnr_db",
    "kl_teacher_to_student",
    "kl_student_to_teacher",
    "delta_cross_entropy",
)


def test_one_file_per_bit_width(mamba, tmp_path) -> None:
    name = "backbone.layers.0.mixer.in_proj"
    measurements = [
        measurement(name, fmt, **dict.fromkeys(KEYS, kl))
        for fmt, kl in (("int4", 0.5), ("int8", 0.25))
    ]
    written = write_legacy(tmp_path / "tiny.json", measurements)
    assert [path.name for path in written] == ["tiny_4bit.json", "tiny_8bit.json"]
    assert json.loads(written[0].read_text()) == {name: dict.fromkeys(KEYS, 0.5)}
    (tmp_path / "head.json").write_text(json.dumps({"lm_head": {"sqnr_db": 1.0}}))
    (tied,) = read_legacy(tmp_path / "head.json", "int4", mamba.anatomy)
    assert tied.component == "backbone.embeddings"
    (back,) = read_legacy(written[1], "int8", mamba.anatomy)
    assert (back.component, back.format, back.metrics["sqnr_db"].value) == (
        name,
        "int8",
        0.25,
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "not a published sensitivity file"),
        (
            '{"backbone.layers.77.mixer.in_proj": {"sqnr_db": 1}}',
            "names backbone.layers.77.mixer.in_proj",
        ),
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
        read_legacy(path, "int4", mamba.anatomy)


def test_of_published_measurements_the_direction_that_is_a_kl_is_chosen_and_said() -> (
    None
):
    """As published: 5e8 for everything in one direction, and the damage in the other."""
    damage = {"head": (3575.0, 101.0), "in_proj": (20.9, 0.07)}
    measurements = tuple(
        measurement(name, fmt, kl_teacher_to_student=4.9e8 - kl, kl_student_to_teacher=kl)
        for name, kls in damage.items()
        for fmt, kl in zip(("int4", "int8"), kls, strict=True)
    )
    parts = (component("head", (128, 64)), component("in_proj", (128, 64)))
    table = SensitivityTable("published", "mamba", parts, "head", "head", measurements)
    metric, why = prediction_metric(table)
    assert metric == "kl_student_to_teacher"
    assert "no value of kl_teacher_to_student can be a KL (about 4.9e+08)" in (why or "")
    plan = best(table, max_bpw=8.5, name="mine").plan
    # By the garbage the head, with the larger damage, would look like the better one to quantize.
    assert plan.assignment == {"head": "int8", "in_proj": "int8"}
    assert plan.predicted_kl == pytest.approx(101.07)
    assert plan.notes["metric"] == plan.notes["predicted_by"] == "kl_student_to_teacher"
