"""`calibrate`: gathers statistics of every component's inputs, for methods that learn from text (gptq, imatrix).

Other commands only read these statistics. If a recipe needs them and there are none, they stop and name this command.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kl_lens.measuring.statistics import StoredStatistics, gather
from kl_lens.measuring.sweep import model_identity
from kl_lens.model import LoadedModel
from kl_lens.run.folder import CALIBRATION, EVALUATION, Run
from kl_lens.run.journal import FILE
from kl_lens.study import settings as of
from kl_lens.study.events import going_on
from kl_lens.study.session import Session
from kl_lens.study.settings import Opening, Settings, group, grouped, option, with_options
from kl_lens.text.sources import label_of
from kl_lens.text.windows import Windows, refuse_overlap
from kl_lens.weights.recipes import Recipe

DEFAULT_TEXT = "wikitext2:train"
DEFAULT_WINDOWS = 32
DEFAULT_SEED = 42
_text = grouped("text that methods learn from")


@with_options
class LearningText:
    """The text that statistics are gathered on; defaults come from the run."""

    text: str | None = _text(
        None,
        f"name:split, or a file or folder (default: the run's calibration text, or {DEFAULT_TEXT})",
    )
    windows: of.Count | None = _text(
        None, f"default: {DEFAULT_WINDOWS}, or fewer if the text is short"
    )
    window_length: of.Tokens | None = _text(
        None, "tokens per window (default: the run's, or 512; 16 images)"
    )
    seed: of.Seed | None = _text(
        None,
        "chooses the windows (default: not measure's: no method is measured on what it learned from)",
    )

    def drawn(self, run: Run | None, model: LoadedModel, session: Session) -> Windows:
        measured = (run and run.text_identity(CALIBRATION)) or {}
        source = (
            label_of(measured["source"], measured["split"]) if measured else DEFAULT_TEXT
        )
        length = self.window_length or measured.get("length", model.task.window_length)
        seed = measured.get("seed", DEFAULT_SEED) + 1 if self.seed is None else self.seed
        drawn = partial(
            session.drawn, self.text or source, model.task, length=length, seed=seed
        )
        windows = self.windows or min(
            DEFAULT_WINDOWS, drawn(windows=1).stream_tokens // length
        )
        return drawn(windows=windows)


@with_options
class CalibrateSettings(Settings):
    model: of.Model | None = option(
        None, "the model, if --run is new", positional=True, nargs="?"
    )
    opening: Opening = group(Opening)
    learning: LearningText = group(LearningText)
    run: of.Folder | None = of.of_new_run()
    again: bool = option(
        False, "gather new statistics, and discard measurements that used the old ones"
    )


@dataclass(frozen=True)
class CalibrateResult:
    folder: Path  # of the run
    model: str  # name that opens the model
    statistics: StoredStatistics

    @property
    def text(self) -> Any:
        return self.statistics.identity["text"]


def calibrate(settings: CalibrateSettings, session: Session) -> CalibrateResult:
    with ExitStack() as stack:
        if settings.model is None:
            run = stack.enter_context(Run.open(Path(settings.run or of.DEFAULT_RUN)))
            model = session.model_of(run, None, settings.opening)
        else:
            model = session.model(settings.model, settings.opening)
            folder = of.new_run_folder(settings.run, model.name)
            if not (folder / FILE).exists():
                settings.learning.drawn(
                    None, model, session
                )  # unusable text leaves no run behind
            run = stack.enter_context(Run.create(folder))
        run.identify(model_identity(model))
        run.note_command(["kl-lens", *of.command_of(settings)])
        if settings.again:
            settings.learning.drawn(run, model, session)  # unusable text deletes nothing
            if (stored := StoredStatistics.held_by(run.folder)) is not None:
                shutil.rmtree(stored.folder)
            formats = {
                name for role in run.roles() for _, name in run.measured_windows(role)
            }
            run.forget_learnt(
                name for name in formats if Recipe.parse(name).quantizer.learns
            )
        return gather_statistics(run, model, settings.learning, session)


def gather_statistics(
    run: Run, model: LoadedModel, text: LearningText, session: Session
) -> CalibrateResult:
    """The run's statistics; gathers what is missing or damaged. Raises if they come from another text."""
    stored = StoredStatistics.held_by(run.folder)
    if stored is None or text != LearningText():
        windows = text.drawn(run, model, session)
    else:  # continue with the text it was started with
        windows = session.drawn_again(stored.identity["text"], model.task)
    if stored is not None and stored.covers(model):
        statistics = gather(model, windows, run.folder)
    else:
        _refuse_judging_text(run, windows, model, session)
        session.events.note(
            f"gathering statistics on {windows.label}, {len(windows)} windows of {windows.length} {model.task.unit}, "
            f"into {run.folder / 'statistics'}"
        )
        with going_on(run.folder), session.events.progress("calibrating") as shown:
            shown.started(len(model.chain), 0)
            statistics = gather(
                model,
                windows,
                run.folder,
                progress=lambda blocks, _: shown.advanced(1, f"block {blocks - 1}"),
            )
    session.drop_statistics()
    for component, note in statistics.notes.items():
        session.events.note(f"{component}: {note}")
    return CalibrateResult(run.folder, model.source or model.name, statistics)


def _refuse_judging_text(
    run: Run, windows: Windows, model: LoadedModel, session: Session
) -> None:
    """Raises if methods would learn from evaluation text. Later commands check their own texts."""
    texts = session.judging
    if (identity := run.text_identity(EVALUATION)) is not None:
        drawing = {
            "length": identity["length"],
            "stride": identity["stride"],
            "limit": identity["windows"],
        }
        texts = [
            *texts,
            model.task.from_start(
                label_of(identity["source"], identity["split"]), **drawing
            ),
        ]
    for judging in texts:
        refuse_overlap(windows, judging)
