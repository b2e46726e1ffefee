"""Estimates from gradients: what they are exactly, and how near they come to what is measured."""

import pytest
import torch

from kl_lens.base.system import DEFAULT_MEMORY
from kl_lens.measuring import second_order as module
from kl_lens.measuring.engines import PlainEngine
from kl_lens.measuring.perturbation import Candidate, find_candidates, key_of
from kl_lens.measuring.second_order import Key, second_order
from kl_lens.model import LoadedModel, load
from kl_lens.weights.recipes import Recipe
from tests.families import plain, token_ids
from tests.measuring.conftest import loaded

LENGTH = 24


def candidates_of(model: LoadedModel, *formats: str) -> list[Candidate]:
    return find_candidates(model.anatomy, [*map(Recipe.parse, formats)])[0]


def estimates(model: LoadedModel, windows: int, budget: int = DEFAULT_MEMORY):
    candidates = candidates_of(model, "int4", "int8")
    return second_order(model, candidates, token_ids(windows, LENGTH), budget)


@pytest.mark.parametrize("family", ["mamba", "llama"])
def test_estimates_come_near_what_is_measured(family: str) -> None:
    model = plain(loaded(family))
    estimated = estimates(model, 16)
    engine = PlainEngine(model)
    engine.prepare(token_ids(16, LENGTH))
    measured: dict[Key, float] = {}
    for candidate in candidates_of(model, "int8"):
        if candidate.component.blocks:
            (readings,) = engine.measure([candidate.perturbation])
            measured[key_of(candidate)] = sum(r.kl for r in readings) / (16 * LENGTH)
    assert len(estimated) == 2 * len(measured)  # of all that is inside the blocks
    ratios = [estimated[key] / kl for key, kl in measured.items()]
    assert sum(estimated[key] for key in measured) == pytest.approx(
        sum(measured.values()), rel=0.15
    )
    assert 0.5 < min(ratios) <= max(ratios) < 2


# Blocks with one weight, more than hidden states between blocks, experts, scaled logits behind the head.
@pytest.mark.parametrize("family", ["zamba2", "gemma2", "qwen3_moe", "mamba2"])
def test_products_are_those_of_the_whole_models_gradient(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = plain(loaded(family))
    candidates = [c for c in candidates_of(model, "int4") if c.component.blocks]
    parameters = [model.parameters_of(c.component)[0] for c in candidates]
    ids = token_ids(1, LENGTH)
    passes = module._Passes(model, ids, range(1), 1)
    (window,) = passes._windows
    of_head = window.gradients[0][0]
    assert of_head is not None
    passes.damage(candidates)
    entering: list[torch.Tensor] = []
    hook = model.chain.head.register_forward_pre_hook(
        lambda _, inputs: entering.append(inputs[0])
    )
    for parameter in parameters:
        parameter.requires_grad_(True)
    with hook:
        model.task.forward(model.model, ids)
    gradients = torch.autograd.grad(entering, parameters, [of_head], allow_unused=True)
    for candidate, parameter, gradient in zip(
        candidates, parameters, gradients, strict=True
    ):
        change = model.weights.values(*key_of(candidate)) - parameter.detach()
        expected = 0 if gradient is None else (gradient * change).sum(-1)
        actual = window.products.get((key_of(candidate), 0), torch.zeros(1))
        torch.testing.assert_close(
            actual, expected + torch.zeros_like(actual), rtol=2e-3, atol=1e-5
        )


def test_labels_do_not_depend_on_memory() -> None:
    model = plain(loaded("mamba"))
    assert estimates(model, 3, budget=1) == pytest.approx(estimates(model, 3), rel=1e-5)


def test_weights_may_stay_on_disk(saved) -> None:
    folder = saved("llama")
    in_memory = estimates(plain(load(folder)), 2)
    on_disk = plain(load(folder, weights="disk", memory_budget=1))
    assert estimates(on_disk, 2) == pytest.approx(in_memory, rel=1e-5)


def test_labels_come_from_the_models_own_output() -> None:
    """The mean gradient of the head's inputs is zero: of no other labels."""
    model = plain(loaded("llama"))
    passes = module._Passes(model, token_ids(1, LENGTH), range(1), 400)
    gradients = torch.stack([g[0].flatten() for g in passes._windows[0].gradients])
    mean = gradients.mean(0).norm() / gradients.norm(dim=1).mean()
    assert mean < 3 / 400**0.5
