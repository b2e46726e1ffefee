"""Models with attention in every layer: Llama, Mistral, Qwen 2 and 3, Gemma 3, Phi 3, Granite, OLMo 2, SmolLM3, GPT-2.

gguf's name map says where each parameter goes. What is special about a family is in one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kl_lens.targets.gguf.architectures import parts
from kl_lens.targets.gguf.architectures.base import (
    Architecture,
    Metadata,
    Reasons,
    Rules,
    Shapes,
    TensorRule,
    Transform,
    as_is,
)
from kl_lens.weights.formats.gguf_blocks import gguf_module

_LEAVES = (".weight", ".bias")
_GATE_AND_UP = "experts.gate_up_proj"
# A window this long is written, with a note about longer texts.
_LONG_WINDOW = 1024
_GEMMA_27B = 62  # layers, by which llama.cpp knows it


@dataclass(frozen=True)
class Family:
    """What is special about a family of transformers."""

    name: str  # llama.cpp's
    is_interleaved: bool = (
        False  # llama.cpp rotates neighbours; rows of queries and keys change places
    )
    has_biases: bool = (
        False  # llama.cpp also has tensors for those that the configuration may switch on
    )
    is_square: bool = (
        False  # llama.cpp expects all heads together to be as wide as the model
    )
    is_plus_one: bool = False  # norms are stored minus one
    scalings: tuple[str, ...] = ("default", "linear", "yarn")  # of rope
    activation: str = "silu"
    settings: Callable[[Any], Metadata] = lambda _: {}
    refusals: Callable[[Any], Reasons] = lambda _: ()


# -- what is special -----------------------------------------------------------------------------------------


def _gemma(config: Any) -> Metadata:
    local = config.rope_parameters["sliding_attention"]
    values: Metadata = {
        "attention.sliding_window": "sliding_window",
        "rope.freq_base_swa": float(local["rope_theta"]),
    }
    if config.final_logit_softcapping:
        values["final_logit_softcapping"] = float(config.final_logit_softcapping)
    return values


def _refuse_gemma(config: Any) -> Reasons:
    layers = range(config.num_hidden_layers)
    if [kind == "full_attention" for kind in config.layer_types] != [
        index % 6 == 5 for index in layers
    ]:
        yield "llama.cpp's gemma3 has full attention in every sixth layer, but this model has it elsewhere"
    size = parts.head_size(config)
    if len(layers) == _GEMMA_27B:
        size = config.hidden_size // config.num_attention_heads
    if config.query_pre_attn_scalar != size:
        yield f"it divides queries by the root of {config.query_pre_attn_scalar}, llama.cpp by that of {size}"
    if config.attn_logit_softcapping or config.use_bidirectional_attention:
        yield "llama.cpp's gemma3 neither caps scores nor looks ahead, but this model does"
    if config.rope_parameters["sliding_attention"]["rope_type"] != "default":
        yield "it scales rope within the sliding window, but llama.cpp does not"


def _experts(config: Any) -> Metadata:
    return {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }


def _refuse_experts(config: Any) -> Reasons:
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        yield "llama.cpp's qwen3moe has experts in every layer, but this model does not"
    yield from parts.refuse_expert_weights(config)


def _refuse_rotating(config: Any) -> Reasons:
    rotating = [index % 4 != 3 for index in range(config.num_hidden_layers)]
    if [bool(rotates) for rotates in config.no_rope_layers] != rotating:
        yield "llama.cpp's smollm3 has no rope in every fourth layer, but this model has none elsewhere"


def _refuse_tied(config: Any) -> Reasons:
    if config.tie_word_embeddings:
        yield "its head is tied to the embedding, but llama.cpp's olmo2 needs one of its own"


def _gpt2(config: Any) -> Metadata:
    return {"attention.layer_norm_epsilon": "layer_norm_epsilon"}


def _refuse_scores(config: Any) -> Reasons:
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        yield "it scales its scores otherwise than llama.cpp's gpt2"


_LLAMA = Family(
    "llama", True, True, scalings=("default", "linear", "yarn", "llama3", "longrope")
)
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Family("qwen2", is_square=True),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3moe", settings=_experts, refusals=_refuse_experts),
    "gemma3_text": Family(
        "gemma3",
        is_plus_one=True,
        scalings=("default", "linear"),
        activation="gelu_pytorch_tanh",
        settings=_gemma,
        refusals=_refuse_gemma,
    ),
    "phi3": Family("phi3", is_square=True, scalings=("default", "longrope")),
    "granite": Family(
        "granite",
        True,
        True,
        scalings=_LLAMA.scalings,
        settings=parts.granite_scales,
    ),
    "olmo2": Family("olmo2", is_square=True, refusals=_refuse_tied),
    "smollm3": Family("smollm3", True, refusals=_refuse_rotating),
    "gpt2": Family(
        "gpt2",
        is_square=True,
        activation="gelu_new",
        settings=_gpt2,
        refusals=_refuse_scores,
    ),
}


# -- the same for all ----------------------------------------------------------------------------------------


def _settings(config: Any) -> Metadata:
    heads = int(config.num_attention_heads)
    values: Metadata = {
        **parts.sizes(
            getattr(config, "intermediate_size", None)
            or getattr(config, "n_inner", None)
            or 4 * config.hidden_size
        ),
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        "attention.key_length": parts.head_size(config),
        "attention.value_length": parts.head_size(config),
        **FAMILIES[config.model_type].settings(config),
    }
    if hasattr(config, "rms_norm_eps"):
        values["attention.layer_norm_rms_epsilon"] = "rms_norm_eps"
    if parts.rope_of(config):
        values |= parts.rope_metadata(config)
    return values


def _window(config: Any) -> int | None:
    """How many tokens back it looks, if llama.cpp looks back further."""
    window = getattr(config, "sliding_window", None)
    if config.model_type == "gemma3_text" or not window:
        return None
    return int(window) if window < config.max_position_embeddings else None


def _refusals(config: Any) -> Reasons:
    family = FAMILIES[config.model_type]
    heads = config.num_attention_heads * parts.head_size(config)
    if family.is_square and heads != config.hidden_size:
        yield f"llama.cpp expects heads of {config.hidden_size} columns together, but they have {heads}"
    window = _window(config)
    if window and window < _LONG_WINDOW:
        yield f"it looks back {window} tokens, but llama.cpp at the whole text"
    biases = () if family.has_biases else ("attention_bias", "mlp_bias")
    yield from family.refusals(config)
    yield from parts.refusals(
        config, *biases, activation=family.activation, scalings=family.scalings
    )


def _notes(config: Any) -> Reasons:
    if window := _window(config):
        yield f"the model looks back {window} tokens, llama.cpp at the whole text: longer texts differ"
    rope = parts.rope_of(config)
    if rope.get("rope_type") == "longrope":
        yield (
            f"llama.cpp takes the rope factors of long texts wherever its context is longer than "
            f"{parts.original_context(config)} tokens, transformers where the text is; KL Lens opens it so"
        )
    if FAMILIES[config.model_type].activation != "silu":
        yield "llama.cpp computes GELU in half precision, so logits differ by about a thousandth of their range"


class AttentionOnly(Architecture):
    """Every parameter goes where gguf's name map says."""

    def tensors(self, config: Any, shapes: Shapes) -> Rules:
        return [*self._mapped(config, shapes), *_rope_factors(config)]

    def _mapped(self, config: Any, shapes: Shapes) -> Iterator[TensorRule]:
        gguf = gguf_module()
        codes = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(
            codes[self.name(config)], config.num_hidden_layers
        )
        for parameter in shapes:
            if parameter.endswith(_GATE_AND_UP):
                stem = parameter.removesuffix(_GATE_AND_UP)
                for index, part in enumerate(("gate", "up")):
                    name = names.get_name(f"{stem}experts.{part}_proj")
                    yield TensorRule(f"{name}.weight", parameter, parts.half(index))
            elif name := names.get_name(parameter, _LEAVES):
                suffix = "" if name.endswith(_LEAVES) else ".weight"
                transform = _transform(config, parameter)
                yield TensorRule(f"{name}{suffix}", parameter, transform)


def _transform(config: Any, parameter: str) -> Transform:
    family = FAMILIES[config.model_type]
    if family.is_plus_one and "norm" in parameter:
        return parts.plus_one
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": getattr(config, "num_key_value_heads", 0),
    }.get(parameter.split(".")[-2])
    if heads and family.is_interleaved:
        return parts.interleaved_heads(heads, parts.rotary(config))
    return as_is


def _rope_factors(config: Any) -> Iterator[TensorRule]:
    """By which llama.cpp divides the frequencies of rope."""
    rope = parts.rope_of(config)
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        plain = parts.plain_frequencies(config)
        scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        factors = tuple((plain / scaled).tolist())
        yield TensorRule("rope_freqs.weight", None, constant=factors)
    elif kind == "longrope":
        for name in ("long", "short"):
            factors = tuple(map(float, rope[f"{name}_factor"]))
            yield TensorRule(f"rope_factors_{name}.weight", None, constant=factors)


_NAMES: Mapping[str, str] = {name: family.name for name, family in FAMILIES.items()}
ARCHITECTURE = AttentionOnly(_NAMES, _settings, lambda *_: [], _refusals, _notes)
