"""The noise floor: what is measured when there is no difference."""

from __future__ import annotations

import numpy as np
import torch

from kl_lens.measuring.engines import Engine
from kl_lens.measuring.metrics import TeacherRows, compare, window_metrics
from kl_lens.measuring.precision import FLOAT32
from kl_lens.run.samples import WindowMetrics, summarise


def noise_floor(engine: Engine, ids: torch.Tensor, windows: int = 2) -> dict[str, float]:
    """The teacher against itself in another batch position.

    On tensor cores: twice their distance from float32, because teacher and student both run on them.
    """
    ids = ids[:windows].to(engine.chain.device)
    sides = 1 if engine.precision == FLOAT32 else 2
    together = engine.chain.full_logits(ids)
    metrics: list[WindowMetrics] = []
    for index in range(len(ids)):
        targets = torch.full((ids.shape[1],), -1, device=ids.device)
        alone = engine.logits(ids[index : index + 1])[0]
        rows = compare(TeacherRows.of(together[index], targets), alone)
        # The signal is for the SQNR, which is not asked for.
        metrics.append(window_metrics(index, rows, np.ones(len(rows)), 1, engine.vocabulary))
    summary = summarise(metrics)
    names = ("kl_teacher_to_student", "kl_student_to_teacher", "mse", "kl_max")
    return {name: sides * summary[name].value for name in names}
