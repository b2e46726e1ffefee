"""More model than memory: weights that stay on disk give the numbers of weights in memory, to the last bit."""

from dataclasses import replace
from pathlib import Path

import pytest

from kl_lens.base.errors import CheckpointError
from kl_lens.base.progress import Progress
from kl_lens.measuring.joint import PlanMeter
from kl_lens.measuring.perturbation import Candidate, Perturbation, find_candidates
from kl_lens.measuring.pieces import Job
from kl_lens.measuring.statistics import gather
from kl_lens.measuring.streamed import StreamedEngine
from kl_lens.measuring.sweep import Sweep
from kl_lens.model import LoadedModel, load
from kl_lens.model.residency import BLOCKS_AT_ONCE
from kl_lens.model.tasks import LanguageTask
from kl_lens.run.folder import CALIBRATION, Run
from kl_lens.run.readings import Reading
from kl_lens.study.session import Session
from kl_lens.study.settings import Opening
from kl_lens.targets import deployed
from kl_lens.weights.recipes import Recipe
from tests.families import CONFIGS, slow
from tests.measuring.conftest import some_windows, table as _table

LITTLE = 10  # bytes: not even the head stays in memory
QUICK = ("mamba", "zamba2")  # a tied head, blocks that share weights
FAMILIES = [f if f in QUICK else slow(f) for f in [*CONFIGS, "lfm2_moe", "gpt2"]]


@pytest.fixture(autouse=True)
def _two_windows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LanguageTask, "rows_at_once", 40)


def _on_disk(folder: Path, budget: int = LITTLE) -> LoadedModel:
    model = load(folder, weights="disk", memory_budget=budget)
    assert model.residency is not None
    return model


def _matrices(model: LoadedModel) -> dict[str, bool]:
    """Every matrix, and whether it is in memory."""
    named = model.model.named_parameters()
    return {name: not bool(p.isnan().any()) for name, p in named if p.dim() > 1}


def _measured(
    model: LoadedModel, perturbations: list[Perturbation], budget: int, target: str = ""
) -> list[list[Reading]]:
    windows = some_windows(3, 20)
    engine = Job(
        windows.ids.numpy(), memory_budget=budget, deployed=deployed(target or None)
    ).engine_on(model)
    assert isinstance(engine, StreamedEngine) == (model.residency is not None)
    results: list[list[Reading]] = [[] for _ in perturbations]
    for slab in engine.slabs(windows.ids):
        engine.prepare(windows.ids[slab.start : slab.stop])
        for metrics, more in zip(results, engine.measure(perturbations), strict=True):
            metrics += [
                replace(window, window=slab.start + window.window) for window in more
            ]
    return results


