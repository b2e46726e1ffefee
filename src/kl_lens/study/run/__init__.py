"""`run`: all stages in order.

For each target it measures the target's formats, plans the smallest file within a limit on KL, exports it and
compares it with stock recipes. Each stage calls what the command of its name calls; finished stages are not repeated.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kl_lens.base.errors import KLLensError, RunError
from kl_lens.base.files import write_text
from kl_lens.base.units import human_bytes
from kl_lens.measuring.sweep import Sweep, model_identity
from kl_lens.model import LoadedModel
from kl_lens.model.hub import download
from kl_lens.run.folder import CALIBRATION, Run
from kl_lens.run.sharing import SHARED, take_shared
from kl_lens.study import settings as of
from kl_lens.study.events import JobEstimate, going_on
from kl_lens.study.run.background import leaves_time
from kl_lens.study.run.job import UNIFORM_FP16 as UNIFORM_FP16, Job
from kl_lens.study.run.settings import RunResult as RunResult, RunSettings as RunSettings
from kl_lens.study.run.stage import do_stages
from kl_lens.study.run.stages import completed, estimate, stages_of
from kl_lens.study.session import Session
from kl_lens.text.sources import WIKITEXT, label_of


def run(settings: RunSettings, session: Session) -> RunResult | JobEstimate:
    begin = time.perf_counter()
    events = session.events
    # Opened in memory, it stays there for all stages.
    opening = settings.opening
    if settings.needs_memory():
        opening = replace(opening, weights=of.MEMORY)
    model = session.model(settings.model, opening)
    if settings.estimate:
        settings = completed(settings, model, None)
        return estimate(settings, model, opened=time.perf_counter() - begin)
    folder = of.new_run_folder(settings.run, model.name)
    with Run.create(folder) as journal:
        journal.identify(model_identity(model))
        if settings.table:
            settings = _with_table(settings, session, journal, model)
        text = journal.text_identity(CALIBRATION)
        settings = completed(
            settings, model, None if text is None else int(text["windows"])
        )
        # It holds the lock until the end.
        journal.note_command(["kl-lens", *of.command_of(settings)])
        events.keep_in(folder)
        # What repeats this run elsewhere: `kl-lens run --config RUN/run.yaml`.
        write_text(
            folder / "run.yaml",
            of.as_yaml(replace(settings, model=model.source or settings.model)),
        )
        if text is None:
            with suppress(KLLensError):  # it cannot be estimated
                opened = time.perf_counter() - begin
                expected = estimate(settings, model, opened)
                events.expect(expected)
                if expected.disk > (free := shutil.disk_usage(folder).free):
                    size = human_bytes(expected.disk)
                    room = human_bytes(free)
                    events.tell(
                        f"{folder}: about {size} will be written, and only {room} are free"
                    )
        job = Job(settings, session, journal, model)
        stages = stages_of(settings, job.targets, ahead=leaves_time(model))
        try:
            with going_on(folder):
                do_stages(stages, job)
        finally:
            job.background.stop()
        plans = {target: job.compared(target) for target in job.targets}
    return RunResult(
        settings,
        folder,
        plans,
        job.exported,
        job.failed,
        job.without_file,
        time.perf_counter() - begin,
        model.task.generates,
        model.original,
    )


def _with_table(
    settings: RunSettings, session: Session, journal: Run, model: LoadedModel
) -> RunSettings:
    """Takes measurements from a file. Of a text that is here, the tokens are compared."""
    assert settings.table is not None
    path = Path(settings.table)
    if not path.exists():
        path = download(settings.table, weights=False) / SHARED
        if not path.exists():
            raise RunError(f"--table {settings.table}: it has no {SHARED}")
    take_shared(path, journal)
    for target in settings.wanted:
        if not journal.measured_windows(journal.measured_role(target)):
            raise RunError(
                f"--table {settings.table} has no sensitivities for {target}; leave out --table, or that target"
            )
    measured = journal.text_identity(CALIBRATION)
    assert measured is not None
    text = replace(
        settings.calibration,
        windows=measured["windows"],
        window_length=measured["length"],
    )
    label = label_of(measured["source"], measured["split"])
    if measured["source"] == WIKITEXT or label == text.text:
        text = replace(text, text=label, seed=measured["seed"])
        Sweep(model, journal).identify(session.calibration_windows(text, model.task))
    else:
        session.events.tell(
            f"{path} was measured on {label}, which is not here, so its tokens could not be compared with this "
            "tokenizer's"
        )
    return replace(settings, calibration=text)
