"""`evaluate`: perplexity, KL divergence and task accuracy of plans in PyTorch and of exported files."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from kl_lens import evaluation
from kl_lens.base.errors import KLLensError
from kl_lens.evaluation.agreement import DISAGREES
from kl_lens.evaluation.evaluator import DIVERGENCE, PERPLEXITY, POSITIONS
from kl_lens.evaluation.tasks import FAIL, TaskData, chosen_tasks, judge
from kl_lens.model import LanguageTask, LoadedModel, Task
from kl_lens.paper import write_published
from kl_lens.run.folder import ALL_PLANS, Run
from kl_lens.run.positions import LONGEST, longest_window
from kl_lens.study.events import going_on
from kl_lens.study.session import Session
from kl_lens.study.settings import (
    COUNT,
    DEFAULT_RUN,
    DEVICE,
    DTYPES,
    NAMES,
    SHARE,
    TOKENS,
    Opening,
    Runtime,
    Settings,
    Tasks,
    chosen_targets,
    command_of,
    group,
    grouped,
    loading,
    moved_model,
    of_run,
    option,
)

DEFAULT_TEXT = "wikitext2:test"
TORCH = "torch"
_what = grouped("what to measure (default: --perplexity --divergence)")
_running = grouped("running")


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(Settings):
    verb: ClassVar[str] = "evaluate"

    run: str | None = of_run()
    model: str | None = moved_model()
    opening: Opening = group(
        Opening,
        dtype=loading("float32", "data type in PyTorch", choices=DTYPES),
        device=loading(
            "auto",
            "device of PyTorch; auto: the GPU if there is one",
            kind=DEVICE,
            flag="--torch-device",
            metavar="DEVICE",
        ),
    )
    artifact: tuple[Path, ...] = option(
        (),
        "exported folders or .gguf files (default: everything in the run)",
        positional=True,
        nargs="*",
        metavar="ARTIFACT",
    )
    plan: str = option(ALL_PLANS, "plans of the run: a, or a,b, or all", metavar="NAMES")
    targets: tuple[str, ...] | None = option(
        None, "torch (plans in PyTorch) or targets (exported files); default: all", kind=NAMES
    )
    perplexity: str | None = _what(
        None,
        f"token and word perplexity (default text: {DEFAULT_TEXT})",
        nargs="?",
        bare=DEFAULT_TEXT,
        metavar="TEXT",
    )
    divergence: str | None = _what(
        None,
        "KL divergence from the original model (default text: as --perplexity)",
        nargs="?",
        bare="",
        metavar="TEXT",
    )
    positions: str | None = _what(
        None,
        "KL by position, and whether it grows; in windows of 8,192 tokens, or as many as the model allows",
        nargs="?",
        bare=DEFAULT_TEXT,
        metavar="TEXT",
    )
    window: int | None = _what(None, "tokens per window (default: 2048; 16 images)", kind=TOKENS)
    stride: int | None = _what(
        None, "score only the last S tokens of each window (default: all)", kind=TOKENS, metavar="S"
    )
    limit: int | None = _what(None, "only the first N windows", kind=COUNT)
    tasks: Tasks = group(Tasks)
    max_drop: float | None = option(
        None, "largest loss of accuracy that a task may have, such as 3% (points)", kind=SHARE
    )
    exact: bool = _running(False, "compute in float32 instead of the fastest way")
    runtime: Runtime = group(
        Runtime, device=_running("CPU", "device of OpenVINO or MLX", name="runtime_device", metavar="DEVICE")
    )
    again: bool = _running(False, "repeat what the run has already measured")

    def check(self) -> None:
        super().check()
        chosen_targets(self.targets, TORCH)
        self.tasks.check()
        if self.max_drop is not None and self.tasks.tasks is None:
            raise KLLensError("--max-drop limits the accuracy that tasks lose; name tasks with --tasks")
        if self.window is not None and (self.stride or 0) > self.window:
            raise KLLensError(
                f"--stride {self.stride} is larger than --window {self.window}: text between windows would be skipped"
            )

        if self.positions is not None and self.stride is not None:
            raise KLLensError("--positions scores every token of a window: leave out --stride")


@dataclass
class EvaluateResult:
    outcome: evaluation.Outcome = field(default_factory=evaluation.Outcome)
    notes: list[str] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    max_drop: float | None = None

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        """Whether each task's loss of accuracy is within the limit."""
        if self.max_drop is None:
            return []
        return [
            {
                "subject": s.subject.label,
                "task": s.what,
                "max_drop": self.max_drop,
                "verdict": judge(s.values["acc_drop"], self.max_drop),
            }
            for s in self.outcome.scores
            if s.kind == "task" and "acc_drop" in s.values
        ]

    @property
    def failures(self) -> dict[str, str]:
        return self.outcome.failures

    @property
    def exit_code(self) -> int:
        if self.failures or any(a.verdict == DISAGREES for a in self.outcome.agreements):
            return 1
        return 2 if any(verdict["verdict"] == FAIL for verdict in self.verdicts) else 0


