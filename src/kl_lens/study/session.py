"""What the commands of a study share: the model is opened once, each text is cut into windows once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.base.errors import RunError, TextError
from kl_lens.base.system import DEFAULT_MEMORY
from kl_lens.study.events import Events, Several
from kl_lens.study.settings import (
    AUTO,
    DISK,
    MEMORY,
    Calibration,
    HeldOut,
    Opening,
    Settings,
)

if TYPE_CHECKING:  # `generate` runs on small devices and loads no torch
    from kl_lens.measuring.joint import PlanMeter
    from kl_lens.model import LoadedModel, Task
    from kl_lens.run.folder import Run
    from kl_lens.text.windows import Windows

# A meter keeps its teacher, which may fill the memory budget. Two are needed: one per half of the held-out text.
KEPT_METERS = 2
ANYWHERE = Opening(weights=None)
QUANTIZED = "weights"  # folder in a run: quantized weights that were expensive to make

_Source = tuple[
    str, Opening
]  # a folder, or a hub id with its commit, and how it is opened


class Session:
    """Commands that are given the same session share what they open.

    Example:
        >>> session = Session()
        >>> session.do(MeasureSettings.of(model="reference:mamba", windows=8)).measurements
        >>> session.do(PlanSettings.of(max_loss=0.01)).plans
    """

    def __init__(
        self, events: Events | None = None, given: LoadedModel | None = None
    ) -> None:
        """`given`: a model opened elsewhere; used for all settings."""
        self.events = events or Events()
        self._given = given
        self._pinned: dict[str, str] = {}  # name → the same, with its commit
        self._models: dict[
            _Source, tuple[LoadedModel, int | None]
        ] = {}  # with the memory it was opened for
        self._in_run: dict[tuple[int, Path, Path], LoadedModel] = {}
        self._drawn: dict[object, Windows] = {}
        self._from_start: dict[object, Windows] = {}  # evaluation texts
        self.memory_budget = DEFAULT_MEMORY  # of the command
        self._notes = {""}  # about texts, said so far
        self._apart: set[tuple[str, str]] = (
            set()
        )  # fingerprints of texts that do not overlap
        self._meters: dict[
            tuple[int, str, str | None], PlanMeter
        ] = {}  # the last used last

    def do(self, settings: Settings) -> Any:
        """Checks the settings, runs the command that they are for, and returns its result; for several targets a
        `Several`. Prints nothing."""
        parts = settings.parts()
        for part in parts.values():
            part.check()
        self.memory_budget = getattr(settings, "opening", ANYWHERE).memory
        home = sys.modules[f"{__package__}.{settings.verb}"]
        verb = getattr(home, settings.verb)
        results = {name: verb(part, self) for name, part in parts.items()}
        return Several(results) if len(results) > 1 else next(iter(results.values()))

    # -- models -----------------------------------------------------------------------------------------------

    def model(self, name: str, opening: Opening = ANYWHERE) -> LoadedModel:
        """The opened model. Weights that may be anywhere: in memory, or on disk if it is open there."""
        if self._given is not None:
            return self._given
        from kl_lens.model import load, own_images, pinned
        from kl_lens.model.tasks import JUDGED
        from kl_lens.run.positions import context_of

        wanted = replace(opening, images=opening.images or own_images(name))
        opening = replace(wanted, weights=None, working_memory=None)
        if name not in self._pinned:
            self._pinned[name] = pinned(name, watch=self.events.progress)
        path = os.path.expanduser(name)
        folder = os.path.realpath(path) if os.path.isdir(path) else self._pinned[name]
        usual = replace(opening, bos=AUTO)
        if (folder, usual) in self._models:  # what is not decided yet, a run decides
            begins = self._models[folder, usual][0].beginning
            if begins.settled is None and opening.bos != AUTO:
                begins.decide(opening.bos)
            opening = usual if begins.settled == opening.bos else opening
        source = (folder, opening)
        if source in self._models:
            model, budget = self._models[source]
            streams = model.residency is not None
            same = wanted.weights is None or wanted.working_memory == budget
            if wanted.weights != (MEMORY if streams else DISK) and (same or not streams):
                return model
        opened = load(self._pinned[name], **replace(wanted, bos=opening.bos).arguments)
        model = replace(opened, warn=self.events.tell)
        if model.original:
            self.tell_once(f"{model.name}: {model.original}")
        if model.not_on_disk:
            self.events.warn(
                f"{model.name} does not fit, but has to be loaded whole: {model.not_on_disk}"
            )
        if model.residency is not None:
            self.events.note(
                f"{model.name}: weights stay on disk and are read one block at a time"
            )
        context = None if model.classifier else context_of(model.config)
        if context is not None and context < JUDGED:
            self.events.note(
                f"{model.name} reads at most {context} tokens at once (max_position_embeddings): windows that are "
                f"longer by default have {context}"
            )
        self._models[source] = model, wanted.working_memory
        return model

    def model_of(
        self,
        run: Run,
        name: str | None = None,
        opening: Opening = ANYWHERE,
    ) -> LoadedModel:
        """The model of a run, from its recorded place or from --model. Raises if its weights differ."""
        from kl_lens.measuring.sweep import model_identity

        identity = run.identity
        source = name or identity.get("source") or identity.get("model")
        if source is None:
            raise RunError(
                f"{run.folder} holds no model; make a run with: kl-lens measure MODEL --run {run.folder}"
            )
        opening = replace(
            opening,
            tokenizer=opening.tokenizer or identity.get("tokenizer"),
            images=opening.images or identity.get("images"),
            template=opening.template or identity.get("template"),
            bos=identity.get("bos", AUTO) if opening.bos == AUTO else opening.bos,
        )
        model = self.model(str(source), opening)
        if identity.get("model_fingerprint") != model.fingerprint:
            run.require_dtype(str(model_identity(model)["dtype"]))
            raise RunError(
                f"{source} is not the model of {run.folder}; name the right one with --model"
            )
        digest = identity.get("template_digest") or model.template_digest
        if digest != model.template_digest:
            raise RunError(
                f"{model.template} is not the template of {run.folder}, which is from {identity['template']}; name the "
                "right one with --template"
            )
        return self.in_run(model, run.folder)

    def in_run(
        self, model: LoadedModel, folder: Path, learn_from: Path | None = None
    ) -> LoadedModel:
        """The model with the weight store of a run. Methods learn from the statistics in `learn_from` (default: the
        same folder; a shard uses its run's)."""
        from kl_lens.measuring.statistics import StoredStatistics

        learnt = learn_from or folder
        key = (id(model.model), folder.resolve(), learnt.resolve())
        if key not in self._in_run:
            self._in_run[key] = model.with_store(
                folder=folder / QUANTIZED,
                statistics=lambda: StoredStatistics.open(learnt, model),
            )
        return self._in_run[key]

    def drop_statistics(self) -> None:
        """Drops statistics opened before `calibrate` wrote new ones."""
        self._in_run.clear()
        self.drop_meters()

    # -- texts ------------------------------------------------------------------------------------------------

    def drawn(
        self, text: str, task: Task, *, windows: int, length: int | None, seed: int
    ) -> Windows:
        """Windows at random places of a text; see `Task.drawn`."""
        extent = {"windows": windows, "length": length or task.window_length}
        return self._cut(self._drawn, task.key, task.drawn, text, **extent, seed=seed)

    def from_start(self, text: str, task: Task, *, length: int, limit: int) -> Windows:
        """Windows from the beginning of a text; see `Task.from_start`."""
        extent = {"length": length, "limit": limit}
        return self._cut(self._from_start, task.key, task.from_start, text, **extent)

    def _cut(
        self,
        known: dict[object, Windows],
        task: object,
        cut: Callable[..., Windows],
        text: str,
        **extent: int,
    ) -> Windows:
        key = (text, task, *extent.values())
        if key not in known:
            known[key] = cut(text, **extent)
            self.say_note(known[key])
        return known[key]

    def say_note(self, windows: Windows) -> None:
        """Says once what the user should know about a text."""
        if windows.note not in self._notes:
            self._notes.add(windows.note)
            self.events.note(windows.note)

    def tell_once(self, text: str) -> None:
        """Says on the screen, once, what several stages find."""
        if text not in self._notes:  # an empty one is said from the beginning
            self._notes.add(text)
            self.events.tell(text)

    @property
    def judging(self) -> list[Windows]:
        """The evaluation texts opened so far."""
        return [*self._from_start.values()]

    def calibration_windows(self, text: Calibration, task: Task) -> Windows:
        """The windows of --text, --windows, …"""
        return self.drawn(
            text.text,
            task,
            windows=text.windows or 0,
            length=text.window_length,
            seed=text.seed,
        )

    def calibration(self, run: Run, task: Task) -> Windows:
        """The calibration windows of a run, drawn again."""
        from kl_lens.run.folder import CALIBRATION

        identity = run.text_identity(CALIBRATION)
        if identity is None:
            raise RunError(
                f"{run.folder} holds no measurements made by KL Lens; run kl-lens measure first"
            )
        return self.drawn_again(identity, task)

    def drawn_again(self, identity: Mapping[str, Any], task: Task) -> Windows:
        """The windows that a record describes."""
        from kl_lens.text.sources import label_of

        drawing = {name: identity[name] for name in ("windows", "length", "seed")}
        try:
            return self.drawn(
                label_of(identity["source"], identity["split"]), task, **drawing
            )
        except TextError as error:
            raise TextError(
                f"{error}; it is the run's text: start in the folder where it was measured"
            ) from error

    def held_out(self, wanted: HeldOut, run: Run, task: Task) -> Windows:
        """The windows of --held-out. Raises if they overlap the run's calibration text."""
        from kl_lens.run.folder import CALIBRATION

        text = run.text_identity(CALIBRATION)
        length = text["length"] if text else task.window_length
        windows = self.from_start(
            wanted.held_out, task, length=length, limit=wanted.held_out_windows
        )
        self.refuse_overlap(run, windows, task)
        return windows

    def refuse_overlap(self, run: Run, windows: Windows, task: Task) -> None:
        """Raises if the run was measured on, calibrated with or tuned on part of this text. Pairs are compared once."""
        from kl_lens.measuring.statistics import StoredStatistics
        from kl_lens.run.folder import CALIBRATION, TUNING
        from kl_lens.text.windows import refuse_overlap

        learnt = StoredStatistics.held_by(run.folder)
        texts = [
            run.text_identity(CALIBRATION),
            None if learnt is None else learnt.identity["text"],
        ]
        for identity in (*texts, *run.load_all(TUNING).values()):
            if identity is None:
                continue
            drawn = self.drawn_again(identity, task)
            if (key := (drawn.fingerprint, windows.fingerprint)) not in self._apart:
                refuse_overlap(drawn, windows)
                self._apart.add(key)

    # -- whole plans ------------------------------------------------------------------------------------------

    def meter(
        self, model: LoadedModel, windows: Windows, target: str | None = None
    ) -> PlanMeter:
        """Measures whole plans on a text; `target`: with activations as its kernels quantize them."""
        from kl_lens.measuring.joint import PlanMeter
        from kl_lens.targets import deployed

        key = (id(model), windows.fingerprint, target)
        meter = self._meters.pop(key, None) or PlanMeter(
            model, windows, self.memory_budget, deployed(target)
        )
        self._meters[key] = meter
        while len(self._meters) > KEPT_METERS:
            self._meters.pop(next(iter(self._meters)))
        return meter

    def drop_meters(self) -> None:
        """Frees the states that meters hold."""
        self._meters.clear()
