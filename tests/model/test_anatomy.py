"""The anatomy: every weight once, with what it is, where it runs, and why it is left alone if it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kl_lens.base.errors import CheckpointError
from kl_lens.model import Anatomy, LoadedModel, load
from kl_lens.model.anatomy import REASONS
from kl_lens.run.records import Component
from tests.families import CONFIGS, UNUSUAL, tiny_model


def _anatomy(family: str) -> Anatomy:
    return LoadedModel(family, Path(), tiny_model(family), None).anatomy


def _kinds(anatomy: Anatomy, family: str) -> set[str]:
    return {c.kind for c in anatomy.candidates if c.family == family}


@pytest.mark.parametrize("family", [*CONFIGS, *sorted(UNUSUAL.keys() - {"rwkv"})])
def test_every_parameter_is_counted_once_and_has_a_true_reason(family: str) -> None:
    model = tiny_model(family)
    anatomy = LoadedModel(family, Path(), model, None).anatomy
    assert anatomy.parameters == sum(p.numel() for p in model.parameters())
    names = [name for c in anatomy.components for name in (c.name, *c.tied_with)]
    assert len(names) == len(set(names))
    for component in anatomy.components:
        assert model.get_parameter(component.weight).shape == component.shape
        assert component.quantizable == (component.reason is None)
        assert Component.from_json(component.to_json()) == component
        if component.reason == REASONS["vector"]:
            assert max(component.shape) == component.parameters
        if component.quantizable:
            assert len(component.shape) in (2, 3)
            assert component.kind not in ("conv1d", "A_log", "D", "dt_bias", "norm", "bias", "router")


def test_mamba() -> None:
    anatomy = _anatomy("mamba")
    assert _kinds(anatomy, "ssm") == {"in_proj", "x_proj", "dt_proj", "out_proj"}
    assert [c.block for c in anatomy.candidates if c.kind == "in_proj"] == [0, 1, 2, 3]
    assert anatomy.head == anatomy.embedding == "backbone.embeddings"
    assert anatomy.component("lm_head").name == "backbone.embeddings", "tied: one component, two names"


def test_parallel_hybrid() -> None:
    anatomy = _anatomy("falcon_h1")
    assert _kinds(anatomy, "ssm") == {"in_proj", "out_proj"}
    assert _kinds(anatomy, "attention") == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert _kinds(anatomy, "mlp") == {"gate_proj", "up_proj", "down_proj"}
    q = anatomy.component("model.layers.1.self_attn.q_proj")
    assert q.fused_with == ("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj")
    gate = anatomy.component("model.layers.0.feed_forward.gate_proj")
    assert gate.fused_with == ("model.layers.0.feed_forward.up_proj",)
    assert anatomy.head == "lm_head" != anatomy.embedding


def test_blocks_that_share_weights_share_components() -> None:
    anatomy = _anatomy("zamba2")
    shared = anatomy.component("model.layers.1.shared_transformer.self_attn.q_proj")
    assert shared.blocks == (1, 5), "two memory blocks, used in turn by three hybrid layers"
    assert shared.tied_with == ("model.layers.5.shared_transformer.self_attn.q_proj",)
    assert shared.block == 1, "a change to it is felt from its first use on"


def test_experts_are_one_component_per_stack_and_routers_are_left_alone() -> None:
    anatomy = _anatomy("jamba_experts")
    experts = anatomy.component("model.layers.1.feed_forward.experts.gate_up_proj")
    assert experts.shape == (4, 192, 64)
    assert experts.family == "moe"
    router = anatomy.component("model.layers.1.feed_forward.router")
    assert not router.quantizable
    assert "router" in router.reason


def test_a_family_named_moe_still_has_attention() -> None:
    anatomy = _anatomy("granitemoehybrid")
    assert _kinds(anatomy, "attention") == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert _kinds(anatomy, "ssm") == {"in_proj", "out_proj"}


def test_remote_code_is_understood_from_its_structure(remote_code_folder: Path) -> None:
    anatomy = load(remote_code_folder, trust_remote_code=True).anatomy
    assert _kinds(anatomy, "ssm") == {"in_proj", "x_proj", "out_proj"}
    assert _kinds(anatomy, "attention") == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not anatomy.component("meta_tokens").quantizable
    assert anatomy.head == anatomy.embedding


def test_stacks_of_matrices_outside_modules_are_components() -> None:
    anatomy = _anatomy("zamba")
    assert _kinds(anatomy, "ssm") == {"in_proj", "x_proj", "dt_proj", "out_proj"}
    stack = anatomy.component("model.layers.0.mamba.x_proj_weight")
    assert (stack.shape, stack.weight, stack.block) == ((2, 21, 96), stack.name, 0)


def test_stacks_that_are_multiplied_the_other_way_round_have_a_true_reason() -> None:
    gate = _anatomy("recurrent_gemma").component("model.layers.0.temporal_block.rg_lru.input_gate_weight")
    assert not gate.quantizable
    assert "input-major" in gate.reason
    assert "1,024 values" in gate.reason


def test_tables_and_what_is_in_no_product_have_a_true_reason(remote_code_folder: Path) -> None:
    table = _anatomy("gemma4_text").component("model.embed_tokens_per_layer")
    assert "lookup table" in table.reason
    meta = load(remote_code_folder, trust_remote_code=True).anatomy.component("meta_tokens")
    assert "not used in any matrix product" in meta.reason


def test_an_unknown_component_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"there is no component 'backbone\.layers\.9'"):
        _anatomy("mamba").component("backbone.layers.9")


def test_many_groups_in_mamba2_are_noted() -> None:
    anatomy = LoadedModel("mamba2", Path(), tiny_model("mamba2_groups"), None).anatomy
    assert "in 2 groups" in anatomy.notes[0]
    assert not LoadedModel("mamba2", Path(), tiny_model("mamba2"), None).anatomy.notes
