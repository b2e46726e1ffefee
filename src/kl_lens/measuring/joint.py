"""Measures whole plans on held-out text: many components perturbed at once, with the sweep's engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kl_lens.base.system import DEFAULT_MEMORY
from kl_lens.measuring.metrics import check_finite
from kl_lens.measuring.perturbation import Kernels, Perturbation, cached_states
from kl_lens.measuring.pieces import Job
from kl_lens.model import LoadedModel
from kl_lens.run.readings import Reading, summarise, window_kl
from kl_lens.run.records import Estimate
from kl_lens.text.windows import Windows
from kl_lens.weights.recipes import FP16, Recipe, parsed

# Components with their recipes, and kinds of caches with their formats.
_Key = tuple[tuple[tuple[str, Recipe], ...], tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class JointResult:
    """A plan's loss on some text."""

    kl: Estimate  # KL(original ‖ planned), nats per token
    delta_cross_entropy: Estimate
    perplexity: Estimate  # per token, of the planned model
    original_perplexity: float
    windows: npt.NDArray[np.float64]  # mean KL of each window


class PlanMeter:
    """Measures plans against the original model on fixed windows; each plan once.

    Components at `fp16` keep their weights: the original is the checkpoint as loaded, and its reference points are
    FP16 already.
    """

    def __init__(
        self,
        model: LoadedModel,
        windows: Windows,
        memory_budget: int = DEFAULT_MEMORY,
        deployed: Kernels | None = None,
    ) -> None:
        """`deployed`: measure with the activations of a runtime's kernels, not only with quantized weights."""
        self.model = model
        self.text = windows
        job = Job(windows.ids.numpy(), memory_budget=memory_budget, deployed=deployed)
        self._engine = job.engine_on(model)
        self._slabs = self._engine.slabs(windows.ids)
        self._prepared: range | None = None
        self._entropy: dict[int, float] = {}
        self._results: dict[_Key, JointResult] = {}

    def perplexity(self, assignment: Mapping[str, str]) -> float:
        return self.measure(assignment).perplexity.value

    @property
    def known(self) -> list[tuple[dict[str, Recipe], JointResult]]:
        """The plans measured so far, with their results."""
        return [
            (dict(recipes), result)
            for (recipes, caches), result in self._results.items()
            if recipes and not caches
        ]

    def measure(
        self, assignment: Mapping[str, str], caches: Mapping[str, str] | None = None
    ) -> JointResult:
        """`caches`: keys and values → their formats."""
        recipes = {
            n: recipe for n, recipe in parsed(assignment).items() if recipe != FP16
        }
        formats = {kind: name for kind, name in (caches or {}).items() if name != FP16}
        key = (tuple(sorted(recipes.items())), tuple(sorted(formats.items())))
        if key in self._results:
            return self._results[key]
        windows = self._windows(Perturbation(recipes, cached_states(self.model, formats)))
        summary = summarise(windows)
        entropy = sum(self._entropy.values()) / sum(w.targets for w in windows)
        change = summary["delta_cross_entropy"]
        value = math.exp(min(entropy + change.value, 700.0))
        self._results[key] = JointResult(
            kl=summary["kl_teacher_to_student"],
            delta_cross_entropy=change,
            # Only the error of the change: the part that both models share cancels when plans are compared.
            perplexity=Estimate(value, value * change.standard_error),
            original_perplexity=math.exp(entropy),
            windows=window_kl(windows),
        )
        return self._results[key]

    def _windows(self, perturbation: Perturbation) -> list[Reading]:
        metrics: list[Reading] = []
        for slab in self._slabs:
            if self._prepared != slab:
                self._engine.prepare(self.text.ids[slab.start : slab.stop])
                self._prepared = slab
                entropies = self._engine.teacher_cross_entropy()
                self._entropy.update(zip(slab, entropies.tolist(), strict=True))
            metrics += self._engine.measure([perturbation])[0]
        check_finite("this plan", [(k, w.kl) for k, w in enumerate(metrics)])
        return metrics
