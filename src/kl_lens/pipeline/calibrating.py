"""`calibrate`: what text shows of every component's inputs, for methods that learn from it.

It is a step of its own: a verb that meets a recipe whose method learns takes the run's statistics, and where there are
none it stops and names this command.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from kl_lens.calibration import IN_ORDER, StoredStatistics, gather
from kl_lens.calibration.rescaling import Rescaling, changed_weights, rescalings, write_rescaled
from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import RunError
from kl_lens.pipeline.events import Events, going_on
from kl_lens.pipeline.ordering import Ordered, put_in_order
from kl_lens.pipeline.settings import (
    COUNT,
    DEFAULT_RUN,
    SEED,
    TOKENS,
    FromDisk,
    HeldOut,
    Settings,
    command_of,
    grouped,
    new_run_folder,
    option,
)
from kl_lens.pipeline.workbench import Workbench
from kl_lens.recipes import Recipe
from kl_lens.runs import CALIBRATION, EVALUATION, Run
from kl_lens.sensitivity.sweep import model_identity
from kl_lens.text import Windows, refuse_overlap

DEFAULT_TEXT, DEFAULT_WINDOWS, DEFAULT_SEED = "wikitext2:train", 32, 42
RESCALED_FOR = Recipe("int4-g64", "gptq")  # whose error says whether rescaling pays
_text = grouped("text that methods learn from")


@dataclass(frozen=True, kw_only=True)
class LearningText(Settings):
    """The text that statistics are gathered on; what is not given is the run's own."""

    text: str | None = _text(
        None, f"name:split, or a file or folder (default: the run's calibration text, or {DEFAULT_TEXT})"
    )
    windows: int | None = _text(
        None, f"how many windows (default: {DEFAULT_WINDOWS}, or what the text has)", kind=COUNT
    )
    window_length: int | None = _text(
        None, "tokens each (default: the run's, or 512; 16 images)", kind=TOKENS
    )
    seed: int | None = _text(
        None,
        "chooses the windows (default: another than measure's: what was learnt from does not judge)",
        kind=SEED,
    )

    @property
    def is_given(self) -> bool:
        return any(value is not None for value in (self.text, self.windows, self.window_length, self.seed))

    def drawn(self, run: Run, model: LoadedModel, bench: Workbench) -> Windows:
        """The windows that these settings mean in a run."""
        measured = run.text_identity(CALIBRATION) or {}
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
class CalibrateSettings(LearningText, HeldOut, FromDisk):
    verb: ClassVar[str] = "calibrate"

    model: str | None = option(
        None, "a model, when --run is new", positional=True, nargs="?", metavar="MODEL"
    )
    run: str | None = option(None, "the run folder (default: runs/<model>)", metavar="DIR")
    in_order: str | None = option(
        None,
        "then quantize this plan of the run block by block, with the inputs that its quantized part gives, and keep "
        "that as PLAN.in-order if the KL on held-out text falls",
        metavar="PLAN",
    )
    rescaled: str | None = option(
        None,
        "write a checkpoint that computes the same and loses less when it is rounded: columns that are hard to round "
        "made smaller by powers of two, the norms in front of them larger",
        metavar="FOLDER",
    )
    again: bool = option(
        False,
        "gather afresh, and forget what was measured of recipes that learnt from the earlier statistics",
    )

    def check(self) -> None:
        super().check()
        if self.rescaled is not None and os.path.lexists(self.rescaled):
            raise RunError(f"--rescaled {self.rescaled}: it is there already; name a new folder")


@dataclass(frozen=True)
class CalibrateResult:
    folder: Path  # the run's
    model: str  # opens it again
    statistics: StoredStatistics
    ordered: Ordered | None = None
    rescaled: tuple[Rescaling, ...] = ()

    @property
    def text(self) -> dict[str, Any]:
        text: dict[str, Any] = self.statistics.identity["text"]
        return text


def calibrate(settings: CalibrateSettings, bench: Workbench, events: Events) -> CalibrateResult:
    changes = settings.in_order is not None or settings.rescaled is not None  # weights, of the whole model
    loading = replace(settings, weights="memory") if changes else settings
    if settings.model is None:
        with Run.open(Path(settings.run or DEFAULT_RUN)) as run:
            return _calibrated(run, bench.model_of(run, loading), settings, bench, events)
    model = bench.model(loading)
    with Run.create(new_run_folder(settings.run, model.name)) as run:
        return _calibrated(run, model, settings, bench, events)


def _calibrated(
    run: Run, model: LoadedModel, settings: CalibrateSettings, bench: Workbench, events: Events
) -> CalibrateResult:
    run.identify(model_identity(model))
    run.note_command(["kl-lens", *command_of(settings)])
    if settings.again:
        forget(run)
    statistics = _gathered(run, model, settings, bench, events)
    bench.learnt_anew()
    for component, note in statistics.notes.items():
        events.note(f"{component}: {note}")
    ordered = None
    if settings.in_order is not None:
        learnt = bench.in_run(model, run.folder)
        ordered = put_in_order(run, learnt, settings.in_order, statistics, settings, bench, events)
    rescaled = None if settings.rescaled is None else _rescaled(model, statistics, Path(settings.rescaled))
    return CalibrateResult(run.folder, model.source or model.name, statistics, ordered, rescaled or ())


def _rescaled(model: LoadedModel, statistics: StoredStatistics, folder: Path) -> tuple[Rescaling, ...]:
    found = tuple(rescalings(model, statistics, RESCALED_FOR))
    if any(one.exponent for one in found):
        write_rescaled(model, changed_weights(model, found), folder)
    return found


def forget(run: Run) -> None:
    """Takes out a run's statistics and what was measured of recipes that learnt from them."""
    stored = StoredStatistics.held_by(run.folder)
    if stored is not None:
        shutil.rmtree(stored.folder)
    shutil.rmtree(run.folder / IN_ORDER, ignore_errors=True)
    formats = {name for role in run.roles() for _, name in run.measured_windows(role)}
    run.forget_learnt(name for name in formats if Recipe.parse(name).quantizer.learns)


def _gathered(
    run: Run, model: LoadedModel, text: LearningText, bench: Workbench, events: Events
) -> StoredStatistics:
    """The run's statistics. What is missing or damaged is gathered; other text than theirs is refused."""
    stored = StoredStatistics.held_by(run.folder)
    if stored is None or text.is_given:
        windows = text.drawn(run, model, bench)
    else:  # what was begun goes on with its own text
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
    """Text that judges must stay unseen: the run's, and what this command has opened; later commands compare theirs."""
    texts = bench.judging
    if (known := run.text_identity(EVALUATION)) is not None:
        how = {"length": known["length"], "stride": known["stride"], "limit": known["windows"]}
        texts = [*texts, model.task.from_start(known["source"], split=known["split"], **how)]
    for judging in texts:
        refuse_overlap(windows, judging)


def for_streaming(run: Run, fingerprint: str | None) -> StoredStatistics:
    """The statistics of a model that is not opened: they have to be there."""
    try:
        return StoredStatistics.of_fingerprint(run.folder, fingerprint)
    except RunError as error:
        raise RunError(f"--stream does not open the model, so methods cannot learn now: {error}") from error