def evaluate(settings: EvaluateSettings, session: Session) -> EvaluateResult:
    if settings.run is None and settings.artifact:  # files are scored without a run folder
        with tempfile.TemporaryDirectory() as folder, Run.create(Path(folder)) as run:
            return _Evaluation(settings, run, session, keep=False).judged()
    with Run.open(Path(settings.run or DEFAULT_RUN)) as run:
        run.note_command(["kl-lens", *command_of(settings)])
        return _Evaluation(settings, run, session, keep=True).judged()


class _Evaluation:
    def __init__(self, settings: EvaluateSettings, run: Run, session: Session, *, keep: bool) -> None:
        """`keep`: the run is the user's own."""
        self.settings, self.run, self.session, self.keep = settings, run, session, keep
        self.result = EvaluateResult(max_drop=settings.max_drop)
        self.model: LoadedModel | None = None
        if settings.runtime.threads is not None:
            torch.set_num_threads(settings.runtime.threads)
        if keep:
            self.model = session.model_of(run, settings.model, settings.opening)
        elif settings.model is not None:
            self.model = session.model(settings.model, settings.opening)
        how = settings.runtime.session(exact=settings.exact)
        if settings.artifact:
            found = evaluation.given_subjects(settings.artifact, how, self.model, run if keep else None)
        else:
            assert self.model is not None
            found = evaluation.run_subjects(
                run, self.model, how, plans=settings.plan, targets=settings.targets
            )
        self.subjects = found.subjects
        self.result.notes += found.notes
        self.result.failures.update(found.failures)
        if not self.subjects and self.model is None:
            raise KLLensError(next(iter(self.result.failures.values()), "there is nothing to evaluate"))
        self.task = self._task()
        self.journal = evaluation.ScoreJournal(run, again=settings.again)
        self.original = None if self.model is None else evaluation.JudgedModel(self.model)

    def _task(self) -> Task:
        if self.model is not None:
            return self.model.task
        failures: list[KLLensError] = []
        for file in self.subjects:  # a broken file must not stop the others
            assert isinstance(file, evaluation.JudgedArtifact)
            try:
                opening = self.settings.opening
                return evaluation.artifact_task(file, opening.tokenizer, opening.images)
            except KLLensError as error:
                failures.append(error)
        raise failures[0]

    def judged(self) -> EvaluateResult:
        settings = self.settings
        perplexity, divergence, positions = settings.perplexity, settings.divergence, settings.positions
        if all(given is None for given in (perplexity, divergence, positions, settings.tasks.tasks)):
            perplexity, divergence = DEFAULT_TEXT, "" if self.original is not None else None
        texts: dict[str, set[str]] = {}  # text → what is measured on it
        if perplexity is not None:
            texts.setdefault(perplexity, set()).add(PERPLEXITY)
        if divergence is not None:
            texts.setdefault(divergence or perplexity or DEFAULT_TEXT, set()).add(DIVERGENCE)
        with going_on(self.run.folder if self.keep else None):
            for name, kinds in texts.items():
                self._judge_text(name, kinds)
            if positions is not None:
                self._judge_text(positions, {POSITIONS})
            for task in chosen_tasks(settings.tasks.task_data, settings.tasks.tasks or ()):
                self._judge_task(task)
        return self.result

    def _judge_text(self, name: str, kinds: set[str]) -> None:
        settings, window = self.settings, self.settings.window
        if POSITIONS in kinds:
            if not self.task.generates:
                raise KLLensError("--positions needs a language model; this one classifies images")
            window = window or (LONGEST if self.model is None else longest_window(self.model.config))
        text = evaluation.prepare(
            name, self.task, window=window, stride=settings.stride, limit=settings.limit
        )
        self.session.refuse_overlap(self.run, text.windows, self.task)
        with self.session.events.progress(text.label) as progress:
            evaluator = evaluation.Evaluator(self.journal, self.original, progress)
            try:
                self.result.outcome.add(evaluator.judge_text(self.subjects, text, kinds))
            finally:
                evaluator.close()
        if PERPLEXITY in kinds and self.model is not None and self.keep and self.task.generates:
            self.result.written.append(write_published(self.run, self.model.name, text))

    def _judge_task(self, task: TaskData) -> None:
        if not isinstance(self.task, LanguageTask):
            raise KLLensError("--tasks needs a language model; this one classifies images")
        from kl_lens.evaluation.language_model import judge_task  # needs lm-eval

        subjects = [*([] if self.original is None else [self.original]), *self.subjects]
        with self.session.events.progress(task.name) as progress:
            outcome = judge_task(
                self.journal,
                subjects,
                task,
                self.task.require_tokenizer(),
                max_length=self.settings.window or self.task.judged_length,
                limit=self.settings.tasks.task_limit,
                progress=progress,
            )
            self.result.outcome.add(outcome)
