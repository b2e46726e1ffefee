"""The paper's points against assignments computed here from the definition, on the published lists."""

from __future__ import annotations

import math

import pytest

from kl_lens.errors import PlanError
from kl_lens.formats import get_format
from kl_lens.planning import paper_points, published_name
from kl_lens.records import SensitivityTable
from tests.planning.tables import component, seed_lists, seed_table, table_of

METRIC_KEYS = {
    "kl_student_to_teacher": ("kl_student_to_teacher", "kl", 1),
    "kl_teacher_to_student": ("kl_teacher_to_student", "kl_teacher_to_student", 1),
    "sqnr": ("sqnr_db", "sqnr", -1),
    "delta_cross_entropy": ("delta_cross_entropy", "delta_cross_entropy", 1),
}


def by_definition(key: str, sign: int, bits: tuple[int, ...], *, head: bool) -> list[dict[str, str]]:
    """Ten assignments: the definition, spelt out on the published JSON with insertion sort and loops."""
    rows: list[tuple[float, str, str]] = []
    for b in bits:
        for layer, metrics in seed_lists()[b].items():
            if layer == "lm_head" and not head:
                continue
            row = (sign * metrics[key], layer, f"int{b}")
            place = len(rows)
            while place > 0 and rows[place - 1][0] > row[0]:
                place -= 1
            rows.insert(place, row)
    n = len(rows)
    rows.pop()
    points = []
    for i in range(1, 11):
        chosen: dict[str, str] = {}
        for position in range(((n - 1) // 10) * i):
            _, layer, fmt = rows[position]
            chosen[layer] = fmt
        points.append(chosen)
    return points


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("metric", METRIC_KEYS)
def test_ten_points_of_the_published_lists(metric: str, head: bool) -> None:
    key, label, sign = METRIC_KEYS[metric]
    plans = {p.name: p for p in paper_points(seed_table(), metric=metric, no_head=not head)}
    expected = by_definition(key, sign, (4, 8), head=head)
    assert list(plans) == ["uniform_int8", "uniform_int4", *(f"{label}_point{i:02d}" for i in range(1, 11))]
    for i, chosen in enumerate(expected, start=1):
        assignment = plans[f"{label}_point{i:02d}"].assignment
        assert {name: fmt for name, fmt in assignment.items() if fmt != "fp16"} == chosen
        assert len(assignment) == 97  # every quantizable component is named, no conv1d among them
        if not head:
            assert assignment["lm_head"] == "fp16"


def test_last_point_of_published_kl_leaves_out_the_four_worst_entries() -> None:
    plans = {p.name: p for p in paper_points(seed_table())}
    last = plans["kl_point10"].assignment
    # 194 entries, the worst (the head at 4 bits) dropped, 190 of 193 used: the head at 8 bits, the first
    # x_proj and the last out_proj at 4 bits are behind the last cut.
    assert plans["kl_point10"].notes["entries"] == 190
    assert {name: fmt for name, fmt in last.items() if fmt != "int4"} == {
        "lm_head": "fp16",
        "backbone.layers.0.mixer.x_proj": "int8",
        "backbone.layers.23.mixer.out_proj": "int8",
    }


def test_uniform_plans_cover_everything_that_may_be_quantized() -> None:
    with_head = {p.name: p for p in paper_points(seed_table())}
    without = {p.name: p for p in paper_points(seed_table(), no_head=True)}
    assert set(with_head["uniform_int4"].assignment.values()) == {"int4"}
    assert [n for n, f in without["uniform_int8"].assignment.items() if f == "fp16"] == ["lm_head"]


def test_bytes_of_a_point_are_exact() -> None:
    table = seed_table()
    plan = next(p for p in paper_points(table, no_head=True) if p.name == "kl_point05")
    expected = 0
    for c in table.components:
        fmt = plan.assignment.get(c.name, "fp16")
        expected += 2 * c.parameters if fmt == "fp16" else get_format(fmt).bytes(c.shape)
    assert plan.bytes == expected


def test_gpu_points_use_the_8_bit_list_only() -> None:
    plans = {p.name: p for p in paper_points(seed_table(), pipeline="gpu", no_head=True)}
    assert list(plans) == ["gpu_uniform_int8", *(f"gpu_kl_point{i:02d}" for i in range(1, 11))]
    for i, chosen in enumerate(by_definition("kl_student_to_teacher", 1, (8,), head=False), start=1):
        assignment = plans[f"gpu_kl_point{i:02d}"].assignment
        assert {n for n, f in assignment.items() if f == "int8"} == set(chosen)
        assert set(assignment.values()) == {"int8", "fp16"}


def test_gpu_int4_points_equal_the_cpu_points() -> None:
    table = seed_table()
    cpu = {p.name: p.assignment for p in paper_points(table)}
    gpu = {p.name: p.assignment for p in paper_points(table, pipeline="gpu-int4")}
    assert gpu == {f"gpu_int4_{name}": assignment for name, assignment in cpu.items()}


@pytest.mark.parametrize(("pipeline", "points"), [("cpu", 10), ("gpu", 8), ("gpu-int4", 8)])
def test_mamba2_stops_at_eight_points_on_gpus(pipeline: str, points: int) -> None:
    names = [p.name for p in paper_points(seed_table("mamba2"), pipeline=pipeline)]
    assert sum("point" in name for name in names) == points
    assert names[-1].endswith(f"point{points:02d}")


def small_table(kls: dict[tuple[str, str], float], **options: str) -> SensitivityTable:
    names = dict.fromkeys(name for name, _ in kls)
    return table_of([component(name) for name in names], kls, **options)


def test_a_component_whose_entries_tie_gets_int8() -> None:
    kls = {(f"c{i}", fmt): 1.0 for i in range(11) for fmt in ("int8", "int4")}
    plans = {p.name: p for p in paper_points(small_table(kls, head="c0"))}
    # 22 entries, all equal: 4-bit first, then 8-bit; 20 of the 21 left are used by the last point.
    last = plans["kl_point10"].assignment
    assert [name for name, fmt in last.items() if fmt == "int8"] == [f"c{i}" for i in range(9)]
    assert last["c9"] == last["c10"] == "int4"


def test_a_measurement_that_is_not_a_number_ranks_as_the_worst() -> None:
    kls = {(f"c{i}", "int8"): float(i) for i in range(12)} | {("c0", "int8"): math.nan}
    plans = {p.name: p for p in paper_points(small_table(kls, head="c5"), pipeline="gpu")}
    assert plans["gpu_kl_point10"].assignment["c0"] == "fp16"
    assert plans["gpu_kl_point01"].assignment["c1"] == "int8"


def test_an_untied_embedding_is_left_alone() -> None:
    kls = {(f"c{i}", fmt): i + bits for i in range(12) for bits, fmt in enumerate(("int8", "int4"))}
    plans = paper_points(small_table(kls, head="c1", embedding="c0"))
    assert {p.assignment["c0"] for p in plans} == {"fp16"}


def test_components_without_measurements_are_named() -> None:
    kls = {(f"c{i}", fmt): float(i) for i in range(12) for fmt in ("int8", "int4")}
    table = small_table(kls, head="c0")
    table = SensitivityTable(
        table.model,
        table.model_type,
        (*table.components, component("forgotten")),
        table.head,
        table.embedding,
        table.measurements,
    )
    point = paper_points(table)[-1]
    assert point.notes["not_in_the_lists"] == ["forgotten"]
    assert point.assignment["forgotten"] == "fp16"
    uniform = paper_points(table)[0]
    assert uniform.predicted_kl is None
    assert uniform.notes["unmeasured"] == ["forgotten"]


def test_what_is_missing_is_said() -> None:
    kls = {(f"c{i}", "int8"): float(i) for i in range(12)}
    with pytest.raises(PlanError, match="no measurements at int4"):
        paper_points(small_table(kls, head="c0"))
    with pytest.raises(PlanError, match="at least 11 measurements"):
        paper_points(small_table({("c0", "int8"): 1.0, ("c0", "int4"): 1.0}, head="c0"))
    with pytest.raises(PlanError, match="cannot rank by 'ppl'"):
        paper_points(small_table(kls, head="c0"), metric="ppl")
    with pytest.raises(PlanError, match="no pipeline 'npu'"):
        paper_points(small_table(kls, head="c0"), pipeline="npu")


def test_published_file_names() -> None:
    assert published_name("state-spaces/mamba-130m-hf", "kl_point05") == "mamba-130m-hf_kl_point05"
    assert published_name("reference:mamba", "sqnr_point01") == "reference-mamba_sqnr_point01"
