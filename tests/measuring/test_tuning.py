"""Tuning: the KL falls, the file stays as large, and the model stays as it was."""

from pathlib import Path

import pytest
import torch

from kl_lens.base.errors import FormatError
from kl_lens.measuring.perturbation import Perturbation, replacements, swapped
from kl_lens.measuring.tuning import TuningRates, _Tunable, tuned
from kl_lens.model import LoadedModel
from kl_lens.weights.formats.scales import scales_of, with_scales
from kl_lens.weights.recipes import Recipe, fitting_recipe
from tests.families import normal, slow
from tests.measuring.conftest import loaded, some_windows

RATES = TuningRates(rate=5e-3, epochs=4, batch=4, steps=1)


def _loss(model: LoadedModel, plan: dict[str, Recipe], ids: torch.Tensor) -> float:
    original = model.chain.full_logits(ids).log_softmax(-1)
    with swapped(replacements(model, Perturbation(plan))):
        student = model.chain.full_logits(ids).log_softmax(-1)
    return float((original.exp() * (original - student)).sum(-1).mean())


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("mamba", "int4"),
        ("falcon_h1", "q4_1"),
        slow("mamba2", "uint4-g32"),
        slow("jamba_experts", "int4"),
        ("llama", "affine3-g32"),
    ],
)
def test_the_kl_falls_and_codes_and_model_stay(
    family: str, recipe: str, tmp_path: Path
) -> None:
    model = loaded(family).with_store(folder=tmp_path / "weights")
    windows = some_windows(12, 20)
    before = {name: p.clone() for name, p in model.model.named_parameters()}
    plan = {
        c.name: fitting_recipe(Recipe(recipe), c.shape)[0]
        for c in model.anatomy.candidates
    }
    steps_done: list[int] = []
    tensors = tuned(
        model, plan, windows.ids, RATES, lambda step, steps: steps_done.append(step)
    )
    assert steps_done == list(range(1, 13))
    assert all(torch.equal(p, before[name]) for name, p in model.model.named_parameters())
    assert not any(p.requires_grad for p in model.model.parameters())
    recipes = {
        n: Recipe(r.grid.name, "tuned-0a") if n in tensors else r for n, r in plan.items()
    }
    for name, quantized in tensors.items():
        grid = plan[name].grid
        plain = model.weights.quantized(name, plan[name])
        assert (
            with_scales(grid, quantized, scales_of(grid, plain)).digest == plain.digest
        )  # the same codes
        model.weights.keep_tuned(name, recipes[name], quantized)
        assert (
            model.weights.digest(name, recipes[name]) == quantized.digest != plain.digest
        )
    assert _loss(model, recipes, windows.ids) < _loss(model, plan, windows.ids)


@pytest.mark.parametrize(
    "name", ["q2_k", "q3_k", "q4_k", "q6_k", "iq4_xs", "q4_1", "int4-g64", "uint4-g64"]
)
def test_weights_of_the_loop_are_those_of_the_file(name: str) -> None:
    recipe = Recipe(name)
    quantized = recipe.grid.quantize(normal(4, 512))
    weight = _Tunable(quantized, recipe)
    assert torch.equal(weight.values(), recipe.grid.dequantize(quantized))
    for factor in weight.factors:
        factor.data += 0.2 * normal(*factor.shape, seed=1)
    stored = weight.stored()
    assert torch.equal(weight.values(), recipe.grid.dequantize(stored))
    assert stored.digest != quantized.digest
    weight.values().square().sum().backward()
    assert all(factor.grad is not None and factor.grad.any() for factor in weight.factors)


def test_a_tuned_recipe_is_for_one_format_and_a_run() -> None:
    recipe = Recipe.parse("INT4+tuned-0a")
    assert (recipe, recipe.is_tuned, recipe.grid.name) == ("int4+tuned-0a", True, "int4")
    # Of another format nothing was tuned.
    assert fitting_recipe(Recipe("q4_k", "tuned-0a"), (8, 32))[0] == "q5_0"
    model = loaded("mamba")
    component = model.anatomy.candidates[1].name
    plain = model.weights.quantized(component, Recipe("int4"))
    with pytest.raises(FormatError, match="this store has none"):
        model.weights.keep_tuned(component, recipe, plain)
