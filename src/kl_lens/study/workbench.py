"""What the commands of a study share: the model is opened once, each text is cut into windows once."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kl_lens.base.errors import RunError
from kl_lens.measuring.engines import DEFAULT_MEMORY
from kl_lens.measuring.joint import PlanMeter
from kl_lens.measuring.statistics import RunStatistics, StoredStatistics
from kl_lens.measuring.sweep import model_identity
from kl_lens.model import LoadedModel, Task, load, own_images, pinned
from kl_lens.model.residency import AUTO, MEMORY
from kl_lens.run.folder import CALIBRATION, TUNING, Run
from kl_lens.study.events import Events
from kl_lens.study.settings import HeldOut, Loading
from kl_lens.targets import deployed
from kl_lens.text import Windows, refuse_overlap

# A meter keeps its teacher, which may fill the memory budget. Two are needed: one per half of the held-out text.
KEPT_METERS = 2
WEIGHTS = "weights"  # folder in a run: quantized weights that were expensive to make


class Workbench:
    """Commands that are given the same workbench share what they open.

    Example:
        >>> bench = Workbench()
        >>> perform(MeasureSettings(windows=8), bench)
        >>> perform(PlanSettings(max_bytes=4_500_000), bench)
    """

    def __init__(self, events: Events | None = None) -> None:
        self.events = events or Events()
        self.given: LoadedModel | None = None  # a model opened elsewhere; used for all settings
        self._kept: dict[tuple[Hashable, ...], Any] = {}
        self._meters: OrderedDict[Hashable, PlanMeter] = OrderedDict()

    def _once(self, key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def model(self, loading: Loading) -> LoadedModel:
        if self.given is not None:
            return self.given
        name = loading.model
        assert name is not None
        loading = replace(loading, images=loading.images or own_images(name))
        place = os.path.expanduser(name)
        asked = (name, loading.revision)
        source = self._once(("source", *asked), lambda: pinned(*asked, watch=self.events.progress))
        loading = replace(loading, revision=None)
        key = ("model", os.path.realpath(place) if os.path.isdir(place) else source, *loading.how.values())
        wanted = getattr(loading, "weights", None)
        as_opened = wanted != MEMORY and not hasattr(loading, "memory_budget")
        if as_opened and key not in self._kept and ("on disk", *key) in self._kept:
            return self._kept[("on disk", *key)]
        where = wanted or MEMORY
        if where == MEMORY or (where == AUTO and key in self._kept):
            return self._once(key, lambda: self._load(source, **loading.how))
        budget = getattr(loading, "memory_budget", DEFAULT_MEMORY)
        known = (*key, where, budget)
        if known not in self._kept:
            room = None if budget == DEFAULT_MEMORY else budget
            model = self._load(source, **loading.how, weights=where, memory_budget=room)
            if model.not_on_disk:
                self.events.warn(
                    f"{model.name} is larger than the memory budget, but has to be loaded whole: {model.not_on_disk}"
                )
            if model.residency is None:  # share it with commands that want it in memory
                return self._once(key, lambda: model)
            self.events.note(f"{model.name}: weights stay on disk and are read one block at a time")
            self._kept[known] = self._kept[("on disk", *key)] = model
        return self._kept[known]

    def _load(self, source: str, **how: Any) -> LoadedModel:
        model = load(source, **how)
        model.warn = self.events.fail
        return model

    def model_of(self, run: Run, loading: Loading) -> LoadedModel:
        """The model of a run, from its recorded place or from --model. Raises if its weights differ."""
        known = run.identity
        place = loading.model or known.get("source") or known.get("model")
        names = ("tokenizer", "task", "images")
        how: dict[str, Any] = {name: getattr(loading, name) or known.get(name) for name in names}
        if loading.model is None and "@" in str(place):  # its commit is part of the record
            how["revision"] = None
        model = self.model(replace(loading, model=place, **how))
        if known.get("model_fingerprint") != model.fingerprint:
            run.require_dtype(str(model_identity(model)["dtype"]))
            raise RunError(
                f"{place} is not the model of {run.folder}: its weights differ; name the right one with --model"
            )
        return self.in_run(model, run.folder)

    def in_run(self, model: LoadedModel, folder: Path, learn_from: Path | None = None) -> LoadedModel:
        """The model with the weight store of a run. Methods learn from the statistics in `learn_from` (default: the
        same folder; a shard uses its run's)."""
        learnt = learn_from or folder
        return self._once(
            ("in run", id(model), folder.resolve(), learnt.resolve()),
            lambda: model.with_store(folder=folder / WEIGHTS, statistics=RunStatistics(learnt, model)),
        )

    def drop_statistics(self) -> None:
        """Drops statistics opened before `calibrate` wrote new ones."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] != "in run"}
        self.drop_meters()

    def drop_meters(self) -> None:
        """Frees the states that meters hold."""
        self._meters.clear()

    def drawn(self, text: str, task: Task, **how: Any) -> Windows:
        """Windows at random places of a text; see `Task.drawn`."""
        how["length"] = how.get("length") or task.window_length
        key = ("drawn", text, task.key, *sorted(how.items()))
        return self._once(key, lambda: task.drawn(text, **how))

    def from_start(self, text: str, task: Task, **how: Any) -> Windows:
        """Windows from the beginning of a text; see `Task.from_start`."""
        key = ("from start", text, task.key, *sorted(how.items()))
        return self._once(key, lambda: task.from_start(text, **how))

    @property
    def judging(self) -> list[Windows]:
        """The evaluation texts opened so far."""
        return [windows for key, windows in self._kept.items() if key[0] == "from start"]

    def calibration(self, run: Run, task: Task) -> Windows:
        """The calibration windows of a run, drawn again."""
        identity = run.text_identity(CALIBRATION)
        if identity is None:
            raise RunError(f"{run.folder} holds no measurements made by KL Lens; run kl-lens measure first")
        return self.drawn_again(identity, task)

    def drawn_again(self, identity: Mapping[str, Any], task: Task) -> Windows:
        """The windows that a record describes."""
        how = {name: identity[name] for name in ("windows", "length", "seed", "split")}
        return self.drawn(identity["source"], task, **how)

    def held_out(self, settings: HeldOut, run: Run, task: Task) -> Windows:
        """The windows of --held-out. Raises if they overlap the run's calibration text."""
        text = run.text_identity(CALIBRATION)
        length = text["length"] if text else task.window_length
        windows = self.from_start(settings.held_out, task, length=length, limit=settings.held_out_windows)
        self.refuse_overlap(run, windows, task)
        return windows

    def refuse_overlap(self, run: Run, windows: Windows, task: Task) -> None:
        """Raises if the run was measured on, calibrated with or tuned on part of this text. Pairs are compared once."""
        learnt = StoredStatistics.held_by(run.folder)
        texts = [run.text_identity(CALIBRATION), None if learnt is None else learnt.identity["text"]]
        for identity in (*texts, *run.load_all(TUNING).values()):
            if identity is not None:
                self._compare(self.drawn_again(identity, task), windows)

    def _compare(self, drawn: Windows, windows: Windows) -> None:
        key = ("apart", drawn.fingerprint, windows.fingerprint)
        self._once(key, lambda: refuse_overlap(drawn, windows))

    def meter(self, model: LoadedModel, windows: Windows, target: str | None = None) -> PlanMeter:
        """Measures whole plans on a text; `target`: with activations as its kernels quantize them."""
        key = (id(model), windows.fingerprint, target)
        if key not in self._meters:
            self._meters[key] = PlanMeter(model, windows, deployed=deployed(target))
            while len(self._meters) > KEPT_METERS:
                self._meters.popitem(last=False)
        self._meters.move_to_end(key)
        return self._meters[key]
