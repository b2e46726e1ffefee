"""Plan files: written whole, edited by hand, and read back with suspicion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kl_lens.errors import PlanError
from kl_lens.planning import plan_for_budget, plan_path, read_plan, repredicted, write_plan
from kl_lens.records import Plan
from tests.planning.tables import component, table_of

COMPONENTS = (
    component("backbone.embeddings", (256, 64), tied_with=["lm_head"]),
    component("backbone.layers.0.mixer.conv1d", (128, 1, 4), quantizable=False),
    component("backbone.layers.0.mixer.in_proj", (256, 64)),
    component("backbone.layers.0.mixer.dt_proj", (128, 48)),
)
TABLE = table_of(
    COMPONENTS,
    {(c.name, f): k for c in COMPONENTS if c.quantizable for f, k in (("int8", 0.001), ("int4", 0.02))},
    head="backbone.embeddings",
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    plan = plan_for_budget(TABLE, max_bpw=6.5, name="mine").plan
    return write_plan(plan, plan_path(tmp_path / "plans", plan.name), COMPONENTS)


def edit(path: Path, **changes: Any) -> Path:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))
    return path


def test_a_plan_comes_back_unchanged(written: Path) -> None:
    plan = read_plan(written, COMPONENTS)
    assert plan == plan_for_budget(TABLE, max_bpw=6.5, name="mine").plan
    assert write_plan(plan, written, COMPONENTS).read_text() == written.read_text()
    assert [p.name for p in written.parent.iterdir()] == ["mine.json"]  # no temporary files left


def test_the_file_names_every_quantizable_component(written: Path) -> None:
    content = json.loads(written.read_text())
    assert content["version"] == 2
    assert list(content["assignment"]) == [c.name for c in COMPONENTS if c.quantizable]
    assert content["bytes"] == read_plan(written, COMPONENTS).bytes


def test_an_edited_plan_loses_its_prediction_and_gets_a_new_one(written: Path) -> None:
    before = read_plan(written, COMPONENTS)
    edit(written, assignment=before.assignment | {"backbone.layers.0.mixer.in_proj": "fp16"})
    plan = read_plan(written, COMPONENTS)
    assert plan.notes == {"edited": True}
    assert plan.predicted_kl is None
    assert plan.made_by == "exact budget, edited by hand"
    assert plan.bytes is not None
    assert plan.bytes > (before.bytes or 0)
    fresh = repredicted(plan, TABLE)
    assert fresh.predicted_kl is not None
    assert fresh.predicted_kl < (before.predicted_kl or 0)
    assert fresh.notes["edited"] is True


def test_what_is_not_named_stays_fp16_and_is_said(tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    path.write_text('{"version": 1, "assignment": {"lm_head": "INT8"}}')  # by its other name
    plan = read_plan(path, COMPONENTS)
    assert plan.assignment == {
        "backbone.embeddings": "int8",
        "backbone.layers.0.mixer.in_proj": "fp16",
        "backbone.layers.0.mixer.dt_proj": "fp16",
    }
    assert plan.notes["not_named"] == ["backbone.layers.0.mixer.in_proj", "backbone.layers.0.mixer.dt_proj"]
    assert (plan.name, plan.made_by) == ("short", "hand")


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ({"backbone.layers.0.mixer.in_prj": "int8"}, r"no component .*in_prj'; did you mean .*mixer.in_proj"),
        ({"nothing alike": "int8"}, r"no component 'nothing alike'; `kl-lens inspect`"),
        ({"lm_head": "int3"}, "lm_head: unknown format 'int3'"),
        ({"lm_head": 8}, "expected the name of a format, got 8"),
        ({"backbone.layers.0.mixer.conv1d": "int8"}, "conv1d cannot be int8: runtimes need it"),
        ({"backbone.layers.0.mixer.dt_proj": "q8_0"}, "dt_proj cannot be q8_0: 48 columns"),
        ({"lm_head": "int8", "backbone.embeddings": "int4"}, "same weight as backbone.embeddings|give both"),
    ],
)
def test_wrong_lines_are_named(written: Path, assignment: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint) as error:
        read_plan(edit(written, assignment=assignment), COMPONENTS)
    assert str(written) in str(error.value)
    assert "\n" not in str(error.value)


def test_fp16_for_what_is_fp16_anyway_is_no_mistake(written: Path) -> None:
    content = json.loads(written.read_text())
    edit(written, assignment=content["assignment"] | {"backbone.layers.0.mixer.conv1d": "fp16"})
    assert "backbone.layers.0.mixer.conv1d" not in read_plan(written, COMPONENTS).assignment


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no valid JSON"),
        ("[1, 2]", "no plan: expected an object"),
        ('{"version": 1}', "no plan: expected an object"),
        ('{"version": 9, "assignment": {}}', "version 9; this program reads versions 1 and 2"),
        ('{"assignment": {}}', "version None"),
        ('{"version": 1, "assignment": {"a": "int8", "a": "int4"}}', "'a' appears twice"),
        ('{"version": 1, "assignment": {}, "note": {}}', "unknown field 'note'; did you mean notes"),
        ('{"version": 1, "assignment": {}, "predicted_kl": "low"}', "predicted_kl is 'low'"),
        ('{"version": 1, "assignment": {}, "notes": [1]}', "notes must be an object"),
        ("[" * 100_000, "no valid JSON"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=complaint):
        read_plan(path, COMPONENTS)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such plan"):
        read_plan(tmp_path / "absent.json", COMPONENTS)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="cannot be read"):
        read_plan(tmp_path / "binary.json", COMPONENTS)
    with pytest.raises(PlanError, match="no name for a plan"):
        plan_path(tmp_path, "../escape")


def test_a_format_that_does_not_fit_is_written_as_what_is_stored(tmp_path: Path) -> None:
    plan = Plan("fallback", {"backbone.layers.0.mixer.dt_proj": "int4-g32"}, "test")
    back = read_plan(write_plan(plan, tmp_path / "fallback.json", COMPONENTS), COMPONENTS)
    assert back.assignment["backbone.layers.0.mixer.dt_proj"] == "int8"
    assert "48 columns" in back.notes["fallbacks"]["backbone.layers.0.mixer.dt_proj"]


def test_a_failed_write_leaves_the_old_file(written: Path) -> None:
    before = written.read_text()
    with pytest.raises(ValueError):
        write_plan(Plan("mine", {}, "test", notes={"bad": float("nan")}), written, COMPONENTS)
    assert written.read_text() == before
    assert [p.name for p in written.parent.iterdir()] == ["mine.json"]
