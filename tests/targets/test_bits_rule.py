"""The rule of llama.cpp's pull request 15550, as benchmarks/bits_rule.py makes plans with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from benchmarks.bits_rule import BitsRule, Choice, _hull

from kl_lens.model import LoadedModel
from kl_lens.weights.quantizers import InputStatistics
from kl_lens.weights.recipes import Recipe, fitting_recipe, parsed


def test_only_types_whose_bytes_gain_less_and_less_remain() -> None:
    choices = [Choice(Recipe(name), size, error) for name, size, error in (
        ("q2_k", 10, 8.0), ("q3_k", 20, 7.9), ("iq3_s", 20, 7.0), ("q4_k", 30, 2.0), ("q5_k", 40, 2.5),
        ("q8_0", 60, 1.0),
    )]  # fmt: skip
    assert [choice.recipe for choice in _hull(choices)] == ["q2_k", "q4_k", "q8_0"]


@pytest.mark.slow  # ggml prepares its tables for every IQ type
def test_plans_keep_to_their_bits_and_lose_less_than_one_type_for_all() -> None:
    pytest.importorskip("gguf", reason="needs the extra gguf")
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=256, num_hidden_layers=2, state_size=8, time_step_rank=8, expand=1
    )
    model = LoadedModel("wide", Path(), transformers.MambaForCausalLM(config).eval(), None)

    class Alike:
        digest = "alike"

        def of(self, component: str, device: object = "cpu") -> InputStatistics:
            return InputStatistics(torch.eye(model.anatomy.component(component).shape[-1]), (1000,))

    statistics = Alike()
    model.weights.learn_from(statistics)
    rule = BitsRule(model, statistics)
    quantized = {component.name: component for component in model.anatomy.candidates}
    weights = sum(component.parameters for component in quantized.values())
    sizes = []
    for bits in (2.6, 3.0, 4.0):
        plan = parsed(rule.plan(bits).assignment)
        assert set(plan) == set(quantized)
        size = sum(recipe.grid.bytes(quantized[name].shape) for name, recipe in plan.items())
        assert size <= bits * weights / 8
        sizes.append(size)
        errors = {(name, c.recipe): c.error for name in quantized for c in rule._favoured(name, bits)}
        for kind in ("iq2_xxs", "iq2_s", "iq3_s", "q3_k"):
            alike = {
                name: fitting_recipe(Recipe(kind, "imatrix"), c.shape)[0] for name, c in quantized.items()
            }
            alike[model.anatomy.head] = Recipe("q3_k")  # it has no importance matrix
            if sum(r.grid.bytes(quantized[name].shape) for name, r in alike.items()) <= size:
                assert sum(errors[each] for each in plan.items()) <= sum(
                    errors[each] for each in alike.items()
                )
    assert sizes == sorted(sizes)
