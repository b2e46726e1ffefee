"""`evaluate`: perplexity, KL divergence and task accuracy of plans in PyTorch and of exported files."""

from __future__ import annotations

import tempfile
from collections import ChainMap
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kl_lens import judging
from kl_lens.base.errors import KLLensError
from kl_lens.judging.duel import Entrant, entrants
from kl_lens.judging.evaluator import DIVERGENCE, PERPLEXITY, POSITIONS
from kl_lens.judging.tasks import FAIL, chosen_tasks, judge, near_chance
from kl_lens.model import LanguageTask, LoadedModel, Task
from kl_lens.planning import stored_plans
from kl_lens.run.folder import Run
from kl_lens.run.positions import LONGEST, longest_window
from kl_lens.run.records import ORIGINAL, Score
from kl_lens.study import settings as of
from kl_lens.study.events import going_on
from kl_lens.study.session import Session
from kl_lens.study.settings import (
    Opening,
    Runtime,
    Settings,
    Tasks,
    group,
    grouped,
    loading,
    option,
    with_options,
)
from kl_lens.targets import TARGETS

DEFAULT_TEXT = "wikitext2:test"
TORCH = "torch"
_what = grouped("what to measure (default: --perplexity --divergence)")
_on_text = partial(_what, None, nargs="?")


@with_options
class EvaluateSettings(Settings):
    run: of.Folder | None = of.of_run()
    model: of.Model | None = of.moved_model()
    opening: Opening = group(
        Opening,
        weights=None,
        dtype=loading("float32", "data type in PyTorch", choices=of.DTYPES),
        device=loading(
            "auto",
            "device of PyTorch; auto: a GPU if there is one",
            flag="--torch-device",
            metavar="DEVICE",
        ),
    )
    artifact: tuple[Path, ...] = of.of_files()
    plan: str = of.of_plans()
    target: of.Names | None = of.of_targets(
        "torch (plans in PyTorch) or runtimes (files)",
        choices=ChainMap({TORCH: ""}, TARGETS),
    )
    perplexity: of.Text | None = _on_text(
        f"default text: {DEFAULT_TEXT}", bare=DEFAULT_TEXT
    )
    divergence: of.Text | None = _on_text(
        "KL from the original (default text: as --perplexity)", bare=""
    )
    positions: of.Text | None = _on_text(
        "KL by position, and whether it grows; in windows of 8,192 tokens, or as many as the model allows",
        bare=DEFAULT_TEXT,
    )
    window_length: of.Tokens | None = _what(
        None, "tokens per window (default: 2048; 16 images)", former=("window",)
    )
    stride: of.Tokens | None = _what(
        None, "score only the last S tokens of each window", metavar="S"
    )
    windows: of.Count | None = _what(None, "only the first N windows", former=("limit",))
    tasks: Tasks = group(Tasks)
    task_drop: of.Share | None = option(
        None,
        "accuracy that a task may lose at most, such as 3% (points)",
        group="tasks (lm-eval)",
    )
    exact: bool = of.running(False, "compute in float32 instead of the fastest way")
    runtime: Runtime = group(
        Runtime,
        device=of.running(
            "CPU", "device of OpenVINO or MLX", name="runtime_device", metavar="DEVICE"
        ),
    )
    again: bool = of.running(False, "repeat what the run has already measured")

    def check(self) -> None:
        super().check()
        self.tasks.check()
        if self.task_drop is not None and self.tasks.tasks is None:
            raise KLLensError(
                "--task-drop limits the accuracy that tasks lose; name tasks with --tasks"
            )
        length = self.window_length
        if length is not None and (self.stride or 0) > length:
            raise KLLensError(
                f"--stride {self.stride} is larger than --window-length {length}; it skips text"
            )
        if self.positions is not None and self.stride is not None:
            raise KLLensError(
                "--positions scores every token of a window: leave out --stride"
            )


