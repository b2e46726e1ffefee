"""Another objective than KL, registered in one place, goes through the sweep, the journal and the planner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kl_lens import planning
from kl_lens.base.errors import PlanError
from kl_lens.measuring.engines import ENGINES
from kl_lens.measuring.objectives import OBJECTIVES, Objective
from kl_lens.measuring.perturbation import find_candidates
from kl_lens.measuring.sweep import Sweep
from kl_lens.model import LoadedModel
from kl_lens.run.folder import Run
from kl_lens.run.records import SensitivityTable
from kl_lens.weights.recipes import Recipe
from tests.measuring.conftest import some_windows
from tests.planning.tables import best

RANK = "true_rank"


def _true_rank(original: torch.Tensor, perturbed: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """By how many places the true next token moves in the order of likely tokens."""

    def rank(logits: torch.Tensor) -> torch.Tensor:
        return (logits > logits.gather(1, targets.clamp(min=0)[:, None])).sum(1)

    return torch.where(targets >= 0, (rank(perturbed) - rank(original)).abs(), 0)


def _measured(model: LoadedModel, folder: Path, engine: str) -> SensitivityTable:
    candidates, _ = find_candidates(model.anatomy, [Recipe("int4"), Recipe("int8")])
    with Run.create(folder) as run:
        Sweep(model, run, engine).measure(candidates, some_windows(2, 20))
        return run.table()


@pytest.mark.parametrize("engine", ENGINES)
def test_plans_minimise_another_objective(
    engine: str, mamba: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = _measured(mamba, tmp_path / "without", engine)
    monkeypatch.setitem(OBJECTIVES, RANK, Objective(RANK, _true_rank))
    table = _measured(mamba, tmp_path / "with", engine)
    others = [{n: v for n, v in m.metrics.items() if n != RANK} for m in table.measurements]
    assert others == [m.metrics for m in without.measurements]  # to the last bit
    assert len({m.metrics[RANK].value for m in table.measurements}) > 5

    whole, gains = sum(2 * c.parameters for c in table.components), []
    for share in (0.32, 0.36, 0.42):
        plans = [best(table, max_bytes=share * whole, metric=m).plan for m in (None, RANK)]
        by_kl, by_rank = (planning.Predictor(table, RANK).total(plan.assignment) for plan in plans)
        assert plans[1].predicted_kl == by_rank.value
        assert plans[1].notes["predicted_by"] == RANK
        gains.append(by_kl.value - by_rank.value)
    assert min(gains) >= 0 < max(gains)
    with pytest.raises(PlanError, match=rf"no measurement has {RANK}; use another --metric \(kl_teacher"):
        best(without, max_bytes=0.4 * whole, metric=RANK)