def _candidates(model: LoadedModel, pattern: str = "") -> list[Candidate]:
    return find_candidates(model.anatomy, [Recipe("int4"), Recipe("int8")], pattern)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_on_disk_gives_the_numbers_of_one_in_memory(family: str, saved) -> None:
    folder = saved(family)
    memory = load(folder)
    disk = _on_disk(folder)
    assert disk.fingerprint == memory.fingerprint
    assert disk.anatomy == memory.anatomy
    candidates = _candidates(memory)
    # Every kind of component (the embedding comes first, an untied head last), a block of two that run stacked.
    sample = [
        candidates[0],
        *candidates[:: max(1, len(candidates) // 8)],
        *candidates[4:6],
        candidates[-1],
    ]
    perturbations = [candidate.perturbation for candidate in dict.fromkeys(sample)]
    assert _measured(disk, perturbations, 10**9) == _measured(
        memory, perturbations, 10**9
    )
    assert not any(_matrices(disk).values()), "what is not in use is not in memory"


def test_little_memory_makes_slabs_and_waves_not_other_numbers(
    saved, monkeypatch
) -> None:
    folder = saved("zamba2")
    memory = load(folder)
    disk = _on_disk(folder)
    sample = [candidate.perturbation for candidate in _candidates(memory)[::7]]
    expected = _measured(memory, sample, 10**9)
    waves: list[int] = []
    through = StreamedEngine._through
    monkeypatch.setattr(
        StreamedEngine,
        "_through",
        lambda self, wave, *arguments: (
            waves.append(len(wave)) or through(self, wave, *arguments)
        ),
    )
    # A third of what the weights leave is for states: twelve of two windows, four of them the teacher's.
    assert disk.residency is not None
    width = disk.chain.state_size // len(disk.chain)
    weights = BLOCKS_AT_ONCE * disk.residency.block_bytes + disk.residency.resident_bytes
    budget = 3 * 12 * 2 * 20 * width * 4 + weights + 9
    assert _measured(disk, sample, budget) == expected
    assert len(waves) == 3, "two slabs, the first of two waves"


def test_as_deployed_and_whole_plans_are_the_same_too(saved) -> None:
    folder = saved("zamba2")
    memory = load(folder)
    disk = _on_disk(folder)
    sample = [
        c.perturbation for c in find_candidates(memory.anatomy, [Recipe("q8_0")])[0][::7]
    ]
    assert _measured(disk, sample, 10**9, target="gguf") == _measured(
        memory, sample, 10**9, target="gguf"
    )
    plan = {c.name: "int4" for c in memory.anatomy.candidates}
    windows = some_windows(3, 20)
    actual, expected = (
        PlanMeter(model, windows).measure(plan) for model in (disk, memory)
    )
    assert actual.windows.tolist() == expected.windows.tolist()
    assert actual.perplexity == expected.perplexity


@pytest.mark.parametrize("family", [slow("zamba2"), "jamba_experts"])
def test_statistics_and_what_methods_make_of_them_are_the_same(
    family: str, saved, tmp_path
) -> None:
    folder = saved(family)
    digests = []
    for model in (load(folder), _on_disk(folder)):
        folder = tmp_path / str(model.residency is None)
        statistics = gather(model, some_windows(3, 20), folder)
        model.weights.learn_from(statistics)
        recipes = {c.name: Recipe("int4", "gptq") for c in model.anatomy.candidates}
        files = {
            path.name: path.read_bytes() for path in (folder / "statistics").iterdir()
        }
        digests.append((model.weights.digests(recipes), files))
    assert digests[0] == digests[1]


def test_a_file_that_is_cut_short_is_named_and_the_sweep_goes_on_where_it_stopped(
    saved, tmp_path
) -> None:
    folder = saved("mamba")
    windows = some_windows(4, 20)
    model = _on_disk(folder)
    budget = 4 * 20 * 64 * 3 * 30
    candidates = _candidates(model, r"layers\.[13]\.")
    with Run.create(tmp_path / "whole") as run:
        Sweep(model, run, memory_budget=budget).measure(candidates, windows)
        whole = _table(run)
    file = folder / "model.safetensors"
    content = file.read_bytes()

    def cut(work: float, what: str) -> None:
        with file.open(
            "r+b"
        ) as opened:  # the same file, as somebody's copying over it would do
            opened.truncate(len(content) // 2)

    with (
        Run.create(tmp_path / "parts") as run,
        pytest.raises(CheckpointError, match=r"model\.safetensors was changed"),
    ):
        Sweep(model, run, memory_budget=budget, progress=Progress(advanced=cut)).measure(
            candidates, windows
        )
    file.write_bytes(content)
    with Run.create(tmp_path / "parts") as run:
        stored = sum(map(len, run.measured_windows(CALIBRATION).values()))
        assert 0 < stored < len(candidates) * len(windows), "a wave was committed"
        Sweep(_on_disk(folder), run, memory_budget=budget).measure(candidates, windows)
        assert _table(run) == whole


def test_a_model_is_left_on_disk_where_it_does_not_fit_and_verbs_share_it_where_it_does(
    saved,
) -> None:
    folder = saved("mamba")
    size = sum(parameter.nbytes for parameter in load(folder).model.parameters())
    assert load(folder, weights="auto").residency is None
    assert load(folder, weights="auto", memory_budget=size // 2).residency is not None
    session = Session()
    name = str(folder)
    small = session.model(name, Opening(working_memory=size // 2))
    fits = session.model(name, Opening())
    assert small.residency is not None
    assert fits.residency is None
    assert session.model(name, Opening(weights="memory")) is fits
    assert session.model(name, Opening(working_memory=size // 2)) is fits, (
        "already exists"
    )
    session = Session()
    opened = session.model(name, Opening(weights="disk", working_memory=10**8))
    assert session.model(name) is opened, (
        "verbs that cannot choose take it as it was opened"
    )
