"""The fast engine gives the plain engine's numbers, for every family and every kind of component."""

import pytest
import torch

from kl_lens.base.errors import FormatError, RunError
from kl_lens.measuring.engines import ENGINES, Engine, FastEngine, PlainEngine
from kl_lens.measuring.perturbation import (
    Perturbation,
    find_candidates,
    find_state_candidates,
    replacements,
    states_of,
    swapped,
)
from kl_lens.measuring.pieces import Job
from kl_lens.measuring.products import precision_for
from kl_lens.run.readings import summarise
from kl_lens.weights.recipes import Recipe
from tests.families import CONFIGS, UNUSUAL, slow, token_ids
from tests.measuring.conftest import loaded

# Tied and untied heads, blocks that share weights, experts.
QUICK = ("mamba", "zamba2", "jamba_experts")
FAMILIES = [
    f if f in QUICK else slow(f) for f in [*CONFIGS, *sorted(UNUSUAL.keys() - {"rwkv"})]
]


def _one_of_each_kind(model) -> list[Perturbation]:
    """The first and the last component and state of every kind, in two formats, and one joint plan."""
    candidates, _ = find_candidates(model.anatomy, [Recipe("int4"), Recipe("int8")])
    states = []
    if states_of(model):
        states, _ = find_state_candidates(model, ["int4", "bf16"])
    chosen = {}
    for candidate in (*candidates, *states):
        kind = (candidate.component.kind, candidate.recipe)
        chosen.setdefault(("first", *kind), candidate)
        chosen["last", *kind] = candidate
    joint = {
        c.component.name: Recipe("int4" if index % 3 else "int8")
        for index, c in enumerate(candidates[2::2])
    }
    return [c.perturbation for c in dict.fromkeys(chosen.values())] + [
        Perturbation(joint)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_fast_equals_plain(family: str) -> None:
    model = loaded(family)
    ids = token_ids(5, 24)
    perturbations = _one_of_each_kind(model)
    results = {}
    for name, engine_class in ENGINES.items():
        engine = engine_class(model)
        engine.prepare(ids)
        results[name] = [summarise(windows) for windows in engine.measure(perturbations)]
    for perturbation, plain, fast in zip(
        perturbations, results["plain"], results["fast"], strict=True
    ):
        for metric in ("kl_teacher_to_student", "kl_student_to_teacher"):
            expected = plain[metric].value
            actual = fast[metric].value
            assert expected > 0
            assert actual == pytest.approx(expected, rel=1e-4, abs=1e-8), (
                perturbation,
                metric,
            )
        for metric in ("mse", "sqnr_db", "delta_cross_entropy", "kl_p99", "kl_max"):
            assert fast[metric].value == pytest.approx(
                plain[metric].value, rel=1e-3, abs=1e-6
            ), (
                perturbation,
                metric,
            )


def test_where_a_group_fills_the_gpu_its_members_are_measured_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loaded("mamba2")
    candidates, _ = find_candidates(
        model.anatomy, [Recipe("int4"), Recipe("int8")], r"layers\.1\."
    )
    perturbations = [candidate.perturbation for candidate in candidates]
    expected = _measure(FastEngine(model), perturbations)
    started = FastEngine.started
    too_full = []

    def full_by_two(self: FastEngine, group: list[Perturbation]):
        if len(group) > 1:
            too_full.append(group)
            raise torch.OutOfMemoryError
        return started(self, group)

    monkeypatch.setattr(FastEngine, "started", full_by_two)
    assert _measure(FastEngine(model), perturbations) == pytest.approx(
        expected, rel=1e-4, abs=1e-8
    )
    assert too_full


def test_the_weights_of_a_group_fit_into_an_eighth_of_the_memory() -> None:
    model = loaded("mamba2")
    candidates, _ = find_candidates(model.anatomy, [Recipe("int4"), Recipe("int8")])
    perturbations = [candidate.perturbation for candidate in candidates]
    weights = 4 * max(candidate.component.parameters for candidate in candidates)
    sizes = [len(group) for group in FastEngine(model).groups(perturbations, rows=1)]
    assert sum(sizes) == len(perturbations)
    assert max(sizes) > 2
    pairs = FastEngine(model, memory_budget=8 * 2 * weights).groups(perturbations, rows=1)
    assert all(
        4 * sum(candidates[i].component.parameters for i in g) <= 2 * weights
        for g in pairs
    )
    alone = FastEngine(model, memory_budget=8).groups(perturbations, rows=1)
    assert {len(group) for group in alone} == {1}


def _measure(
    engine: Engine, perturbations: list[Perturbation], batch: int = 5
) -> list[float]:
    engine.prepare(token_ids(batch, 24))
    return [
        summarise(w)["kl_teacher_to_student"].value for w in engine.measure(perturbations)
    ]


@pytest.mark.parametrize("engine_class", ENGINES.values(), ids=ENGINES.keys())
def test_memory_budgets_change_the_work_not_the_numbers(
    engine_class: type[Engine], monkeypatch
) -> None:
    """Less memory: no kept logits, small chunks of rows, one window at a time."""
    model = loaded("mamba2")
    perturbations = _one_of_each_kind(model)
    roomy = _measure(engine_class(model), perturbations)
    monkeypatch.setattr("kl_lens.measuring.teacher.LOGIT_BYTES", 97 * 4 * 64)
    monkeypatch.setattr("kl_lens.model.tasks.LanguageTask.rows_at_once", 24)
    tight = _measure(engine_class(model, memory_budget=1000), perturbations)
    assert tight == pytest.approx(roomy, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("engine_class", ENGINES.values(), ids=ENGINES.keys())
def test_weights_come_back_even_when_a_candidate_fails(
    engine_class: type[Engine], mamba, monkeypatch
) -> None:
    originals = {name: p.clone() for name, p in mamba.model.named_parameters()}
    engine = engine_class(mamba)
    engine.prepare(token_ids(2, 12))
    calls = 0

    def failing_at_the_third(original):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == 3:
                raise MemoryError("out of memory in the middle of a forward")
            return original(*args, **kwargs)

        return call

    for name in ("run", "full_logits"):
        monkeypatch.setattr(
            engine.chain, name, failing_at_the_third(getattr(engine.chain, name))
        )
    with pytest.raises(MemoryError):
        engine.measure(
            [Perturbation({"backbone.layers.1.mixer.in_proj": Recipe("int4")})] * 3
        )
    for name, parameter in mamba.model.named_parameters():
        assert torch.equal(parameter, originals[name])


def test_a_tied_head_is_perturbed_with_its_embedding(mamba) -> None:
    (embedding,) = replacements(
        mamba, Perturbation({"backbone.embeddings": Recipe("int4")})
    )
    with swapped([embedding]):
        assert mamba.model.lm_head.weight is mamba.model.backbone.embeddings.weight
        assert torch.equal(mamba.model.lm_head.weight, embedding[1])


def test_what_must_not_be_quantized_is_refused(mamba) -> None:
    with pytest.raises(
        FormatError, match="conv1d cannot be quantized: short convolution"
    ):
        replacements(
            mamba, Perturbation({"backbone.layers.0.mixer.conv1d": Recipe("int8")})
        )


def test_on_a_cpu_products_are_float32_and_nothing_else_can_be_had(mamba) -> None:
    assert precision_for(None, mamba) == precision_for("float32", mamba) == "float32"
    with pytest.raises(
        RunError,
        match="--precision tf32: needs an Ampere GPU or later, Triton, and a model",
    ):
        FastEngine(mamba, precision="tf32")


def test_a_model_that_cannot_be_run_in_parts_is_measured_whole_and_a_line_says_so(
    mamba, monkeypatch
) -> None:
    messages: list[str] = []
    engine = Job(token_ids(2, 12).numpy()).engine_on(mamba, messages.append)
    assert (type(engine), messages) == (FastEngine, [])
    original = mamba.chain.finish
    monkeypatch.setattr(
        mamba.chain, "finish", lambda *arguments: original(*arguments) * 1.01
    )
    engine = Job(token_ids(2, 13).numpy()).engine_on(mamba, messages.append)
    assert type(engine) is PlainEngine
    (line,) = messages
    assert "off by" in line
    assert "using the plain engine" in line
