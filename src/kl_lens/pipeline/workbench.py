"""What verbs share: models opened once, texts cut into windows once, one teacher for a text."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from kl_lens.checkpoints import LoadedModel, load
from kl_lens.errors import RunError
from kl_lens.pipeline.settings import HeldOut, Loading
from kl_lens.runs import CALIBRATION, Run
from kl_lens.sensitivity.joint import PlanMeter
from kl_lens.targets import deployed
from kl_lens.text import Windows, draw_windows, evaluation_windows, refuse_overlap

# A meter keeps its teacher, which may fill the memory budget: one half of a held-out text decides, one confirms.
KEPT_METERS = 2


class Workbench:
    """Verbs that are given the same one share what they open; a verb alone makes its own.

    Example:
        >>> bench = Workbench()
        >>> perform(MeasureSettings(windows=8), bench)
        >>> perform(RankSettings(evaluation_windows=8), bench)
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        self._meters: OrderedDict[Hashable, PlanMeter] = OrderedDict()

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def model(self, loading: Loading) -> LoadedModel:
        """The model that these settings name."""
        name = loading.model
        assert name is not None
        place = os.path.expanduser(name)
        key = (os.path.realpath(place) if os.path.isdir(place) else name, *loading.how.values())
        return self._once(("model", key), lambda: load(name, **loading.how))

    def model_of(self, run: Run, loading: Loading) -> LoadedModel:
        """The model a run was made with, from where it was, or from --model; refused when its weights differ."""
        known = run.identity
        place = loading.model or known.get("source") or known.get("model")
        tokenizer = loading.tokenizer or known.get("tokenizer")
        model = self.model(replace(loading, model=place, tokenizer=tokenizer))
        if known.get("model_fingerprint") != model.fingerprint:
            raise RunError(f"{place} is not the model of {run.folder}: its weights differ")
        return model

    def drawn(self, text: str, model: LoadedModel, **how: Any) -> Windows:
        """Windows at random places of a text, as `draw_windows` takes them."""
        tokenizer = model.require_tokenizer()
        key = ("drawn", text, id(tokenizer), *sorted(how.items()))
        return self._once(key, lambda: draw_windows(text, tokenizer, **how))

    def in_order(self, text: str, tokenizer: Any, **how: Any) -> Windows:
        """Windows from the beginning of a text on, as `evaluation_windows` takes them."""
        key = ("in order", text, id(tokenizer), *sorted(how.items()))
        return self._once(key, lambda: evaluation_windows(text, tokenizer, **how))

    def calibration(self, run: Run, tokenizer: Any) -> Windows:
        """The calibration windows of a run, drawn again."""
        identity = run.text_identity(CALIBRATION)
        if identity is None:
            raise RunError(f"{run.folder} holds no measurements of our own; run kl-lens measure first")
        how = {name: identity[name] for name in ("windows", "length", "seed", "split")}
        key = ("drawn", identity["source"], id(tokenizer), *sorted(how.items()))
        return self._once(key, lambda: draw_windows(identity["source"], tokenizer, **how))

    def held_out(self, settings: HeldOut, run: Run, tokenizer: Any) -> Windows:
        """The windows of --held-out, of the run's window length; refused where they overlap its calibration text."""
        text = run.text_identity(CALIBRATION)
        length = text["length"] if text else 512
        windows = self.in_order(settings.held_out, tokenizer, length=length, limit=settings.held_out_windows)
        self.refuse_overlap(run, windows, tokenizer)
        return windows

    def refuse_overlap(self, run: Run, windows: Windows, tokenizer: Any) -> None:
        """Raises when a run was calibrated on some of this text; each pair of texts is compared once."""
        if run.text_identity(CALIBRATION) is not None:
            drawn = self.calibration(run, tokenizer)
            key = ("apart", drawn.fingerprint, windows.fingerprint)
            self._once(key, lambda: refuse_overlap(drawn, windows))

    def meter(self, model: LoadedModel, windows: Windows, target: str | None = None) -> PlanMeter:
        """What measures whole plans on a text; `target`: with the activations that its kernels see."""
        key = (id(model), windows.fingerprint, target)
        if key not in self._meters:
            self._meters[key] = PlanMeter(model, windows, deployed=deployed(target) if target else None)
            while len(self._meters) > KEPT_METERS:
                self._meters.popitem(last=False)
        self._meters.move_to_end(key)
        return self._meters[key]
