"""Statistics of inputs: the moments of what really enters each product, kept, resumed, and refused where they lie."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kl_lens.base.errors import CheckpointError, FormatError, RunError, UnlearntError
from kl_lens.measuring.statistics import Moments, StoredStatistics, gather
from kl_lens.model import LoadedModel
from kl_lens.model.tasks import LanguageTask
from tests.families import CONFIGS, slow, tiny_model
from tests.measuring.conftest import loaded, some_windows

QUICK = ("mamba", "zamba2", "jamba_experts")
FAMILIES = [f if f in QUICK else slow(f) for f in CONFIGS]


@pytest.fixture(autouse=True)
def _two_windows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LanguageTask, "rows_at_once", 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_moments_are_those_of_every_linear_layers_inputs(
    family: str, tmp_path: Path
) -> None:
    model = loaded(family)
    windows = some_windows(3, 20)
    statistics = gather(model, windows, tmp_path)
    expected: dict[str, Moments] = {}

    def note(name: str) -> object:
        def hook(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
            moments = expected.setdefault(
                name, Moments(module.weight.shape, module.weight.device)
            )
            moments.add(args[0].double())

        return hook

    for component in model.anatomy.candidates:
        for name in (component.name, *component.tied_with):
            module = dict(model.model.named_modules(remove_duplicate=False)).get(name)
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(note(component.name))  # type: ignore[arg-type]
    model.chain.full_logits(windows.ids)
    assert expected
    for name, moments in expected.items():
        stored = statistics.of(name)
        torch.testing.assert_close(
            stored.second_moments,
            (moments.sums[0] / moments.tokens[0]).float(),
            rtol=2e-3,
            atol=2e-4,
        )
        assert stored.tokens == tuple(moments.tokens)
    for (
        component
    ) in model.anatomy.candidates:  # and every other weight has moments of its shape
        stored = statistics.of(component.name)
        assert stored.second_moments.shape == (
            *component.shape[:-2],
            component.shape[-1],
            component.shape[-1],
        )
        assert torch.equal(stored.second_moments, stored.second_moments.mT)


def test_the_time_step_projection_is_seen_though_no_hook_on_it_fires(
    tmp_path: Path,
) -> None:
    model = loaded("mamba")
    windows = some_windows(3, 20)
    statistics = gather(model, windows, tmp_path)
    component = next(c for c in model.anatomy.candidates if c.kind == "dt_proj")
    mixer = model.model.get_submodule(component.name.rpartition(".")[0])
    rank = component.shape[-1]
    outputs: list[Tensor] = []
    mixer.x_proj.register_forward_hook(
        lambda _m, _a, output: outputs.append(output[..., :rank])
    )
    model.chain.full_logits(windows.ids)
    inputs = outputs[0].reshape(-1, rank)
    torch.testing.assert_close(
        statistics.of(component.name).second_moments,
        inputs.T @ inputs / len(inputs),
        rtol=1e-3,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    "family",
    [
        "jamba_experts",
        *(slow(f) for f in ("granitemoehybrid", "nemotron_h")),
    ],
)
def test_experts_have_their_own_moments(family: str, tmp_path: Path) -> None:
    model = loaded(family)
    windows = some_windows(6, 60)
    statistics = gather(model, windows, tmp_path)
    first = next(c for c in model.anatomy.candidates if len(c.shape) == 3)
    experts = model.model.get_submodule(first.name.rpartition(".")[0])
    calls: list[tuple[Tensor, ...]] = []
    experts.register_forward_pre_hook(lambda _m, args: calls.append(args))
    model.chain.full_logits(windows.ids)
    inputs = calls[0][0].reshape(-1, first.shape[-1])
    chosen = calls[0][1].reshape(windows.tokens, -1)
    stored = statistics.of(first.name)
    for expert in range(first.shape[0]):
        tokens = inputs[(chosen == expert).any(-1)]
        assert stored.tokens[expert] == len(tokens) > first.shape[-1]
        torch.testing.assert_close(
            stored.second_moments[expert],
            tokens.T @ tokens / len(tokens),
            rtol=1e-3,
            atol=1e-4,
        )


def test_a_killed_gathering_resumes_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded("zamba2")
    windows = some_windows(3, 20)  # its shared block runs in layers 1 and 5
    whole = gather(model, windows, tmp_path / "whole")

    def stop(done: int, blocks: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gather(model, windows, tmp_path / "parts", progress=stop)
    with pytest.raises(RunError, match="stopped before"):
        StoredStatistics.open(tmp_path / "parts", model)
    written = (tmp_path / "parts/statistics/block-000.safetensors").stat().st_mtime_ns
    parts = gather(model, windows, tmp_path / "parts")
    assert (
        tmp_path / "parts/statistics/block-000.safetensors"
    ).stat().st_mtime_ns == written
    for component in model.anatomy.candidates:
        assert torch.equal(
            parts.of(component.name).second_moments,
            whole.of(component.name).second_moments,
        ), component.name
    assert (
        parts.digest
        == whole.digest
        == StoredStatistics.open(tmp_path / "parts", model).digest
    )


def test_statistics_of_another_model_or_text_are_refused(tmp_path: Path) -> None:
    model = loaded("mamba")
    gather(model, some_windows(3, 20), tmp_path)
    stranger = LoadedModel("mamba", Path(), tiny_model("mamba", seed=5), None)
    with pytest.raises(RunError, match="another model"):
        gather(stranger, some_windows(3, 20), tmp_path)
    with pytest.raises(RunError, match="another model"):
        StoredStatistics.open(tmp_path, stranger)
    with pytest.raises(RunError, match="another text"):
        gather(model, some_windows(3, 20, seed=2), tmp_path)
    with pytest.raises(UnlearntError, match="kl-lens calibrate"):
        StoredStatistics.open(tmp_path / "nothing", model)


def test_a_damaged_file_is_named_and_gathered_again(tmp_path: Path) -> None:
    model = loaded("mamba")
    windows = some_windows(3, 20)
    whole = gather(model, windows, tmp_path)
    name = "backbone.layers.1.mixer.in_proj"
    before = whole.of(name).second_moments
    (tmp_path / "statistics/block-001.safetensors").write_bytes(b"rubbish")
    with pytest.raises(FormatError, match=r"block-001\.safetensors is damaged"):
        whole.of(name)
    with pytest.raises(FormatError, match="no_such"):
        whole.of("no_such")
    assert torch.equal(gather(model, windows, tmp_path).of(name).second_moments, before)
    (tmp_path / "statistics/statistics.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        StoredStatistics.open(tmp_path, model)


def test_activations_that_are_not_finite_name_the_block_and_the_window(
    tmp_path: Path,
) -> None:
    model = loaded("mamba")
    windows = some_windows(4, 20)
    assert len(model.chain)  # watched while the model was whole
    bad = int(windows.ids[2, 0])
    windows.ids[windows.ids == bad] = bad + 1
    windows.ids[2, 0] = bad
    model.model.get_input_embeddings().weight.data[bad] = torch.nan
    with pytest.raises(
        CheckpointError, match=r"states after block 0 hold NaN or infinity in window 2;"
    ):
        gather(model, windows, tmp_path)


def test_a_product_with_some_of_the_columns_only_is_not_taken_for_the_whole(
    tmp_path: Path,
) -> None:
    model = loaded("llama")
    layer = model.model.get_submodule("model.layers.0.mlp.down_proj")
    layer.forward = lambda x: (
        x[..., :48] @ layer.weight[:, :48].T + x[..., 48:] @ layer.weight[:, 48:].T
    )
    statistics = gather(model, some_windows(3, 20), tmp_path)
    with pytest.raises(
        FormatError, match=r"layers\.0\.mlp\.down_proj: used only in parts"
    ):
        statistics.of("model.layers.0.mlp.down_proj")
