"""What a run should take: the sum of its stages."""

from __future__ import annotations

from kl_lens.base.errors import KLLensError
from kl_lens.model import LoadedModel
from kl_lens.study.events import JobEstimate, StageCost
from kl_lens.study.run.background import leaves_time
from kl_lens.study.run.costs import Costs
from kl_lens.study.run.settings import RunSettings
from kl_lens.study.run.stages import stages_of
from kl_lens.targets import get_target


def estimate(settings: RunSettings, model: LoadedModel, opened: float) -> JobEstimate:
    """Without the paper's stages, `rank` and tasks. No text is opened. `opened`: seconds so far."""
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
    costs = Costs(settings, model, targets, opened)
    stages = tuple(
        StageCost(stage.verb, stage.target, *cost)
        for stage in stages_of(settings, targets, ahead=leaves_time(model))
        if (cost := stage.cost(costs)) is not None
    )
    return JobEstimate(stages, costs.memory, costs.windows, costs.compiling, costs.busy)