@dataclass
class EvaluateResult(judging.Outcome):
    notes: list[str] = field(default_factory=list)
    duel: list[Entrant] = field(default_factory=list)  # files, by size
    task_drop: float | None = None

    def verdict_of(self, score: Score) -> str:
        """Whether a task's loss of accuracy is within the limit; empty without one."""
        if self.task_drop is None or "acc_drop" not in score.values:
            return ""
        return judge(score.values["acc_drop"], self.task_drop)

    def near_chance(self, score: Score, accuracies: Sequence[str]) -> list[str]:
        """Which accuracies of a task are hardly better than guessing."""
        chance = score.protocol.get("chance")
        values = score.values
        return [n for n in accuracies if n in values and near_chance(values[n], chance)]

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """Whether each task's loss of accuracy is within the limit."""
        return [
            {
                "subject": score.subject.label,
                "task": score.what,
                "task_drop": self.task_drop,
                "verdict": verdict,
            }
            for score in self.scores
            if score.kind == "task" and (verdict := self.verdict_of(score))
        ]

    @property
    def exit_code(self) -> int:
        if self.failures or not all(a.holds for a in self.agreements):
            return 1
        return 2 if any(verdict["verdict"] == FAIL for verdict in self.verdicts) else 0


def evaluate(settings: EvaluateSettings, session: Session) -> EvaluateResult:
    if settings.runtime.threads is not None:
        torch.set_num_threads(settings.runtime.threads)
    runtime = settings.runtime.session(exact=settings.exact)
    model: LoadedModel | None = None
    with ExitStack() as stack:
        if (
            settings.run is None and settings.artifact
        ):  # files are scored without a run folder
            stored = None
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            run = stack.enter_context(Run.create(Path(scratch)))
            if settings.model is not None:
                model = session.model(settings.model, settings.opening)
        else:
            stored = run = stack.enter_context(
                Run.open(Path(settings.run or of.DEFAULT_RUN))
            )
            run.note_command(["kl-lens", *of.command_of(settings)])
            model = session.model_of(run, settings.model, settings.opening)
        if settings.artifact or model is None:
            selection = judging.given_subjects(settings.artifact, runtime, model, stored)
        else:
            plans = stored_plans(run.folder / "plans", run.components)
            selection = judging.run_subjects(
                run, model, runtime, plans, plans=settings.plan, targets=settings.target
            )
        if not selection.subjects and model is None:
            raise KLLensError(
                next(iter(selection.failures.values()), "there is nothing to evaluate")
            )
        task = (
            model.task
            if model is not None
            else _task_of(selection.subjects, settings.opening)
        )
        judge = Judge(
            run,
            session,
            selection,
            task,
            model,
            stored=stored is not None,
            again=settings.again,
        )
        for name, kinds in _asked(settings, model is not None).items():
            judge.text(
                name,
                kinds,
                window=settings.window_length,
                stride=settings.stride,
                limit=settings.windows,
            )
        if settings.positions is not None:
            judge.text(
                settings.positions,
                {POSITIONS},
                window=settings.window_length,
                limit=settings.windows,
            )
        judge.tasks(settings.tasks, settings.window_length)
        return replace(judge.result, task_drop=settings.task_drop)


def _asked(settings: EvaluateSettings, with_original: bool) -> dict[str, set[str]]:
    """Text → what to measure on it."""
    perplexity = settings.perplexity
    divergence = settings.divergence
    if (perplexity, divergence, settings.positions, settings.tasks.tasks) == (
        None,
        None,
        None,
        None,
    ):
        perplexity = DEFAULT_TEXT
        divergence = "" if with_original else None
    kinds: dict[str, set[str]] = {}
    if perplexity is not None:
        kinds.setdefault(perplexity, set()).add(PERPLEXITY)
    if divergence is not None:
        kinds.setdefault(divergence or perplexity or DEFAULT_TEXT, set()).add(DIVERGENCE)
    return kinds


def _task_of(files: Sequence[judging.Judged], opening: Opening) -> Task:
    """The task of the first file that can be opened: a broken one must not stop the others."""
    failures: list[KLLensError] = []
    for file in files:
        assert isinstance(file, judging.JudgedArtifact)
        try:
            return judging.artifact_task(file, opening.tokenizer, opening.images)
        except KLLensError as error:
            failures.append(error)
    raise failures[0]


