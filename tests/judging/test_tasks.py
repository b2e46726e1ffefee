"""Tasks: our sessions as lm-eval's model, local files, paired drops, and going on after an interruption."""

import json
import math
from pathlib import Path

import pytest

from kl_lens.base.errors import TextError
from kl_lens.base.progress import Progress
from kl_lens.judging import JudgedModel, ScoreJournal, TorchSession, read_scores
from kl_lens.judging.tasks import TaskData, TaskExamples, chosen_tasks, task_values
from kl_lens.model import LoadedModel
from kl_lens.run.folder import Run
from kl_lens.run.records import Plan

pytest.importorskip("lm_eval", reason="needs the extra eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kl_lens.judging.language_model import SessionLM, judge_task, run_task

ROWS = {
    "arc_easy_test.jsonl": [
        {
            "query": f"Question: Where was the {thing} ?",
            "gold": n % 4,
            "choices": ["in the city", "on it", "at a game", "with the first"],
        }
        for n, thing in enumerate(("game", "city", "season", "first", "other"))
    ],
    "hellaswag_validation_200.jsonl": [
        {
            "ind": 1,
            "activity_label": "The game",
            "ctx_a": "It was the first.",
            "ctx_b": "the city",
            "ctx": "x",
            "endings": [
                "was in the city .",
                "had it .",
                "by the time of it",
                "were at the first",
            ],
            "label": str(n),
        }
        for n in (2, 0, 3)
    ],
    "lambada_openai_test.jsonl": [
        {"context": "In the city , the first time it was", "continuation": "the"},
        {"context": "He had been at the", "continuation": "game"},
    ],
    "my_own_test.jsonl": [{"query": "The first is", "choices": ["it", "the"], "gold": 1}],
}


@pytest.fixture(scope="module")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, rows in ROWS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def huggingface(model: LoadedModel) -> HFLM:
    return HFLM(
        pretrained=model.model, tokenizer=model.tokenizer, batch_size=1, max_length=64
    )


@pytest.fixture
def session_lm(model: LoadedModel) -> SessionLM:
    return SessionLM(TorchSession(model), model.tokenizer, max_length=64)


def test_likelihoods_are_lm_evals_own(session_lm: SessionLM, huggingface: HFLM) -> None:
    pairs = [
        ("The game was", " in the city"),
        ("The game was ", "in the city"),  # a blank that belongs to what follows
        ("", "the first time"),
        ("the city " * 60, " was the first"),  # longer than the model may read
        ("The game was", " the"),
        ("The game was", " a"),  # shares its input with the one before
    ]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    theirs = huggingface.loglikelihood(requests, disable_tqdm=True)
    found = session_lm.loglikelihood(requests)
    assert [total for total, _ in found] == pytest.approx(
        [total for total, _ in theirs], abs=1e-4
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in theirs]


def test_generation_is_lm_evals_own(session_lm: SessionLM, huggingface: HFLM) -> None:
    for stops in ([], [" the"]):
        settings = {"until": stops, "max_gen_toks": 12, "do_sample": False}
        request = [Instance("generate_until", {}, ("In the city", dict(settings)), 0)]
        assert session_lm.generate_until(request) == huggingface.generate_until(
            request, disable_tqdm=True
        )


@pytest.mark.parametrize("name", ["arc_easy", "hellaswag", "lambada_openai"])
def test_local_files_give_lm_evals_results(
    name: str, session_lm: SessionLM, huggingface: HFLM, task_data: Path
) -> None:
    (task,) = chosen_tasks(task_data, [name])
    (actual,), (expected,) = (
        run_task(language_model, task) for language_model in (session_lm, huggingface)
    )
    assert len(actual.metrics["acc"]) == len(
        next(rows for file, rows in ROWS.items() if file.startswith(name))
    )
    assert set(actual.metrics) == set(expected.metrics)
    for metric, values in actual.metrics.items():
        assert values == pytest.approx(expected.metrics[metric], abs=1e-4)
    assert actual.chance == {"arc_easy": 0.25, "hellaswag": 0.25}.get(name)


def test_an_interrupted_task_goes_on(
    model: LoadedModel, task_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kl_lens.judging.language_model.ANSWERS_TOGETHER", 4)
    (task,) = chosen_tasks(task_data, ["arc_easy"])
    names = [c.name for c in model.anatomy.candidates]
    subjects = [
        JudgedModel(model),
        JudgedModel.of_plan(model, Plan("x", dict.fromkeys(names, "int4"), "test")),
    ]
    requests: list[str] = []

    def stop(_: float, what: str) -> None:
        requests.append(what)
        if len(requests) == 7:
            raise KeyboardInterrupt  # not a signal: with OpenVINO and GenAI loaded, one would end the process

    with Run.create(tmp_path / "run") as run:
        with pytest.raises(KeyboardInterrupt):
            judge_task(
                ScoreJournal(run),
                subjects,
                task,
                model.tokenizer,
                progress=Progress(advanced=stop),
            )
        assert [score.subject.label for score in read_scores(run)] == ["original"]
        calls = list[int]()
        logits = TorchSession.logits
        monkeypatch.setattr(
            TorchSession,
            "logits",
            lambda self, ids: calls.append(len(ids)) or logits(self, ids),
        )
        resumed = judge_task(ScoreJournal(run), subjects, task, model.tokenizer)
        assert (
            0 < len(calls) < 20
        )  # of the second subject's twenty requests, what was left
    with Run.create(tmp_path / "whole") as run:
        whole = judge_task(ScoreJournal(run), subjects, task, model.tokenizer)
    assert [s.values for s in resumed.scores] == [s.values for s in whole.scores]
    before, after = (s.values["acc"].value for s in whole.scores)
    assert whole.scores[1].values["acc_drop"].value == pytest.approx(
        before - after
    )  # paired by example


def test_a_drop_is_a_loss_in_either_direction_and_last_words_have_a_perplexity() -> None:
    def examples(**metrics: list[float]) -> TaskExamples:
        better = {"acc": True, "errors": False, "perplexity": False}
        return TaskExamples("task", metrics, better, None, "1", 0)

    before = examples(acc=[1, 1, 0, 1], errors=[0, 2, 1, 3], perplexity=[-1, -3, -2, -2])
    after = examples(acc=[1, 0, 0, 1], errors=[1, 2, 3, 3], perplexity=[-1, -3, -2, -2])
    values = task_values(after, before)
    assert values["acc_drop"].value == pytest.approx(0.25)
    assert values["errors_drop"].value == pytest.approx(0.75)
    assert values["errors"].value == pytest.approx(2.25)
    assert values["last_word_perplexity"].value == pytest.approx(math.exp(2))
    assert "perplexity_drop" not in values
    assert set(task_values(after)) == {"acc", "errors", "last_word_perplexity"}
    fewer = examples(acc=[1, 1, 0], errors=[0, 2, 1], perplexity=[])
    assert "acc_drop" not in task_values(after, fewer)


def test_what_is_missing_is_named(
    task_data: Path, tmp_path: Path, session_lm: SessionLM
) -> None:
    with pytest.raises(
        TextError, match=r"has no winogrande_test\.jsonl .* it has arc_easy"
    ):
        chosen_tasks(task_data, ["winogrande"])
    with pytest.raises(TextError, match="no such folder"):
        chosen_tasks(tmp_path / "nowhere", [])
    (tmp_path / "piqa_validation.jsonl").write_text("no json\n")
    with pytest.raises(
        TextError, match=r"piqa_validation\.jsonl: its first line is not a JSON"
    ):
        run_task(
            session_lm,
            TaskData("piqa", {"validation": tmp_path / "piqa_validation.jsonl"}),
        )
    (tmp_path / "piqa_validation.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(TextError, match="task piqa"):
        run_task(
            session_lm,
            TaskData("piqa", {"validation": tmp_path / "piqa_validation.jsonl"}),
        )


@pytest.mark.slow
def test_a_task_of_the_users_own_and_the_hub_out_of_reach(
    session_lm: SessionLM, task_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: lm-eval reads its index of all tasks."""
    (task,) = chosen_tasks(task_data, ["my_own"])
    (examples,) = run_task(session_lm, task)
    assert (examples.chance, len(examples.metrics["acc"])) == (0.5, 1)
    with pytest.raises(TextError, match="lm-eval has no such task"):
        run_task(session_lm, TaskData("no_such_task"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(TextError, match=r"task piqa: .*--task-data DIR"):
        run_task(session_lm, TaskData("piqa"))
