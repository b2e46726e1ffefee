"""The paper's points against assignments computed here from the definition, on the published lists; its greedy rule."""

import math
from collections.abc import Mapping

import pytest

from kl_lens.planning.points import greedy_plan, paper_points
from kl_lens.run.records import SensitivityTable
from tests.planning.tables import component, seed_lists, seed_table, table_of

METRIC_KEYS = {
    "kl_student_to_teacher": ("kl_student_to_teacher", "kl", 1),
    "sqnr": ("sqnr_db", "sqnr", -1),
    "delta_cross_entropy": ("delta_cross_entropy", "delta_cross_entropy", 1),
}


def by_definition(
    key: str, sign: int, bits: tuple[int, ...], *, head: bool
) -> list[dict[str, str]]:
    """Ten assignments: the definition, spelt out on the published JSON."""
    lists = [
        (sign * metrics[key], layer, f"int{b}")
        for b in bits
        for layer, metrics in seed_lists()[b].items()
    ]
    rows = sorted(
        (row for row in lists if head or row[1] != "lm_head"), key=lambda row: row[0]
    )
    cuts = [(len(rows) - 1) // 10 * i for i in range(1, 11)]
    return [{layer: fmt for _, layer, fmt in rows[:-1][:cut]} for cut in cuts]


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("metric", METRIC_KEYS)
@pytest.mark.parametrize(
    ("pipeline", "prefix", "bits"), [("cpu", "", (4, 8)), ("gpu", "gpu_", (8,))]
)
def test_ten_points_of_the_published_lists(
    metric: str, head: bool, pipeline: str, prefix: str, bits: tuple[int, ...]
) -> None:
    """Those of the GPU use the 8-bit list only."""
    key, label, sign = METRIC_KEYS[metric]
    points = paper_points(
        seed_table(), metric=metric, no_head=not head, pipeline=pipeline
    )
    plans = {p.name.removeprefix(prefix): p for p in points}
    names = [f"{label}_point{i:02d}" for i in range(1, 11)]
    assert [p.name for p in points] == [
        prefix + n for n in [f"uniform_int{b}" for b in bits[::-1]] + names
    ]
    for name, chosen in zip(
        names, by_definition(key, sign, bits, head=head), strict=True
    ):
        assignment = plans[name].assignment
        assert {name: fmt for name, fmt in assignment.items() if fmt != "fp16"} == chosen
        assert (
            len(assignment) == 97
        )  # every quantizable component is named, no conv1d among them
        if not head:
            assert assignment["lm_head"] == "fp16"


def test_the_gpu_script_cuts_mamba2_into_eight() -> None:
    """24 blocks of two projections and a head, as mamba2-130m has, in the order of their damage. (49 − 1) // 8 = 6: 6,
    12, …, 48 of the 49 layers, the least sensitive first."""
    order = [
        f"layers.{i}.{kind}" for i in range(24) for kind in ("in_proj", "out_proj")
    ] + ["head"]
    kls = {
        (name, fmt): (order.index(name) + 1) * factor
        for name in order
        for fmt, factor in (("int4", 10.0), ("int8", 1.0))
    }
    table = table_of([component(name) for name in order], kls, model_type="mamba2")
    plans = [p for p in paper_points(table, pipeline="gpu") if p.family == "paper"]
    assert [p.name for p in plans] == [f"gpu_kl_point{i:02d}" for i in range(1, 9)]
    for plan, layers in zip(plans, (6, 12, 18, 24, 30, 36, 42, 48), strict=True):
        assert [name for name, fmt in plan.assignment.items() if fmt == "int8"] == order[
            :layers
        ]
        assert plan.notes["entries"] == layers


def small_table(kls: dict[tuple[str, str], float], **options: str) -> SensitivityTable:
    names = dict.fromkeys(name for name, _ in kls)
    return table_of([component(name) for name in names], kls, **options)


def test_ties_get_int8_and_what_is_not_a_number_ranks_as_the_worst() -> None:
    kls = {(f"c{i}", fmt): 1.0 for i in range(11) for fmt in ("int8", "int4")}
    plans = {p.name: p for p in paper_points(small_table(kls, head="c0"))}
    # 22 entries, all equal: 4-bit first, then 8-bit; 20 of the 21 left are used by the last point.
    last = plans["kl_point10"].assignment
    assert [name for name, fmt in last.items() if fmt == "int8"] == [
        f"c{i}" for i in range(9)
    ]
    assert last["c9"] == last["c10"] == "int4"
    kls = {(f"c{i}", "int8"): float(i) for i in range(12)} | {("c0", "int8"): math.nan}
    plans = {p.name: p for p in paper_points(small_table(kls, head="c5"), pipeline="gpu")}
    assert plans["gpu_kl_point10"].assignment["c0"] == "fp16"
    assert plans["gpu_kl_point01"].assignment["c1"] == "int8"


def test_gguf_has_the_same_points_in_its_own_formats() -> None:
    ggml_names = {"int4": "q4_0", "int8": "q8_0"}
    kls = {
        (f"c{i}", fmt): (7 * i % 13) + bits
        for i in range(12)
        for bits, fmt in enumerate(ggml_names)
    }
    in_gguf = {(name, ggml_names[fmt]): kl for (name, fmt), kl in kls.items()}
    paper = paper_points(small_table(kls, head="c0"))
    points = paper_points(small_table(in_gguf, head="c0"))
    assert points[0].name == "ggml_uniform_q8_0"
    assert points[-1].name == "ggml_kl_point10"
    translated = [
        {name: ggml_names.get(fmt, fmt) for name, fmt in p.assignment.items()}
        for p in paper
    ]
    assert [p.assignment for p in points] == translated
    together = paper_points(small_table(kls | in_gguf, head="c0"))
    assert [p.assignment for p in together] == [p.assignment for p in paper]


# -- the greedy rule, against models of perplexity whose right answer is known -----------------------------

BASELINE = 20.0


def chain(count: int = 12) -> SensitivityTable:
    """c0 … c11, each twice as sensitive as the one before; four bits hurt a hundred times as much as eight."""
    bits = (("int4", 1.0), ("int8", 0.01))
    kls = {(f"c{i}", fmt): 2.0**i * factor for i in range(count) for fmt, factor in bits}
    return table_of([component(f"c{i}") for i in range(count)], kls, head="c0")


class Additive:
    """Perplexity that grows with the damage of each component of `chain`; counts how often it is asked."""

    def __init__(self, scale: float, worst: str = "") -> None:
        self.scale = scale
        self.worst = worst
        self.calls = 0

    def __call__(self, assignment: Mapping[str, str]) -> float:
        self.calls += 1
        damage = (
            2.0 ** int(c[1:]) * (1.0 if f == "int4" else 0.01)
            for c, f in assignment.items()
        )
        return BASELINE * math.exp(
            self.scale * (sum(damage) + 1e6 * (self.worst in assignment))
        )


def test_greedy_stays_within_the_budget_and_passes_over_a_bad_component() -> None:
    model = Additive(1e-3)
    result = greedy_plan(chain(), model, gamma=1.05, formats=("int4", "int8"))
    assert result.perplexity <= 1.05 * BASELINE
    assert result.evaluations == result.plan.notes["evaluations"] == model.calls
    assert {"int4", "int8"} <= set(result.plan.assignment.values())
    result = greedy_plan(chain(), Additive(1e-6, worst="c4"), formats=("int8",))
    assert result.evaluations == 13  # the baseline, and one for each component
    assert [n for n, f in result.plan.assignment.items() if f == "fp16"] == ["c4"]


def test_the_baseline_stays_where_it_is() -> None:
    """Each step costs 4 %: a drifting baseline would accept all of them, a fixed one stops at 10 %."""
    result = greedy_plan(chain(6), lambda a: BASELINE * 1.04 ** len(a), formats=("int8",))
    assert [n for n, f in result.plan.assignment.items() if f == "int8"] == ["c0", "c1"]


def test_a_component_never_grows_again() -> None:
    """In the merged list an 8-bit entry may come after the component's 4-bit entry: noise, not a reason."""
    kls = {("c0", "int4"): 0.1, ("c0", "int8"): 0.2}
    result = greedy_plan(table_of([component("c0")], kls, head="c0"), lambda _: BASELINE)
    assert result.plan.assignment == {"c0": "int4"}
    # A perplexity that is not a number is within no budget.
    result = greedy_plan(
        chain(3),
        lambda a: math.nan if "c2" in a else BASELINE,
        formats=("int8",),
        gamma=10.0,
    )
    assert result.plan.assignment == {"c0": "int8", "c1": "int8", "c2": "fp16"}
