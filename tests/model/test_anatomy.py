"""The anatomy: every weight once, with what it is, where it runs, and why it is left alone if it is."""

import functools
import re
from pathlib import Path

import pytest

from kl_lens.base.errors import CheckpointError
from kl_lens.model import Anatomy, LoadedModel, load
from kl_lens.model.anatomy import REASONS
from kl_lens.run.records import Component
from tests.families import CONFIGS, UNUSUAL, tiny_model


@functools.cache
def _anatomy(family: str) -> Anatomy:
    return LoadedModel(family, Path(), tiny_model(family), None).anatomy


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
            assert component.kind not in (
                "conv1d",
                "A_log",
                "D",
                "dt_bias",
                "norm",
                "bias",
                "router",
            )


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
KINDS = {
    "mamba": {"ssm": {"in_proj", "x_proj", "dt_proj", "out_proj"}},
    "falcon_h1": {
        "ssm": {"in_proj", "out_proj"},
        "attention": ATTENTION,
        "mlp": {"gate_proj", "up_proj", "down_proj"},
    },
    "granitemoehybrid": {
        "ssm": {"in_proj", "out_proj"},
        "attention": ATTENTION,
    },  # in spite of its name
    "hymba": {
        "ssm": {"in_proj", "x_proj", "dt_proj", "out_proj"}
    },  # lists of one matrix each
    "zamba": {
        "ssm": {"in_proj", "x_proj", "dt_proj", "out_proj"}
    },  # stacks of matrices outside modules
    "remote code": {"ssm": {"in_proj", "x_proj", "out_proj"}, "attention": ATTENTION},
}


@pytest.mark.parametrize("family", KINDS)
def test_what_a_component_is_follows_from_the_structure(
    family: str, remote_code_folder: Path
) -> None:
    remote = family == "remote code"
    anatomy = (
        load(remote_code_folder, trust_remote_code=True).anatomy
        if remote
        else _anatomy(family)
    )
    for part, kinds in KINDS[family].items():
        assert {c.kind for c in anatomy.candidates if c.family == part} == kinds
    if remote:
        assert "not used in any matrix product" in anatomy.component("meta_tokens").reason
        assert anatomy.head == anatomy.embedding


def test_weights_with_several_names_are_one_component() -> None:
    anatomy = _anatomy("mamba")
    assert [c.block for c in anatomy.candidates if c.kind == "in_proj"] == [0, 1, 2, 3]
    assert (
        anatomy.head
        == anatomy.embedding
        == anatomy.component("lm_head").name
        == "backbone.embeddings"
    )
    with pytest.raises(
        CheckpointError, match=r"there is no component 'backbone\.layers\.9'"
    ):
        anatomy.component("backbone.layers.9")
    assert _anatomy("falcon_h1").head == "lm_head" != _anatomy("falcon_h1").embedding
    shared = _anatomy("zamba2").component(
        "model.layers.1.shared_transformer.self_attn.q_proj"
    )
    assert shared.blocks == (1, 5), (
        "two memory blocks, used in turn by three hybrid layers"
    )
    assert shared.tied_with == ("model.layers.5.shared_transformer.self_attn.q_proj",)
    assert shared.block == 1, "a change to it is felt from its first use on"


def test_siblings_that_runtimes_fuse_know_each_other() -> None:
    anatomy = _anatomy("falcon_h1")
    attention = "model.layers.1.self_attn"
    assert anatomy.component(f"{attention}.q_proj").fused_with == (
        f"{attention}.k_proj",
        f"{attention}.v_proj",
    )
    gate = anatomy.component("model.layers.0.feed_forward.gate_proj")
    assert gate.fused_with == ("model.layers.0.feed_forward.up_proj",)


def test_stacks_of_matrices_are_components() -> None:
    experts = _anatomy("jamba_experts").component(
        "model.layers.1.feed_forward.experts.gate_up_proj"
    )
    assert (experts.shape, experts.family) == ((4, 192, 64), "moe")
    stack = _anatomy("zamba").component("model.layers.0.mamba.x_proj_weight")
    assert (stack.shape, stack.weight, stack.block) == ((2, 21, 96), stack.name, 0)


@pytest.mark.parametrize(
    ("family", "name", "reason"),
    [
        ("jamba_experts", "model.layers.1.feed_forward.router", "router"),
        ("gemma4_text", "model.embed_tokens_per_layer", "lookup table"),
        (
            "recurrent_gemma",
            "model.layers.0.temporal_block.rg_lru.input_gate_weight",
            "input-major.*1,024 values",
        ),
    ],
)
def test_what_is_left_alone_has_a_true_reason(
    family: str, name: str, reason: str
) -> None:
    component = _anatomy(family).component(name)
    assert not component.quantizable
    assert re.search(reason, component.reason)


def test_many_groups_in_mamba2_are_noted() -> None:
    assert "in 2 groups" in _anatomy("mamba2_groups").notes[0]
    assert not _anatomy("mamba2").notes
