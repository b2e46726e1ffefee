"""Plans for a memory: the file, states, caches and the runtime together, exactly."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from kl_lens.base.errors import BudgetError, CheckpointError
from kl_lens.base.files import reference_path
from kl_lens.base.units import parse_count
from kl_lens.model.carried import Carried, carried_by, carried_from
from kl_lens.planning import (
    build_problem,
    plan_for_budget,
    read_plan,
    write_plan,
)
from kl_lens.run.records import (
    KEYS,
    VALUES,
    Component,
    Estimate,
    Measurement,
    SensitivityTable,
)
from kl_lens.study.memory import held_by
from kl_lens.targets import get_target
from kl_lens.targets.abilities import Usage
from tests.families import tiny_model

CARRIED = Carried(
    "tiny", 2, 100, 64, ((100, 100),), 100, 500, heads=2, keys=128, values=128
)
LOSSES = {"q8_0": 1e-5, "q5_1": 4e-4, "q4_0": 2e-3, "iq4_nl": 1e-3}


def measured(name: str, fmt: str, kl: float) -> Measurement:
    return Measurement(
        name, fmt, {"kl_teacher_to_student": Estimate(kl, 0.0)}, 1, 1, "float32", 0.0
    )


def states() -> SensitivityTable:
    """Keys lose ten times what values lose."""
    parts = [
        Component(
            f"layers.{block}.{kind}",
            "",
            kind,
            "states",
            block,
            (2, 32),
            64,
            quantizable=False,
        )
        for block in range(2)
        for kind in (KEYS, VALUES)
    ]
    rows = [
        measured(part.name, fmt, kl * (10 if part.kind == KEYS else 1))
        for part in parts
        for fmt, kl in LOSSES.items()
    ]
    return SensitivityTable("tiny", "falcon_h1", tuple(parts), "", "", tuple(rows))


def weights() -> SensitivityTable:
    parts = [
        Component(
            f"layers.{i}.proj",
            f"layers.{i}.proj.weight",
            "proj",
            "ssm",
            i,
            (64, 256),
            64 * 256,
        )
        for i in range(3)
    ]
    rows = [
        measured(part.name, fmt, kl * (1 + part.block))
        for part in parts
        for fmt, kl in {"q8_0": 1e-4, "q4_0": 5e-3}.items()
    ]
    return SensitivityTable(
        "tiny", "falcon_h1", tuple(parts), "layers.2.proj", "", tuple(rows)
    )


def test_weights_and_caches_share_the_memory_in_the_best_way() -> None:
    target = get_target("gguf")
    beside = held_by(target, CARRIED, Usage(context=256, batch=2), states())
    assert beside.states == 4 * 500 * 2
    problem = build_problem(weights(), target=target, held=beside)
    everything = list(
        itertools.product(*(range(len(group.choices)) for group in problem.groups))
    )
    largest = max(problem.totals(selection).bytes for selection in everything)
    for memory in (largest, largest - 60_000, largest - 200_000):
        fitting = [
            problem.totals(selection)
            for selection in everything
            if problem.totals(selection).bytes <= memory
        ]
        best_plan = plan_for_budget(problem, max_bytes=memory)
        assert best_plan.totals.kl == pytest.approx(min(total.kl for total in fitting))
        assert best_plan.plan.predicted_kl == pytest.approx(best_plan.totals.kl)
        assert best_plan.plan.memory_bytes == best_plan.totals.bytes <= memory
        assert beside.bytes(best_plan.plan.caches) == best_plan.plan.held_bytes
    assert best_plan.plan.caches[VALUES] != "fp16"
    with pytest.raises(BudgetError, match=r"--memory .* cannot be met"):
        plan_for_budget(problem, max_bytes=1000)


def test_caches_grow_with_context_and_batch_and_have_no_choice_unmeasured() -> None:
    target = get_target("gguf")
    small, large = (
        held_by(target, CARRIED, use) for use in (Usage(256, 1), Usage(1024, 3))
    )
    assert [len(group.choices) for group in small.caches] == [1, 1]
    assert (
        large.bytes({}) - large.fixed
        == 12 * (small.bytes({}) - small.fixed)
        == 12 * 2 * 2 * 128 * 256
    )
    without = held_by(target, replace(CARRIED, keys=0, values=0), Usage())
    assert without.caches == ()


def test_a_file_that_the_runtime_copies_has_room_for_its_copies() -> None:
    """The largest file that fits is such that the file, its copies and all else fill the memory."""
    for target in map(get_target, ("gguf", "openvino")):
        copies = target.footprint(quantized=True).copies
        alone = held_by(target, CARRIED, Usage())
        memory = alone.bytes({}) + 1_000_000
        full = held_by(target, CARRIED, Usage(), memory=memory)
        assert full.states == alone.states
        assert full.bytes({}) - alone.bytes({}) == math.ceil(
            (copies - 1) * 1_000_000 / copies
        )
        assert held_by(target, CARRIED, Usage(), memory=1) == alone


def test_a_plan_for_a_memory_goes_to_its_file_and_back(tmp_path) -> None:
    table = weights()
    target = get_target("gguf")
    problem = build_problem(
        table, target=target, held=held_by(target, CARRIED, Usage(), states())
    )
    plan = plan_for_budget(
        problem, max_bytes=problem.reach("bytes")[1], name="small"
    ).plan
    back = read_plan(
        write_plan(plan, tmp_path / "small.json", table.components), table.components
    )
    assert (back.caches, back.held_bytes) == (plan.caches, plan.held_bytes)
    assert (
        "caches"
        not in write_plan(
            replace(plan, caches={}, held_bytes=0),
            tmp_path / "small.json",
            table.components,
        ).read_text()
    )


@pytest.mark.parametrize("family", ["mamba", "zamba2", "jamba_experts"])
def test_what_is_carried_is_what_the_real_model_keeps(family: str) -> None:
    model = tiny_model(family)
    carried = carried_by(model.config)
    output = model(model.dummy_inputs["input_ids"][:1], use_cache=True)
    cache = getattr(output, "past_key_values", None) or output.cache_params
    fixed = sum(
        state[0].numel()
        for layer in cache.layers
        for state in (
            getattr(layer, "recurrent_states", {}),
            getattr(layer, "conv_states", {}),
        )
        if state
    )
    keys = sum(
        layer.keys[0, :, 0].numel()
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None
    )
    assert (carried.states, carried.keys) == (fixed, keys)
    assert sum(map(math.prod, carried.matrices)) + carried.vectors == sum(
        p.numel() for p in model.parameters()
    )


def test_only_the_configuration_is_read(tmp_path) -> None:
    (tmp_path / "config.json").write_bytes(
        (reference_path("hybrid") / "config.json").read_bytes()
    )
    assert replace(carried_from(str(tmp_path)), name="") == replace(
        carried_from("reference:hybrid"), name=""
    )
    with pytest.raises(CheckpointError, match="its configuration cannot be read"):
        carried_from(str(tmp_path / "nothing"))


def test_counts_of_tokens() -> None:
    assert [parse_count(text) for text in ("4096", "32k", " 1K ")] == [4096, 32768, 1024]
