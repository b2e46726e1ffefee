"""Hymba (nvidia/Hymba-1.5B-Base and -Instruct): attention and Mamba heads in parallel in every block.

The published code needs CUDA packages and an old transformers. This is the same function in plain PyTorch, with the
published names of parameters and settings, written from the paper (arXiv 2411.13676) and what that code computes:

- learned *meta tokens* come before every text, at its first positions, and give no logits;
- one `in_proj` makes queries, keys, values, the Mamba heads' input and their gate; both outputs are normalised and
  averaged before `out_proj`;
- a few layers attend to everything, the others to the last `sliding_window` positions, to themselves, and to the meta
  tokens;
- in a group of `kv_reuse_group` all layers attend to the keys and values of the first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

# Called by these names: fast kernels and exporters replace them.
from transformers.models.mamba.modeling_mamba import (
    causal_conv1d_fn,
    mamba_selective_scan,
)

from kl_lens.base.errors import CheckpointError

_NTK_FACTOR = 2  # fixed in the published code, not in config.json
# The supported settings: those of published checkpoints, or equivalent ones.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_hidden_act": ("silu",),
    "kq_norm": ("none", None),
    "kv_reuse_every_i_layer": (-1,),
    "mamba_inner_layernorms": (True,),
    "memory_tokens_interspersed_every": (0,),
    "num_mamba": (1,),
    "rope": (True,),
    "rope_type": ("ntk", "default", None),
}
KeysValues = tuple[Tensor, Tensor]


class HymbaConfig(PretrainedConfig):
    """The published settings; defaults are those of Hymba-1.5B. Settings of its CUDA kernels have no effect."""

    model_type = "hymba"

    vocab_size: int = 32001
    hidden_size: int = 1600
    intermediate_size: int = 5504
    num_hidden_layers: int = 32
    num_attention_heads: int = 25
    num_key_value_heads: int = 5
    hidden_act: str = "silu"
    mlp_hidden_act: str = "silu"
    mlp_bias: bool = False
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    sliding_window: int = 1024
    global_attn_idx: list[int] | None = None
    kv_reuse_group: list[list[int]] | None = None
    kv_reuse_every_i_layer: int = -1
    num_memory_tokens: int = 128
    max_position_embeddings: int = 8192
    orig_max_position_embeddings: int | None = 2048
    rope: bool = True
    rope_theta: float = 10000.0
    rope_type: str | None = "ntk"
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: float = 2
    mamba_dt_rank: int | str = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_inner_layernorms: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self, **settings: Any) -> None:
        # "flex": transformers would look for it.
        settings.pop("attn_implementation", None)
        if self.mamba_dt_rank == "auto":
            self.mamba_dt_rank = math.ceil(self.hidden_size / 16)
        super().__post_init__(**settings)
        for name, allowed in _ONLY.items():
            if (value := getattr(self, name, allowed[0])) not in allowed:
                raise CheckpointError(
                    f"config.json: {name} is {value!r}, not {allowed[0]!r} as published"
                )

    @property
    def inner_size(self) -> int:
        """Total width of the Mamba heads, and of the values of attention."""
        return int(self.mamba_expand * self.hidden_size)

    def keys_from(self, layer: int) -> int:
        """The layer whose keys and values this one attends to."""
        return next(
            (group[0] for group in self.kv_reuse_group or () if layer in group), layer
        )

    def is_global(self, layer: int) -> bool:
        return self.global_attn_idx is None or layer in self.global_attn_idx


def _rotated(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotary embedding of x (batch, heads, time, width)."""
    first, second = x.chunk(2, -1)
    cosine, sine = rotary
    return torch.cat(
        [first * cosine - second * sine, second * cosine + first * sine], -1
    ).to(x.dtype)


