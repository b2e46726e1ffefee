"""`evaluate`: perplexity, KL divergence and task accuracy of plans in PyTorch and of exported files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kl_lens import evaluation
from kl_lens.base.errors import KLLensError
from kl_lens.evaluation.agreement import DISAGREES
from kl_lens.evaluation.evaluator import DIVERGENCE, PERPLEXITY, POSITIONS
from kl_lens.evaluation.tasks import FAIL, TaskData, chosen_tasks, judge, judge_task, require_lm_eval
from kl_lens.model import LanguageTask, LoadedModel, Task
from kl_lens.paper import write_published
from kl_lens.run.folder import ALL_PLANS, Run
from kl_lens.run.positions import LONGEST, longest_window
from kl_lens.study.events import Events, going_on
from kl_lens.study.settings import (
    COUNT,
    DTYPES,
    LAYERS,
    LOAD_HELP,
    LOADS,
    NAMES,
    SHARE,
    THREADS,
    TOKENS,
    Loading,
    OfRun,
    WithLlamaCpp,
    chosen_targets,
    command_of,
    grouped,
    loading,
    number,
    option,
)
from kl_lens.study.workbench import Workbench

DEFAULT_TEXT = "wikitext2:test"
TORCH = "torch"
_what = grouped("what to measure (default: --perplexity --divergence)")
_tasks, _running = grouped("tasks (lm-eval)"), grouped("running")


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings(WithLlamaCpp, Loading, OfRun):
    verb: ClassVar[str] = "evaluate"

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
    tasks: tuple[str, ...] | None = _tasks(
        None, "for example arc_easy,hellaswag,lambada_openai,piqa", kind=NAMES
    )
    task_data: Path | None = _tasks(None, "local NAME_test.jsonl files, instead of the hub", metavar="DIR")
    task_limit: int | None = _tasks(None, "only the first N examples", kind=COUNT)
    few_shot: int | None = _tasks(None, "few-shot examples (default: the task's own)", kind=number(1000))
    max_drop: float | None = _tasks(
        None, "largest accepted loss of accuracy, such as 3% (points)", kind=SHARE
    )
    exact: bool = _running(False, "compute in float32 instead of the fastest way")
    runtime_device: str = _running("CPU", "device of OpenVINO or MLX", flag="--device", metavar="DEVICE")
    threads: int | None = _running(None, "default: the runtime's own choice", kind=THREADS)
    gpu_layers: int = _running(0, "llama.cpp: layers on a GPU, or all", kind=LAYERS)
    load: str = _running("auto", LOAD_HELP, choices=LOADS)
    again: bool = _running(False, "repeat what the run has already measured")
    tag: str | None = _running(None, "names perplexity_results_TAG.json (default: the text's name)")
    dtype: str = loading("float32", "data type in PyTorch", choices=DTYPES)
    device: str = loading(
        "auto", "device of PyTorch; auto: the GPU if there is one", flag="--torch-device", metavar="DEVICE"
    )

    def check(self) -> None:
        super().check()
        chosen_targets(self.targets, TORCH)
        check_tasks(self.tasks, task_data=self.task_data, task_limit=self.task_limit, few_shot=self.few_shot)
        if self.max_drop is not None and self.tasks is None:
            raise KLLensError("--max-drop limits the accuracy that tasks lose; name tasks with --tasks")
        if self.window is not None and (self.stride or 0) > self.window:
            raise KLLensError(
                f"--stride {self.stride} is larger than --window {self.window}: text between windows would be skipped"
            )

        if self.positions is not None and self.stride is not None:
            raise KLLensError("--positions scores every token of a window: leave out --stride")

    @property
    def is_kept(self) -> bool:
        """Files given without --run are scored without a run folder."""
        return self.run is not None or not self.artifact


def check_tasks(tasks: tuple[str, ...] | None, **about_them: object) -> None:
    """Raises if lm-eval is missing, or if task settings are given without tasks."""
    if tasks is None:
        for name, value in about_them.items():
            if value is not None:
                raise KLLensError(f"--{name.replace('_', '-')} needs tasks; name them with --tasks")
        return
    if not tasks:
        raise KLLensError("--tasks names no task; give for example arc_easy,piqa")
    require_lm_eval()


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


def evaluate(settings: EvaluateSettings, bench: Workbench, events: Events) -> EvaluateResult:
    with _run(settings) as run:
        return _Evaluation(settings, run, bench, events).judged()


@contextmanager
def _run(settings: EvaluateSettings) -> Iterator[Run]:
    if settings.is_kept:
        with Run.open(settings.run_folder) as run:
            run.note_command(["kl-lens", *command_of(settings)])
            yield run
    else:
        with tempfile.TemporaryDirectory() as folder, Run.create(Path(folder)) as run:
            yield run


class _Evaluation:
    def __init__(self, settings: EvaluateSettings, run: Run, bench: Workbench, events: Events) -> None:
        self.settings, self.run, self.bench, self.events = settings, run, bench, events
        self.result = EvaluateResult(max_drop=settings.max_drop)
        self.model = self._model()
        self.selection = self._selection()
        self.result.notes += self.selection.notes
        self.result.failures.update(self.selection.failures)
        if not self.selection.subjects and self.model is None:
            raise KLLensError(next(iter(self.result.failures.values()), "there is nothing to evaluate"))
        self.task = self._task()
        self.journal = evaluation.ScoreJournal(run, again=settings.again)
        self.original = None if self.model is None else evaluation.JudgedModel(self.model)

    def judged(self) -> EvaluateResult:
        with going_on(self.run.folder if self.settings.is_kept else None):
            for name, kinds in self._texts().items():
                self._judge_text(name, kinds)
            if self.settings.positions is not None:
                self._judge_text(self.settings.positions, {POSITIONS})
            for task in chosen_tasks(self.settings.task_data, self.settings.tasks or ()):
                self._judge_task(task)
        return self.result

    def _model(self) -> LoadedModel | None:
        settings = self.settings
        if settings.threads is not None:
            import torch

            torch.set_num_threads(settings.threads)
        if settings.is_kept:
            return self.bench.model_of(self.run, settings)
        return None if settings.model is None else self.bench.model(settings)

    def _selection(self) -> evaluation.Selection:
        settings = self.settings
        runtime = evaluation.SessionSettings(
            settings.runtime_device.upper(),
            settings.threads,
            settings.gpu_layers,
            settings.exact,
            settings.load,
        )
        if settings.artifact:
            kept = self.run if settings.is_kept else None
            return evaluation.given_subjects(settings.artifact, runtime, self.model, kept)
        assert self.model is not None
        return evaluation.run_subjects(
            self.run, self.model, runtime, plans=settings.plan, targets=settings.targets
        )

    def _task(self) -> Task:
        if self.model is not None:
            return self.model.task
        failures: list[KLLensError] = []
        for file in self.selection.subjects:  # a broken file must not stop the others
            assert isinstance(file, evaluation.JudgedArtifact)
            try:
                return evaluation.artifact_task(file, self.settings.tokenizer, self.settings.images)
            except KLLensError as error:
                failures.append(error)
        raise failures[0]

    def _texts(self) -> dict[str, set[str]]:
        """Text → what is measured on it."""
        perplexity, divergence = self.settings.perplexity, self.settings.divergence
        others = (self.settings.tasks, self.settings.positions)
        if all(given is None for given in (perplexity, divergence, *others)):
            perplexity, divergence = DEFAULT_TEXT, "" if self.original is not None else None
        wanted: dict[str, set[str]] = {}
        if perplexity is not None:
            wanted.setdefault(perplexity, set()).add(PERPLEXITY)
        if divergence is not None:
            wanted.setdefault(divergence or perplexity or DEFAULT_TEXT, set()).add(DIVERGENCE)
        return wanted

    def _judge_text(self, name: str, kinds: set[str]) -> None:
        settings, window = self.settings, self.settings.window
        if POSITIONS in kinds:
            if not self.task.generates:
                raise KLLensError("--positions needs a language model; this one classifies images")
            window = window or (LONGEST if self.model is None else longest_window(self.model.config))
        text = evaluation.prepare(
            name, self.task, window=window, stride=settings.stride, limit=settings.limit
        )
        self.bench.refuse_overlap(self.run, text.windows, self.task)
        with self.events.progress(text.label) as progress:
            evaluator = evaluation.Evaluator(self.journal, self.original, progress)
            try:
                self.result.outcome.add(evaluator.judge_text(self.selection.subjects, text, kinds))
            finally:
                evaluator.close()
        if PERPLEXITY in kinds and self.model is not None and settings.is_kept and self.task.generates:
            self.result.written.append(write_published(self.run, self.model.name, text, settings.tag))

    def _task_tokenizer(self) -> Any:
        if not isinstance(self.task, LanguageTask):
            raise KLLensError("--tasks needs a language model; this one classifies images")
        return self.task.require_tokenizer()

    def _judge_task(self, task: TaskData) -> None:
        settings = self.settings
        subjects = [*([] if self.original is None else [self.original]), *self.selection.subjects]
        with self.events.progress(task.name) as progress:
            outcome = judge_task(
                self.journal,
                subjects,
                task,
                self._task_tokenizer(),
                max_length=settings.window or self.task.judged_length,
                limit=settings.task_limit,
                few_shot=settings.few_shot,
                progress=progress,
            )
            self.result.outcome.add(outcome)
