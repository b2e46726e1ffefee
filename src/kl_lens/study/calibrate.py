"""`calibrate`: gathers statistics of every component's inputs, for methods that learn from text (gptq, imatrix).

Other commands only read these statistics. If a recipe needs them and there are none, they stop and name this command.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kl_lens.base.errors import RunError
from kl_lens.measuring.statistics import StoredStatistics, gather
from kl_lens.measuring.sweep import model_identity
from kl_lens.model import LoadedModel
from kl_lens.run.folder import CALIBRATION, EVALUATION, Run
from kl_lens.run.journal import FILE
from kl_lens.study.events import Events, going_on
from kl_lens.study.settings import (
    COUNT,
    DEFAULT_RUN,
    SEED,
    TOKENS,
    FromDisk,
    Settings,
    command_of,
    grouped,
    new_run_folder,
    option,
)
from kl_lens.study.workbench import Workbench
from kl_lens.text import Windows, refuse_overlap
from kl_lens.weights.recipes import Recipe

DEFAULT_TEXT, DEFAULT_WINDOWS, DEFAULT_SEED = "wikitext2:train", 32, 42
_text = grouped("text that methods learn from")


@dataclass(frozen=True, kw_only=True)
class LearningText(Settings):
    """The text that statistics are gathered on; defaults come from the run."""

    text: str | None = _text(
        None, f"name:split, or a file or folder (default: the run's calibration text, or {DEFAULT_TEXT})"
    )
    windows: int | None = _text(
        None, f"number of windows (default: {DEFAULT_WINDOWS}, or fewer if the text is short)", kind=COUNT
    )
    window_length: int | None = _text(
        None, "tokens per window (default: the run's, or 512; 16 images)", kind=TOKENS
    )
    seed: int | None = _text(
        None,
        "chooses the windows (default: not measure's, so that no method is measured on the text it learned from)",
        kind=SEED,
    )

    @property
    def is_given(self) -> bool:
        return any(value is not None for value in (self.text, self.windows, self.window_length, self.seed))

    def drawn(self, run: Run | None, model: LoadedModel, bench: Workbench) -> Windows:
        measured = (run and run.text_identity(CALIBRATION)) or {}
        text, split = self.text or DEFAULT_TEXT, None
        if self.text is None and measured:
            text, split = measured["source"], measured["split"]
        how: dict[str, Any] = {
            "length": self.window_length or measured.get("length", model.task.window_length),
            "seed": measured.get("seed", DEFAULT_SEED) + 1 if self.seed is None else self.seed,
            "split": split,
        }
        windows = self.windows
        if windows is None:
            available = bench.drawn(text, model.task, windows=1, **how).stream_tokens // how["length"]
            windows = min(DEFAULT_WINDOWS, available)
        return bench.drawn(text, model.task, windows=windows, **how)


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings(LearningText, FromDisk):
    verb: ClassVar[str] = "calibrate"

    model: str | None = option(
        None, "the model, if --run is new", positional=True, nargs="?", metavar="MODEL"
    )
    run: str | None = option(None, "the run folder (default: runs/<model>)", metavar="DIR")
    again: bool = option(
        False,
        "gather new statistics, and discard measurements that used the old ones",
    )


@dataclass(frozen=True)
class CalibrateResult:
    folder: Path  # of the run
    model: str  # name that opens the model
    statistics: StoredStatistics

    @property
    def text(self) -> dict[str, Any]:
        text: dict[str, Any] = self.statistics.identity["text"]
        return text


def calibrate(settings: CalibrateSettings, bench: Workbench, events: Events) -> CalibrateResult:
    if settings.model is None:
        with Run.open(Path(settings.run or DEFAULT_RUN)) as run:
            return _calibrated(run, bench.model_of(run, settings), settings, bench, events)
    model = bench.model(settings)
    folder = new_run_folder(settings.run, model.name)
    if not (folder / FILE).exists():
        settings.drawn(None, model, bench)  # a text that cannot be used leaves no run behind
    with Run.create(folder) as run:
        return _calibrated(run, model, settings, bench, events)


def _calibrated(
    run: Run, model: LoadedModel, settings: CalibrateSettings, bench: Workbench, events: Events
) -> CalibrateResult:
    run.identify(model_identity(model))
    run.note_command(["kl-lens", *command_of(settings)])
    if settings.again:
        settings.drawn(run, model, bench)  # a text that cannot be used deletes nothing
        forget(run)
    statistics = _gathered(run, model, settings, bench, events)
    bench.drop_statistics()
    for component, note in statistics.notes.items():
        events.note(f"{component}: {note}")
    return CalibrateResult(run.folder, model.source or model.name, statistics)


def forget(run: Run) -> None:
    """Deletes a run's statistics and the measurements of recipes that used them."""
    stored = StoredStatistics.held_by(run.folder)
    if stored is not None:
        shutil.rmtree(stored.folder)
    formats = {name for role in run.roles() for _, name in run.measured_windows(role)}
    run.forget_learnt(name for name in formats if Recipe.parse(name).quantizer.learns)


def _gathered(
    run: Run, model: LoadedModel, text: LearningText, bench: Workbench, events: Events
) -> StoredStatistics:
    """The run's statistics; gathers what is missing or damaged. Raises if they come from another text."""
    stored = StoredStatistics.held_by(run.folder)
    if stored is None or text.is_given:
        windows = text.drawn(run, model, bench)
    else:  # continue with the text it was started with
        windows = bench.drawn_again(stored.identity["text"], model.task)
    if stored is not None and stored.covers(model):
        return gather(model, windows, run.folder)
    _refuse_judging_text(run, windows, model, bench)
    events.note(
        f"gathering statistics on {windows.label}, {len(windows)} windows of {windows.length} {model.task.unit}, "
        f"into {run.folder / 'statistics'}"
    )
    with going_on(run.folder), events.progress("calibrating") as shown:
        shown.started(len(model.chain), 0)
        return gather(
            model, windows, run.folder, progress=lambda done, blocks: shown.advanced(1, f"block {done - 1}")
        )


def _refuse_judging_text(run: Run, windows: Windows, model: LoadedModel, bench: Workbench) -> None:
    """Raises if methods would learn from evaluation text. Later commands check their own texts."""
    texts = bench.judging
    if (known := run.text_identity(EVALUATION)) is not None:
        how = {"length": known["length"], "stride": known["stride"], "limit": known["windows"]}
        texts = [*texts, model.task.from_start(known["source"], split=known["split"], **how)]
    for judging in texts:
        refuse_overlap(windows, judging)


def for_streaming(run: Run, fingerprint: str | None) -> StoredStatistics:
    """The statistics for an export that does not open the model."""
    try:
        return StoredStatistics.of_fingerprint(run.folder, fingerprint)
    except RunError as error:
        raise RunError(
            f"--stream does not open the model, so it cannot gather statistics: {error}"
        ) from error
