"""The sweep and its journal: nothing lost, nothing repeated, nothing mixed up."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kl_lens import planning
from kl_lens.base.errors import PlanError, RunError
from kl_lens.base.progress import Progress
from kl_lens.measuring.engines import ENGINES
from kl_lens.measuring.objectives import OBJECTIVES, Objective
from kl_lens.measuring.perturbation import find_candidates
from kl_lens.measuring.sweep import Sweep, windows_by_cost
from kl_lens.model import LoadedModel
from kl_lens.run.folder import CALIBRATION, Run
from kl_lens.run.readings import KL
from kl_lens.run.records import SensitivityTable
from kl_lens.weights.recipes import Recipe
from tests.measuring.conftest import loaded, some_windows, table as _table
from tests.planning.tables import best


def _candidates(model, formats=("int4", "int8"), pattern=r"layers\.[13]\."):
    return find_candidates(
        model.anatomy, [Recipe.parse(name) for name in formats], pattern
    )[0]


def _swept(model, run, windows=6, formats=("int4", "int8"), **options):
    candidates = _candidates(model, formats)
    return Sweep(model, run, **options).measure(candidates, some_windows(windows, 20))


def test_every_candidate_is_measured_once(mamba, tmp_path) -> None:
    with Run.create(tmp_path) as run:
        first = _swept(mamba, run)
        assert (first.measured, first.reused) == (16 * 6, 0)
        table = _table(run)
        again = _swept(mamba, run)
        assert (again.measured, again.reused) == (0, 16 * 6)
        assert _table(run) == table
        noise = run.load("noise", CALIBRATION)["kl_teacher_to_student"]
        assert (
            0
            <= noise
            < min(m["kl_teacher_to_student"].value for m in table.values()) / 100
        )


def test_an_interrupted_sweep_goes_on_and_gives_the_same_table(mamba, tmp_path) -> None:
    with Run.create(tmp_path / "whole") as run:
        _swept(mamba, run)
        whole = _table(run)
    count = 0

    def stop_after_five(work: float, what: str) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt

    with Run.create(tmp_path / "parts") as run:
        with pytest.raises(KeyboardInterrupt):
            _swept(mamba, run, progress=Progress(advanced=stop_after_five))
        assert len(_table(run)) == 5
    with Run.create(tmp_path / "parts") as run:
        result = _swept(mamba, run)
        assert result.measured == 11 * 6
        assert _table(run) == whole, "to the last bit"


@pytest.mark.parametrize("engine", ENGINES)
def test_nan_logits_are_refused_and_never_stored(
    engine: str, tmp_path, monkeypatch
) -> None:
    model = loaded("mamba")
    weight = model.model.get_parameter("backbone.norm_f.weight")
    assert len(model.chain) == 4, "opened while it was whole"
    with Run.create(tmp_path / "original") as run:
        weight.data[3] = float("nan")
        with pytest.raises(
            RunError, match="the original model: the logits on window 0 are NaN"
        ):
            _swept(model, run, 2, engine=engine)
        assert _table(run) == {}
        weight.data[3] = 1.0
    with Run.create(tmp_path / "candidate") as run:
        weight_of_one = model.model.get_parameter(
            "backbone.layers.1.mixer.dt_proj.weight"
        )
        broken = torch.full_like(weight_of_one, float("nan"))
        monkeypatch.setattr(
            "kl_lens.measuring.engines.replacements", lambda *_: [(weight_of_one, broken)]
        )
        with pytest.raises(
            RunError, match=r"layers\.1\.mixer\.\w+ int4: the logits on window 0 are NaN"
        ):
            _swept(model, run, 2, engine=engine)
        assert _table(run) == {}


def test_more_windows_and_more_formats_add_to_the_run(mamba, tmp_path) -> None:
    with Run.create(tmp_path) as run:
        _swept(mamba, run, 4, ["int4"])
        more = _swept(mamba, run, 10, ["int4"])
        assert (more.measured, more.reused) == (8 * 6, 8 * 4)
        shares: list[float] = []
        progress = Progress(started=lambda total, done: shares.append(done / total))
        extended = _swept(mamba, run, 10, progress=progress)
        assert shares == [pytest.approx(0.5)], "it starts where the earlier sweep stopped"
        assert (extended.measured, extended.reused) == (8 * 10, 8 * 10)
        grown = _table(run)
    with Run.create(tmp_path / "at once") as run:
        _swept(mamba, run, 10)
        at_once = _table(run)
    for key, metrics in at_once.items():
        for name, estimate in metrics.items():
            assert grown[key][name].value == pytest.approx(
                estimate.value, rel=1e-4, abs=1e-9
            )


def test_another_model_text_or_meaning_is_refused(mamba, tmp_path, monkeypatch) -> None:
    with Run.create(tmp_path) as run:

        def measure(**text: int) -> None:
            windows = some_windows(**{"count": 2, "length": 20, **text})
            Sweep(mamba, run).measure(_candidates(mamba)[:1], windows)

        measure()
        with pytest.raises(RunError, match="seed 1, now it is 2"):
            measure(seed=2)
        with pytest.raises(RunError, match="length 20, now it is 21"):
            measure(length=21)
        with monkeypatch.context() as patch:
            patch.setattr("kl_lens.run.folder.METRICS_VERSION", 999)
            with pytest.raises(RunError, match="metrics_version is 1 there and 999 now"):
                measure()
        mamba.model.get_parameter("backbone.layers.0.mixer.D")[0] += 1
        del mamba.fingerprint
        with pytest.raises(
            RunError, match=r"model_fingerprint is '.*' there and '.*' now"
        ):
            measure()


def test_the_default_number_of_windows_is_counted_from_their_cost(
    mamba, monkeypatch
) -> None:
    quick = _candidates(mamba, ("int4",))
    slow = _candidates(mamba, ("int4+gptq",))
    assert (
        windows_by_cost(mamba, quick, 32) == 4
    )  # quantizing is quick, so windows are few
    monkeypatch.setattr("kl_lens.measuring.sweep.QUANTIZING", {"gptq": 1e4})
    assert windows_by_cost(mamba, slow, 32) == 28
    assert windows_by_cost(mamba, slow, 4096) == 4
    assert windows_by_cost(mamba, slow, 1) == 64


RANK = "true_rank"


def _true_rank(original: Tensor, perturbed: Tensor, targets: Tensor) -> Tensor:
    """By how many places the true next token moves in the order of likely tokens."""

    def rank(logits: Tensor) -> Tensor:
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
    others = [
        {n: v for n, v in m.metrics.items() if n != RANK} for m in table.measurements
    ]
    assert others == [m.metrics for m in without.measurements]  # to the last bit
    assert len({m.metrics[RANK].value for m in table.measurements}) > 5

    whole = sum(2 * c.parameters for c in table.components)
    gains = []
    for share in (0.32, 0.36, 0.42):
        plans = [best(table, max_bytes=share * whole, metric=m).plan for m in (KL, RANK)]
        by_kl, by_rank = (
            planning.Predictor(table, RANK).total(plan.assignment) for plan in plans
        )
        assert plans[1].predicted_kl == by_rank.value
        assert plans[1].notes["predicted_by"] == RANK
        gains.append(by_kl.value - by_rank.value)
    assert min(gains) >= 0 < max(gains)
    with pytest.raises(
        PlanError, match=rf"no measurement has {RANK}; use another --metric \(kl_teacher"
    ):
        best(without, max_bytes=0.4 * whole, metric=RANK)