class Judge:
    """Judges files, and plans in PyTorch, beside the original model; the run's journal keeps what is done."""

    def __init__(
        self,
        run: Run,
        session: Session,
        selection: judging.Selection,
        task: Task,
        model: LoadedModel | None,
        *,
        stored: bool = True,
        again: bool = False,
        others: Collection[str] = (),
        deciding: Callable[[], Collection[str]] = tuple,
        **evaluator: Any,
    ) -> None:
        """`stored`: the run is the user's own; `again`: what it holds is measured again; `others`, `deciding`: files by
        their keys, as in `Evaluator.judge`; `evaluator`: more arguments of `Evaluator`."""
        self._run = run
        self._session = session
        self._task = task
        self._model = model
        self._stored = stored
        files = [
            file
            for file in selection.subjects
            if isinstance(file, judging.JudgedArtifact)
        ]
        self._others = [file for file in files if file.subject.key in others]
        self._subjects = [
            subject for subject in selection.subjects if subject not in self._others
        ]
        self._deciding = deciding
        self._how = evaluator
        self._journal = judging.ScoreJournal(run, again=again)
        self._original = (
            None
            if model is None
            else judging.JudgedModel(model, memory_budget=session.memory_budget)
        )
        self.result = EvaluateResult(
            notes=[*selection.notes], failures={**selection.failures}
        )

    def text(
        self,
        name: str,
        kinds: Collection[str],
        *,
        window: int | None,
        **extent: int | None,
    ) -> None:
        """Measures these kinds on a text; without any, only whether files agree with PyTorch. `how`: stride, limit."""
        if POSITIONS in kinds:
            if not self._task.generates:
                raise KLLensError(
                    "--positions needs a language model; this one classifies images"
                )
            window = window or (
                LONGEST if self._model is None else longest_window(self._model.config)
            )
        text = judging.prepare(name, self._task, window=window, **extent)
        self._session.say_note(text.windows)
        self._session.refuse_overlap(self._run, text.windows, self._task)
        with self._going_on(), self._session.events.progress(text.label) as progress:
            evaluator = judging.Evaluator(
                self._journal,
                text,
                self._original,
                kinds,
                progress,
                self._session.memory_budget,
                **self._how,
            )
            try:
                judgement = evaluator.judge(self._subjects, self._others, self._deciding)
            finally:
                evaluator.close()
        # From here on, PyTorch stands in for the same files.
        self._subjects = judgement.judged
        self._others = []
        self.result.add(judgement)
        for score in judgement.scores:
            if score.subject.what == ORIGINAL and "token_perplexity" in score.values:
                perplexity = score.values["token_perplexity"].value
                if words := self._task.lost(text.windows, perplexity):
                    self._session.tell_once(words)
        if DIVERGENCE in kinds:
            self.result.duel[:] = entrants(self._journal, self._subjects, text)

    def _going_on(self) -> AbstractContextManager[None]:
        return going_on(self._run.folder if self._stored else None)

    def tasks(self, tasks: Tasks, window: int | None) -> None:
        if tasks.tasks is None:
            return
        from kl_lens.judging.language_model import judge_task  # needs lm-eval

        for data in chosen_tasks(tasks.task_data, tasks.tasks):
            if not isinstance(self._task, LanguageTask):
                raise KLLensError(
                    "--tasks needs a language model; this one classifies images"
                )
            subjects = [
                *([] if self._original is None else [self._original]),
                *self._subjects,
            ]
            length = window or self._task.judged_length
            tokenizer = self._task.require_tokenizer()
            with self._going_on(), self._session.events.progress(data.name) as progress:
                outcome = judge_task(
                    self._journal,
                    subjects,
                    data,
                    tokenizer,
                    max_length=length,
                    limit=tasks.task_limit,
                    progress=progress,
                )
                self.result.add(outcome)
