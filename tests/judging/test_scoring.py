"""Perplexity and divergence against computations by hand, in float64, and lm-eval's own; errors against textbooks."""

import math

import numpy as np
import pytest
import torch
import transformers

from kl_lens.base.errors import TargetError
from kl_lens.base.files import reference_path
from kl_lens.cli.judging import _divergence
from kl_lens.judging import (
    EvaluationText,
    TorchSession,
    divergence_values,
    prepare,
    score_text,
)
from kl_lens.judging.evaluator import DIVERGENCE
from kl_lens.judging.scoring import score_logits
from kl_lens.judging.tasks import judge, near_chance
from kl_lens.measuring.objectives import OBJECTIVES, Objective
from kl_lens.measuring.perturbation import Perturbation, replacements, swapped
from kl_lens.model import LanguageTask, LoadedModel
from kl_lens.run.readings import (
    likelihood_values,
    paired_drop,
    perplexity,
    perplexity_change,
    quantile,
)
from kl_lens.run.records import ORIGINAL, Estimate, Score, Subject
from kl_lens.text.sources import Document, TextSource, wikitext2
from kl_lens.weights.recipes import Recipe


def log_probabilities(model: LoadedModel, ids: tuple[int, ...]) -> np.ndarray:
    """(tokens, vocabulary) in float64, from the model's own forward."""
    with torch.inference_mode():
        logits = model.model(torch.tensor([ids])).logits[0].double()
    return (logits - logits.logsumexp(-1, keepdim=True)).numpy()


INT4 = {
    "backbone.layers.1.mixer.in_proj": Recipe("int4"),
    "backbone.embeddings": Recipe("int8"),
}


@pytest.mark.parametrize("stride", [None, 12])
def test_perplexity_by_hand(model: LoadedModel, tiny_folder, stride: int | None) -> None:
    """Every token once, given what came before it in its window; with a stride, only each window's last tokens."""
    text = prepare(
        str(tiny_folder / "text.txt"), model.task, window=48, stride=stride, limit=5
    )
    losses = []
    for index, item in enumerate(text.items):
        first = 1 if stride is None or index == 0 else 48 - 12
        table = log_probabilities(model, item.ids)
        losses.append([-table[t - 1, item.ids[t]] for t in range(first, 48)])
    scores = score_text(TorchSession(model), text)
    values = likelihood_values(scores)
    every = np.concatenate(losses)
    assert text.protocol["tokens"] == len(every) == sum(s.targets for s in scores)
    assert values["token_perplexity"].value == pytest.approx(
        math.exp(every.mean()), rel=1e-6
    )
    assert values["word_perplexity"].value == pytest.approx(
        math.exp(every.sum() / text.protocol["words"]), rel=1e-6
    )
    sums = np.array([sum(w) for w in losses])
    counts = np.array([len(w) for w in losses])
    residuals = sums - every.mean() * counts
    error = math.sqrt((residuals**2).sum() / 4 * 5) / counts.sum()
    assert values["token_perplexity"].standard_error == pytest.approx(
        values["token_perplexity"].value * error, rel=1e-5
    )


