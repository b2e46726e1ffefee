"""Does stages in their order, unless they were done before with the same settings and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kl_lens.base.errors import KLLensError
from kl_lens.study.events import exit_code
from kl_lens.study.run.job import Job
from kl_lens.study.run.stage import Stage

ERRORS = (KLLensError, RuntimeError, OSError)  # runtimes raise their own


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
