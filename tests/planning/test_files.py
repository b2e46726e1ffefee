"""Plan files: written whole, edited by hand, and read back with suspicion."""

import json
from pathlib import Path
from typing import Any

import pytest

from kl_lens.base.errors import PlanError
from kl_lens.planning import plan_path, read_plan, repredicted, write_plan
from kl_lens.run.records import Plan
from tests.planning.tables import best, component, table_of

COMPONENTS = (
    component("backbone.embeddings", (256, 64), tied_with=["lm_head"]),
    component("backbone.layers.0.mixer.conv1d", (128, 1, 4), quantizable=False),
    component("backbone.layers.0.mixer.in_proj", (256, 64)),
    component("backbone.layers.0.mixer.dt_proj", (128, 48)),
)
TABLE = table_of(
    COMPONENTS,
    {
        (c.name, f): k
        for c in COMPONENTS
        if c.quantizable
        for f, k in (("int8", 0.001), ("int4", 0.02))
    },
    head="backbone.embeddings",
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    plan = best(TABLE, max_bpw=6.5, name="mine").plan
    return write_plan(plan, plan_path(tmp_path / "plans", plan.name), COMPONENTS)


def edit(path: Path, **changes: Any) -> Path:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))
    return path


def test_a_plan_comes_back_unchanged(written: Path) -> None:
    plan = read_plan(written, COMPONENTS)
    assert plan == best(TABLE, max_bpw=6.5, name="mine").plan
    assert write_plan(plan, written, COMPONENTS).read_text() == written.read_text()
    assert [p.name for p in written.parent.iterdir()] == [
        "mine.json"
    ]  # no temporary files left


def test_an_edited_plan_loses_its_prediction_and_gets_a_new_one(written: Path) -> None:
    before = read_plan(written, COMPONENTS)
    edit(
        written,
        assignment=before.assignment | {"backbone.layers.0.mixer.in_proj": "fp16"},
    )
    plan = read_plan(written, COMPONENTS)
    assert (plan.notes, plan.edited) == ({}, True)
    assert plan.predicted_kl is None
    assert plan.made_by == "exact budget, edited by hand"
    assert plan.bytes is not None
    assert plan.bytes > (before.bytes or 0)
    fresh = repredicted(plan, TABLE)
    assert fresh.predicted_kl is not None
    assert fresh.predicted_kl < (before.predicted_kl or 0)
    assert fresh.edited


def test_what_is_not_named_stays_fp16_and_is_said(tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    path.write_text(
        '{"version": 3, "assignment": {"lm_head": "INT8"}}'
    )  # by its other name
    plan = read_plan(path, COMPONENTS)
    assert plan.assignment == {
        "backbone.embeddings": "int8",
        "backbone.layers.0.mixer.in_proj": "fp16",
        "backbone.layers.0.mixer.dt_proj": "fp16",
    }
    assert plan.notes["not_named"] == [
        "backbone.layers.0.mixer.in_proj",
        "backbone.layers.0.mixer.dt_proj",
    ]
    assert (plan.name, plan.made_by) == ("short", "hand")


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        (
            {"backbone.layers.0.mixer.in_prj": "int8"},
            r"no component .*in_prj'; did you mean .*mixer.in_proj",
        ),
        ({"lm_head": "int3"}, "lm_head: unknown format 'int3'"),
        ({"lm_head": 8}, "expected the name of a format, got 8"),
        (
            {"backbone.layers.0.mixer.conv1d": "int8"},
            "conv1d cannot be int8: runtimes need it",
        ),
        (
            {"backbone.layers.0.mixer.dt_proj": "q8_0"},
            "dt_proj cannot be q8_0: 48 columns",
        ),
        (
            {"lm_head": "int8", "backbone.embeddings": "int4"},
            "same weight as backbone.embeddings|give both",
        ),
    ],
)
def test_wrong_lines_are_named(
    written: Path, assignment: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(PlanError, match=complaint) as error:
        read_plan(edit(written, assignment=assignment), COMPONENTS)
    assert str(written) in str(error.value)
    assert "\n" not in str(error.value)


def plan_with(field: str) -> str:
    return f'{{"version": 3, "assignment": {{}}, {field}}}'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"version": 1}', "not a plan: expected an object"),
        (
            '{"version": 9, "assignment": {}}',
            "version 9; this program reads version 3: make the plan again",
        ),
        ('{"version": 3, "assignment": {"a": "int8", "a": "int4"}}', "'a' appears twice"),
        (plan_with('"note": {}'), "unknown field 'note'; did you mean notes"),
        (
            plan_with('"predicted_kl": "low"'),
            "Plan.predicted_kl: expected float, found 'low'",
        ),
        (
            plan_with('"family": "royal"'),
            "family is 'royal'; expected one of uniform, paper",
        ),
        (plan_with('"interaction": 0'), "must be above zero"),
        (plan_with('"bytes": 1e999'), "not valid JSON: Out of range float"),
        (
            plan_with('"limits": {"bytes": "many"}'),
            r"Plan.limits\[bytes\]: expected float, found 'many'",
        ),
        (plan_with('"measured": {"kl": 0.1}'), "Measured: perplexity is missing"),
        (plan_with('"made_by": "\\ud800"'), "cannot be read: .*surrogates"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=complaint):
        read_plan(path, COMPONENTS)


@pytest.mark.parametrize("name", ["small", "../mine", "/elsewhere/mine", "", 7])
def test_the_name_inside_is_the_files_own(written: Path, name: Any) -> None:
    """A copy that kept its first name would overwrite the other plan and its artifacts; a path would lead outside."""
    with pytest.raises(
        PlanError, match='but must be that of the file; write "name": "mine"'
    ) as error:
        read_plan(edit(written, name=name), COMPONENTS)
    assert str(written) in str(error.value)


@pytest.mark.parametrize(
    "name", ["best (v2)", "a,b", " x", "x\n", "é", "-x", "all", "x" * 81, ".."]
)
def test_names_that_commands_could_not_hold(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.json"
    path.write_text('{"version": 3, "assignment": {}}')
    with pytest.raises(PlanError, match="is not a valid plan name: use letters"):
        read_plan(path, COMPONENTS)
    with pytest.raises(PlanError, match="is not a valid plan name: use letters"):
        write_plan(Plan(name, {}, "test"), path, COMPONENTS)
    with pytest.raises(PlanError, match="is not a valid plan name: use letters"):
        best(TABLE, max_bpw=6.5, name=name)
