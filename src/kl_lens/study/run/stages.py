"""The stages of a run, in their order: what is done, resumed, forecast and shown is this list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kl_lens.base.errors import KLLensError
from kl_lens.base.system import available_memory
from kl_lens.measuring.perturbation import find_candidates
from kl_lens.measuring.sweep import windows_by_cost
from kl_lens.model import LoadedModel
from kl_lens.model.carried import Carried
from kl_lens.study.events import JobEstimate, StageCost
from kl_lens.study.run.background import is_large, leaves_time
from kl_lens.study.run.costs import Costs, Sketch
from kl_lens.study.run.exporting import (
    ExportFP16,
    ExportRecommended,
    ExportRivals,
    ExportStock,
)
from kl_lens.study.run.making import (
    Calibrate,
    Inspect,
    Measure,
    MeasureCaches,
    Plan,
    PlanFP16,
    PlanStock,
)
from kl_lens.study.run.proving import (
    Benchmark,
    Compare,
    Judge,
    Report,
    Samples,
)
from kl_lens.study.run.settings import NONE, RunSettings
from kl_lens.study.run.stage import Stage
from kl_lens.targets import get_target
from kl_lens.weights.recipes import Recipe


def stages_of(
    settings: RunSettings, targets: Sequence[str], *, ahead: bool
) -> list[Stage]:
    """`ahead`: files are read while a GPU measures, so that comparing them with PyTorch waits for the first target."""
    judges = "evaluate" not in settings.without
    compare = [Compare()] if judges else []
    # The FP16 file first: it shows whether a target supports the model, and --budget is a share of its size.
    stages: list[Stage] = [Inspect(), PlanFP16(), *map(ExportFP16, targets)]
    if not ahead:
        stages += compare
    stages.append(Calibrate())
    if ahead and judges and settings.rivals != NONE:
        for target in targets:
            stages += [PlanStock(target), ExportStock(target)]
    for target in targets:
        if settings.limits.use is not None:
            stages.append(MeasureCaches(target))
        stages.append(Measure(target))
        if ahead and target == targets[0]:
            stages += compare
        stages += [Plan(target), ExportRecommended(target)]
    stages += map(ExportRivals, targets)
    if judges:
        stages += [Judge(), Samples()]
    if "benchmark" not in settings.without:
        stages.append(Benchmark())
    if "report" not in settings.without:
        stages.append(Report())
    return stages


def completed(
    settings: RunSettings, model: LoadedModel, begun_with: int | None
) -> RunSettings:
    """With the numbers of windows: to calibrate, those of the run if it was begun, or what is cheap for all menus; to
    judge, few for a large model, because runtimes compute on the CPU."""
    judged = settings.evaluation_windows or (4 if is_large(model) else 8)
    text = settings.calibration
    if (windows := text.windows or begun_with) is None:
        menus = [settings.menu_of(target, model.anatomy) for target in settings.wanted]
        recipes = [
            Recipe.parse(recipe)
            for recipe in dict.fromkeys(r for menu in menus for r in menu)
        ]
        length = text.window_length or model.task.window_length
        windows = windows_by_cost(
            model, find_candidates(model.anatomy, recipes)[0], length
        )
    return replace(
        settings, evaluation_windows=judged, calibration=replace(text, windows=windows)
    )


# -- what they should take --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sketched:
    """What making a file should take, from the configuration of the model alone."""

    target: str
    download: int  # bytes, of 16-bit weights
    free_memory: int
    job: JobEstimate


def sketched(name: str, carried: Carried, target: str) -> Sketched:
    """The usual run for one target."""
    model: Any = Sketch(carried)  # in place of a LoadedModel
    settings = completed(RunSettings.of(model=name, target=(target,)), model, None)
    job = _in_all(settings, model, [target], 0.0)
    weights = model.anatomy.parameters
    job = replace(job, memory=job.memory + 4 * weights)
    return Sketched(target, 2 * weights, available_memory(), job)


def estimate(settings: RunSettings, model: LoadedModel, opened: float) -> JobEstimate:
    """Without tuning and tasks. No text is opened. `opened`: seconds so far."""
    if model.residency is not None or not model.task.generates:
        raise KLLensError("--estimate needs a language model that fits into memory")
    targets = [
        target
        for target in settings.wanted
        if get_target(target).unsupported(model.anatomy.model_type, model.template)
        is None
    ]
    if not targets:
        raise KLLensError("--estimate needs a target that supports the model")
    return _in_all(settings, model, targets, opened)


def _in_all(
    settings: RunSettings,
    model: LoadedModel,
    targets: Sequence[str],
    opened: float,
) -> JobEstimate:
    costs = Costs(settings, model, targets, opened)
    stages = tuple(
        StageCost(stage.verb, stage.target, *cost)
        for stage in stages_of(settings, targets, ahead=leaves_time(model))
        if (cost := stage.cost(costs)) is not None
    )
    return JobEstimate(stages, costs.memory, costs.windows, costs.compiling, costs.busy)
