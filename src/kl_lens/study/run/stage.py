"""A stage of a run: a small object that says what it needs, makes and costs, and does it; and how stages are done in
their order, unless they were done before with the same settings and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kl_lens.base.errors import KLLensError
from kl_lens.study.events import exit_code
from kl_lens.study.run.costs import Cost, Costs
from kl_lens.study.run.job import Job

ERRORS = (KLLensError, RuntimeError, OSError)  # runtimes raise their own


@dataclass(frozen=True)
class Basis:
    """What a stage rests on. It is recorded under `key`; while all of it is the same, the stage is not repeated."""

    key: str
    given: object = ()  # settings
    inputs: str = ""  # a digest of what it needs
    outputs: Sequence[str] = ()  # patterns of the files that it makes
    lost: bool = False  # what it made is not there


@dataclass(frozen=True)
class Stage:
    """Does what the command `verb` does, for one target or for all."""

    verb: ClassVar[str]
    optional: ClassVar[bool] = False  # if it fails, the run goes on
    target: str | None = None

    def applies(self, job: Job) -> bool:
        """Asked when its turn comes."""
        return self.target is None or self.target in job.targets

    def obstacle(self, job: Job) -> str | None:
        """Why it cannot be done for this model."""
        return None

    def basis(self, job: Job) -> Basis | None:
        """None: nothing of it is recorded, so it is always done; it finds by itself what is missing."""
        return None

    def begin(self, job: Job, passed: Stage | None) -> None:
        """Begins in the background what of it needs no more than what there is: at the start (None), or after a stage
        before it passed."""

    def prepare(self, job: Job) -> None:
        """When its turn comes, whether it is repeated or not."""

    def work(self, job: Job) -> object:
        raise NotImplementedError

    def finish(self, job: Job) -> None:
        """After its turn, whether it was repeated or not."""

    def is_survived(self, job: Job, error: Exception) -> bool:
        """Whether the run goes on after this error; then it was reported."""
        return False

    def cost(self, costs: Costs) -> Cost | None:
        """None: it is not forecast."""
        return None


@dataclass(frozen=True)
class OfTarget(Stage):
    target: str


def do_stages(stages: Sequence[Stage], job: Job) -> None:
    for stage in stages:
        stage.begin(job, None)
    for number, stage in enumerate(stages, 1):
        if stage.applies(job):
            if (why := stage.obstacle(job)) is not None:
                job.events.note(why)
            elif _succeeds(stage, job):
                stage.finish(job)
        for later in stages[number:]:
            later.begin(job, stage)


def _succeeds(stage: Stage, job: Job) -> bool:
    try:
        stage.prepare(job)
        _do(stage, job)
    except ERRORS as error:
        if not stage.is_survived(job, error):
            raise
        return False
    return True


def _do(stage: Stage, job: Job) -> None:
    basis = stage.basis(job)
    record: dict[str, str] = {}
    if basis is not None:
        record = {"given": str(basis.given), "inputs": basis.inputs}
        if not (basis.lost or job.settings.again):
            finished = record | {"outputs": job.files_digest(basis.outputs)}
            if job.journal.load("stage", basis.key) == finished:
                job.events.skipped(stage.verb, stage.target)
                return
    with job.events.stage(stage.verb, stage.target):
        try:
            result = stage.work(job)
        except ERRORS as error:
            if not stage.optional:
                raise
            job.events.tell(str(error))
            job.failed.append(stage.verb)
            return
        job.events.result(result)
        if exit_code(result):
            job.failed.append(stage.verb)
            _note_failures(job, getattr(result, "failures", {}))
        elif basis is not None:
            record["outputs"] = job.files_digest(basis.outputs)
            job.journal.store("stage", basis.key, record)


def _note_failures(job: Job, failures: Mapping[str, str]) -> None:
    """Of recommended files that failed in their runtime."""
    for subject, reason in failures.items():
        target, _, plan = subject.partition("/")
        settings = job.settings
        if target in settings.wanted and plan == settings.recommended(target):
            job.without_file[target] = reason