def test_words_are_counted_where_they_begin() -> None:
    """A byte-level tokenizer cuts words; each counts once, in the window in which its first letter is scored."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(reference_path("mamba"))
    document = Document("piece", wikitext2("test").documents[0].text[:6000])
    text = prepare(
        TextSource("piece", None, (document,)),
        LanguageTask(tokenizer),
        window=64,
        stride=40,
    )
    spans = tokenizer(document.text, return_offsets_mapping=True)["offset_mapping"]
    scored = {
        start + offset
        for start, item in zip(text.windows.starts, text.items, strict=True)
        for offset in range(item.first_row + 1, 64)
    }
    begins = [
        i
        for i, c in enumerate(document.text)
        if not c.isspace() and (i == 0 or document.text[i - 1].isspace())
    ]
    holder = [
        next(t for t, (a, b) in enumerate(spans) if a <= begin < b) for begin in begins
    ]
    assert text.protocol["words"] == sum(token in scored for token in holder)
    assert (
        text.protocol["words"] < 0.9 * text.protocol["tokens"]
    )  # the two perplexities are different things


def test_divergence_by_hand(model: LoadedModel, text: EvaluationText) -> None:
    scores = score_text(TorchSession(model, INT4), text, TorchSession(model))
    expected = []
    same = []
    for item in text.items:
        original = log_probabilities(model, item.ids)[:-1]
        with swapped(replacements(model, Perturbation(INT4))):
            student = log_probabilities(model, item.ids)[:-1]
        expected.append((np.exp(original) * (original - student)).sum(-1))
        same.append(original.argmax(-1) == student.argmax(-1))
    tokens = np.concatenate(expected)
    values = divergence_values(scores)
    assert values["kl_mean"].value == pytest.approx(tokens.mean(), rel=1e-5)
    assert values["kl_mean"].standard_error == pytest.approx(
        np.std([w.mean() for w in expected], ddof=1) / math.sqrt(len(expected)), rel=1e-4
    )
    for name, share in (
        ("kl_median", 0.5),
        ("kl_p99", 0.99),
        ("kl_p999", 0.999),
        ("kl_max", 1.0),
    ):
        assert values[name].value == pytest.approx(np.quantile(tokens, share), rel=1e-4)
    assert values["same_top"].value == pytest.approx(np.concatenate(same).mean())


def test_another_objective_is_judged_beside_kl(
    model: LoadedModel, text: EvaluationText, monkeypatch: pytest.MonkeyPatch
) -> None:
    def variation(
        original: torch.Tensor, other: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        return (original.softmax(-1) - other.softmax(-1)).abs().sum(-1) / 2

    def judged() -> dict[str, Estimate]:
        sessions = TorchSession(model, INT4), TorchSession(model)
        return divergence_values(score_text(sessions[0], text, sessions[1]))

    without = judged()
    monkeypatch.setitem(OBJECTIVES, "variation", Objective("variation", variation))
    values = judged()
    found = values.pop("variation")
    assert values == without  # to the last bit
    assert found.standard_error > 0
    assert 0 < found.value < math.sqrt(values["kl_mean"].value / 2)  # Pinsker
    score = Score(
        Subject(ORIGINAL),
        DIVERGENCE,
        "text",
        values | {"variation": found},
        1,
        {},
        {},
        0.0,
    )
    assert "variation" in [
        str(column.header) for column in _divergence([score], []).columns
    ]


def test_a_torch_session_remembers_goes_on_where_it_was_and_refuses_what_is_no_number(
    model: LoadedModel, text: EvaluationText
) -> None:
    teacher = TorchSession(model, memory_budget=4 * 10**8)
    for _ in range(2):  # computed, and remembered
        values = divergence_values(score_text(TorchSession(model), text, teacher))
        assert values["kl_max"].value < 1e-9
        assert values["same_top"].value == 1
    ids = text.items[0].ids[:20]
    session = TorchSession(model, INT4)
    whole = session.logits(ids)
    session.reset()
    session.prefill(ids[:12])
    session.prefill(ids[12:19])
    np.testing.assert_allclose(session.step(ids[19]), whole[-1], atol=2e-5)
    with pytest.raises(TargetError, match="outside the vocabulary"):
        session.step(97)
    logits = TorchSession(model).logits(text.items[0].ids)
    logits[5, 3] = np.nan
    with pytest.raises(TargetError, match="not finite"):
        score_logits(logits, text.items[0])


def test_the_original_remembers_as_many_outputs_as_an_eighth_of_the_memory_holds(
    model: LoadedModel, text: EvaluationText, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("final_states", "logits"):
        compute = getattr(model.chain, name)

        def counted(*arguments, name=name, compute=compute):  # type: ignore[no-untyped-def]
            calls.append(name)
            return compute(*arguments)

        monkeypatch.setattr(model.chain, name, counted)
    windows = [item.ids for item in text.items[:4]]
    size = 4 * len(windows[0])
    logits = size * 97  # bytes of a window's
    states = size * int(model.chain.head.weight.shape[1])
    assert 4 * states < 3 * logits
    teacher = TorchSession(model, memory_budget=8 * 3 * logits)
    first = [teacher.logits(ids) for ids in windows]
    assert calls == ["final_states", "logits"] * 4
    calls.clear()
    again = [teacher.logits(ids) for ids in windows]
    assert calls == ["logits"]  # the others are there, and all states
    np.testing.assert_array_equal(again, first)


def test_a_change_that_is_alike_everywhere_is_known_far_better_than_either_perplexity() -> (
    None
):
    generator = np.random.default_rng(0)
    weights = np.full(40, 100.0)
    original = weights * generator.normal(3.0, 0.3, 40)
    changed = original + weights * 0.01
    change = perplexity_change(changed, original, weights)
    ours, theirs = (perplexity(nll, weights) for nll in (changed, original))
    assert change.value == pytest.approx(ours.value - theirs.value)
    assert change.standard_error < ours.standard_error / 50


def test_the_error_of_a_quantile_is_that_of_repeated_texts() -> None:
    """Many texts of 50 windows: the spread of their 99th percentiles is the error that each of them claims."""
    generator = np.random.default_rng(1)

    def windows() -> list[np.ndarray]:
        levels = generator.lognormal(
            0, 0.5, 50
        )  # windows differ: tokens of one are no independent samples
        return [
            (level * generator.exponential(1, 200)).astype(np.float32) for level in levels
        ]

    found = [quantile(windows(), 0.99) for _ in range(200)]
    spread = np.std([f.value for f in found])
    assert np.mean([f.standard_error for f in found]) == pytest.approx(spread, rel=0.2)
    few = [np.arange(5, dtype=np.float32), np.arange(5, dtype=np.float32)]
    assert math.isnan(quantile(few, 0.999).standard_error)  # beyond the text


def test_the_paired_drop_by_hand() -> None:
    """Of ten examples three were lost and one was won: 2 in 10; Agresti and Min's error with half an example each."""
    before = np.array([1, 1, 1, 1, 0, 0, 0, 0, 1, 0], float)
    after = np.array([0, 0, 0, 1, 1, 0, 0, 0, 1, 0], float)
    drop = paired_drop(before, after)
    lost = 3.5
    won = 1.5
    n = 12
    assert drop.value == pytest.approx(0.2)
    assert drop.standard_error == pytest.approx(
        math.sqrt((lost + won) - (lost - won) ** 2 / n) / n
    )


def test_verdicts_by_the_whole_error_bar() -> None:
    """No difference on few examples proves little."""
    for examples, verdict in ((40, "not decided"), (2000, "pass")):
        assert judge(paired_drop(np.ones(examples), np.ones(examples)), 0.03) == verdict
    found = [
        (0.01, 0.005, "pass"),
        (0.05, 0.005, "fail"),
        (0.03, 0.005, "not decided"),
        (-0.2, 0.01, "pass"),
        (0.01, 0.02, "not decided"),
        (0.5, math.nan, "not decided"),
    ]
    assert [judge(Estimate(drop, error), 0.03) for drop, error, _ in found] == [
        v for *_, v in found
    ]
    assert near_chance(Estimate(0.29, 0.021), 0.25)
    assert not near_chance(Estimate(0.30, 0.02), 0.25)
    assert not near_chance(Estimate(0.0, 0.1), None)  # nothing to guess among