class HymbaBlock(nn.Module):
    """The hybrid heads of one layer."""

    def __init__(self, config: HymbaConfig, layer_idx: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = config.inner_size
        states = config.mamba_d_state
        rank = int(config.mamba_dt_rank)
        self.layer_idx = layer_idx
        self.heads = config.num_attention_heads
        self.key_heads = config.num_key_value_heads
        share = self.key_heads / self.heads
        # Queries, keys and values of its own, Mamba, gate.
        self.sizes = [hidden, inner, inner]
        if config.keys_from(layer_idx) == layer_idx:
            self.sizes[1:1] = [int(share * hidden), int(share * inner)]
        self.scan_sizes = [rank, states, states]
        self.in_proj = nn.Linear(hidden, sum(self.sizes), bias=config.mamba_proj_bias)
        self.out_proj = nn.Linear(inner, hidden, bias=config.mamba_proj_bias)
        self.conv1d = nn.Conv1d(
            inner, inner, config.mamba_d_conv, groups=inner, bias=config.mamba_conv_bias
        )
        # Lists of one, as published.
        self.x_proj = nn.ModuleList([nn.Linear(inner, sum(self.scan_sizes), bias=False)])
        self.dt_proj = nn.ModuleList([nn.Linear(rank, inner)])
        self.A_log = nn.ParameterList(
            [torch.arange(1.0, states + 1).log().repeat(inner, 1)]
        )
        self.D = nn.ParameterList([torch.ones(inner)])
        self.pre_avg_layernorm1, self.pre_avg_layernorm2 = (
            LlamaRMSNorm(inner, config.rms_norm_eps) for _ in range(2)
        )
        self.dt_layernorm = LlamaRMSNorm(rank, config.rms_norm_eps)
        self.B_layernorm, self.C_layernorm = (
            LlamaRMSNorm(states, config.rms_norm_eps) for _ in range(2)
        )

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        rotary: Tensor,
        shared: KeysValues | None = None,
        past_key_values: Any = None,
    ) -> tuple[Tensor, KeysValues]:
        query, *keys_values, x, gate = self.in_proj(hidden_states).split(self.sizes, -1)
        if shared is None:
            key, value = (
                part.unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
                for part in keys_values
            )
            shared = _rotated(key, rotary), value
            if past_key_values is not None:
                shared = past_key_values.update(*shared, self.layer_idx)
        attended = self._attend(query, shared, mask, rotary)

        x = x.transpose(1, 2)
        if past_key_values is not None:
            x = past_key_values.update_conv_state(
                x, self.layer_idx, conv_kernel_size=self.conv1d.kernel_size[0]
            )
        x = causal_conv1d_fn(
            x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu"
        )
        step, b, c = self.x_proj[0](x.transpose(1, 2)).split(self.scan_sizes, -1)
        step = self.dt_layernorm(step)
        b = self.B_layernorm(b)
        c = self.C_layernorm(c)
        scanned = mamba_selective_scan(
            x,
            self.dt_proj[0](step).transpose(1, 2),
            -torch.exp(self.A_log[0].float()),
            b.transpose(1, 2),
            c.transpose(1, 2),
            D=self.D[0].float(),
            z=gate.transpose(1, 2),
            delta_softplus=True,
        )
        scanned = scanned.transpose(1, 2).to(attended.dtype)
        mean = (self.pre_avg_layernorm1(attended) + self.pre_avg_layernorm2(scanned)) / 2
        return self.out_proj(mean), shared

    def _attend(
        self, query: Tensor, shared: KeysValues, mask: Tensor | None, rotary: Tensor
    ) -> Tensor:
        query = _rotated(query.unflatten(-1, (self.heads, -1)).transpose(1, 2), rotary)
        key, value = (
            part.repeat_interleave(self.heads // self.key_heads, 1) for part in shared
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        return mixed.transpose(1, 2).flatten(2)


class HymbaDecoderLayer(nn.Module):
    def __init__(self, config: HymbaConfig, layer_idx: int) -> None:
        super().__init__()
        self.mamba = HymbaBlock(config, layer_idx)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        # A mixture of one expert, as published: `moe.experts.0`.
        self.moe = nn.ModuleDict({"experts": nn.ModuleList([LlamaMLP(config)])})
        self.pre_moe_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden_states: Tensor, **arguments: Any
    ) -> tuple[Tensor, KeysValues]:
        """Returns hidden states, and the keys and values it attended to."""
        mixed, shared = self.mamba(self.input_layernorm(hidden_states), **arguments)
        hidden_states = hidden_states + mixed
        expert = self.moe["experts"][0]  # type: ignore[index]
        return hidden_states + expert(self.pre_moe_layernorm(hidden_states)), shared


class HymbaPreTrainedModel(PreTrainedModel):
    config_class = HymbaConfig
    base_model_prefix = "model"
    _supports_sdpa = True


class HymbaModel(HymbaPreTrainedModel):
    def __init__(self, config: HymbaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            HymbaDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.final_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.memory_tokens = nn.Parameter(
            torch.randn(config.num_memory_tokens, config.hidden_size)
        )
        self.post_init()

    def forward(
        self, input_ids: Tensor, past_key_values: Any = None, **_: Any
    ) -> BaseModelOutputWithPast:
        """`past_key_values` comes from an exporter: convolutions, keys and values. It handles the scan states
        itself."""
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        hidden = self.embed_tokens(input_ids)
        length = hidden.shape[1]
        # All of them before the first token, none later; without a branch, for tracing.
        cached = torch.as_tensor(past).clamp(max=self.config.num_memory_tokens)
        meta = self.memory_tokens[cached:].to(hidden.dtype)
        hidden = torch.cat([meta.expand(hidden.shape[0], -1, -1), hidden], 1)
        positions = torch.arange(hidden.shape[1], device=hidden.device) + past
        rotary = self._rotary(positions)
        masks = self._masks(positions, past, by_itself=past_key_values is None)
        reusable: dict[int, KeysValues] = {}
        for index, layer in enumerate(self.layers):
            hidden, reusable[index] = layer(
                hidden,
                mask=masks[self.config.is_global(index)],
                rotary=rotary,
                shared=reusable.get(self.config.keys_from(index)),
                past_key_values=past_key_values,
            )
        hidden = self.final_layernorm(hidden)[:, -length:]
        return BaseModelOutputWithPast(
            last_hidden_state=hidden, past_key_values=past_key_values
        )

    def _rotary(self, positions: Tensor) -> Tensor:
        """Cosines and sines, (2, positions, half a head)."""
        width = self.config.hidden_size // self.config.num_attention_heads
        base = self.config.rope_theta
        if self.config.rope_type == "ntk":
            longer = (
                self.config.max_position_embeddings
                / self.config.orig_max_position_embeddings
            )
            base *= (_NTK_FACTOR * longer - (_NTK_FACTOR - 1)) ** (width / (width - 2))
        exponents = torch.arange(0, width, 2, device=positions.device).float() / width
        angles = positions.float()[:, None] * base**-exponents
        return torch.stack([angles.cos(), angles.sin()])

    def _masks(
        self, positions: Tensor, past: Any, *, by_itself: bool
    ) -> dict[bool, Tensor | None]:
        """Attention masks of global layers (True) and of others; None: all earlier positions."""
        window = self.config.sliding_window
        meta = self.config.num_memory_tokens
        if by_itself and positions.shape[0] - 1 - meta <= window:
            return {True: None, False: None}
        keys = torch.arange(positions.shape[0] + past, device=positions.device)
        distance = positions[:, None] - keys[None]
        before = distance >= 0
        near = before & ((distance <= window) | (keys < meta)[None])
        return {True: None if by_itself else before, False: near}


class HymbaForCausalLM(HymbaPreTrainedModel):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers')

    def __init__(self, config: HymbaConfig) -> None:
        super().__init__(config)
        self.model = HymbaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        output = self.model(input_ids, past_key_values=past_key_values)
        return CausalLMOutputWithPast(
            logits=self.lm_head(output.last_hidden_state), past_key_values=past_key_values
        )
