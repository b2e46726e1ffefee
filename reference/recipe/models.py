"""The architectures as lean trainable modules.

Parameter names and mathematics are those of ``MambaForCausalLM``, ``Mamba2ForCausalLM`` and
``FalconH1ForCausalLM``, so a state dict saved here is a transformers checkpoint as it stands;
``train.py`` proves it by loading the folder back and comparing losses. Hymba, which transformers does not have, is
KL Lens's own module with the Triton scan in place of its loop over time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from scan import chunked_scan, selective_scan
from tokenizer import VOCABULARY
from torch import Tensor, nn
from transformers import FalconH1Config, Mamba2Config, MambaConfig, PretrainedConfig

from kl_lens.model.architectures import HYMBA, hymba, register

register(HYMBA)  # transformers' Auto classes open it too

HIDDEN = 256
# Large enough for the GPT-NeoX vocabulary, as in the published checkpoints.
PUBLISHED = {"mamba-130m": 50280, "mamba2-130m": 50288, "hybrid-139m": 50288}
_SPECIAL = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}


def configuration(name: str) -> PretrainedConfig:
    """The transformers configuration of a reference model, or of one at a published shape."""
    if name == "mamba-130m":
        return MambaConfig(
            vocab_size=PUBLISHED[name],
            hidden_size=768,
            num_hidden_layers=24,
            state_size=16,
            time_step_rank=48,
            architectures=["MambaForCausalLM"],
            dtype="float16",
            **_SPECIAL,
        )
    if name == "mamba2-130m":
        return Mamba2Config(
            vocab_size=PUBLISHED[name],
            hidden_size=768,
            num_hidden_layers=24,
            state_size=128,
            n_groups=1,
            head_dim=64,
            num_heads=24,
            chunk_size=256,
            architectures=["Mamba2ForCausalLM"],
            dtype="float16",
            **_SPECIAL,
        )
    if name == "hybrid-139m":
        return FalconH1Config(
            vocab_size=PUBLISHED[name],
            hidden_size=768,
            num_hidden_layers=10,
            intermediate_size=2048,
            num_attention_heads=12,
            num_key_value_heads=4,
            mamba_d_ssm=1536,
            mamba_expand=2,
            mamba_n_heads=24,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_n_groups=1,
            mamba_chunk_size=256,
            mamba_rms_norm=False,
            max_position_embeddings=2048,
            architectures=["FalconH1ForCausalLM"],
            dtype="float16",
            **_SPECIAL,
        )
    if name == "mamba":
        # A rank of 16 leaves dt_proj with 16 columns: too few for 32-wide GGUF blocks, as in
        # mamba-130m (48), so the fallback path is exercised by a real model.
        return MambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=10,
            state_size=16,
            time_step_rank=16,
            architectures=["MambaForCausalLM"],
            dtype="float16",
            **_SPECIAL,
        )
    if name == "mamba2":
        return Mamba2Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=10,
            state_size=64,
            n_groups=1,
            head_dim=32,
            num_heads=2 * HIDDEN // 32,
            chunk_size=64,
            architectures=["Mamba2ForCausalLM"],
            dtype="float16",
            **_SPECIAL,
        )
    if name == "hybrid":
        return FalconH1Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=6,
            intermediate_size=512,
            num_attention_heads=4,
            num_key_value_heads=2,
            mamba_d_ssm=256,
            mamba_expand=1,
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_state=32,
            mamba_n_groups=1,
            mamba_chunk_size=64,
            mamba_rms_norm=False,
            max_position_embeddings=2048,
            architectures=["FalconH1ForCausalLM"],
            dtype="float16",
            **_SPECIAL,
        )
    if name == "hymba":
        # The published pattern in small: global attention first, in the middle and last, neighbours in between that
        # share keys and values, and a window shorter than the text.
        return hymba.HymbaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=8,
            intermediate_size=192,
            num_attention_heads=4,
            num_key_value_heads=2,
            mamba_d_state=16,
            mamba_dt_rank=8,
            num_memory_tokens=32,
            sliding_window=256,
            global_attn_idx=[0, 4, 7],
            kv_reuse_group=[[1, 2, 3], [5, 6]],
            max_position_embeddings=2048,
            rope_type="default",
            architectures=["HymbaForCausalLM"],
            dtype="float16",
            **_SPECIAL,
        )
    raise SystemExit(
        f"unknown model {name!r}: expected mamba, mamba2, hybrid, hymba or {', '.join(PUBLISHED)}"
    )


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        )


class CausalConv(nn.Module):
    """Depthwise convolution over time as four shifted products, which compile to one kernel."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(channels, 1, taps).uniform_(-(taps**-0.5), taps**-0.5)
        )
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:  # [b, l, channels]
        taps = self.weight.shape[-1]
        length = x.shape[1]
        padded = F.pad(x, (0, 0, taps - 1, 0))
        total = self.bias + sum(
            padded[:, k : k + length] * self.weight[:, 0, k] for k in range(taps)
        )
        return F.silu(total).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.6 * inputs**-0.5)
    return layer


def initial_time_steps(count: int) -> Tensor:
    """Inverse softplus of time steps spread evenly in log between 0.001 and 0.1."""
    dt = torch.exp(torch.rand(count) * math.log(100) + math.log(1e-3))
    return dt + torch.log(-torch.expm1(-dt))


class MambaMixer(nn.Module):
    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        inner = config.intermediate_size
        state = config.state_size
        rank = int(config.time_step_rank)
        self.sizes = [rank, state, state]
        self.in_proj = linear(config.hidden_size, 2 * inner)
        self.conv1d = CausalConv(inner, config.conv_kernel)
        self.x_proj = linear(inner, sum(self.sizes))
        self.dt_proj = nn.Linear(rank, inner)
        nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
        self.dt_proj.bias.data = initial_time_steps(inner)
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = linear(inner, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        x, gate = self.in_proj(hidden).chunk(2, -1)
        x = self.conv1d(x)
        low_rank, b, c = self.x_proj(x).split(self.sizes, -1)
        dt = F.softplus(
            F.linear(low_rank, self.dt_proj.weight).float() + self.dt_proj.bias
        )
        y = selective_scan(x, dt, -self.A_log.exp(), b, c)
        return self.out_proj(((y + self.D * x) * F.silu(gate.float())).to(gate.dtype))


class Mamba2Mixer(nn.Module):
    """Also the SSM half of the hybrid's blocks, which has no gated norm."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        width: int,
        state: int,
        taps: int,
        chunk: int,
        gated_norm: bool,
        epsilon: float,
    ) -> None:
        super().__init__()
        inner = heads * width
        # Any chunk gives the same result; short ones need less memory for the gradients.
        self.heads = heads
        self.chunk = min(chunk, 64)
        self.sizes = [inner, inner + 2 * state, heads]
        self.conv_sizes = [inner, state, state]
        self.in_proj = linear(hidden, sum(self.sizes))
        self.conv1d = CausalConv(inner + 2 * state, taps)
        self.dt_bias = nn.Parameter(initial_time_steps(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = RMSNorm(inner, epsilon) if gated_norm else None
        self.out_proj = linear(inner, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, xbc, dt = self.in_proj(hidden).split(self.sizes, -1)
        x, b, c = self.conv1d(xbc).split(self.conv_sizes, -1)
        x = x.unflatten(-1, (self.heads, -1))
        dt = F.softplus(dt.float() + self.dt_bias)
        y = chunked_scan(x, dt, -self.A_log.exp(), b, c, self.chunk)
        y = (y + self.D[:, None] * x).flatten(-2) * F.silu(gate.float())
        if self.norm is not None:
            y = self.norm(y)
        return self.out_proj(y.to(gate.dtype))


class MixerBlock(nn.Module):
    """Norm, mixer, residual: a block of Mamba or Mamba-2."""

    def __init__(self, mixer: nn.Module, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, epsilon)
        self.mixer = mixer

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mixer(self.norm(hidden))


class Attention(nn.Module):
    def __init__(self, config: FalconH1Config) -> None:
        super().__init__()
        self.width = config.hidden_size // config.num_attention_heads
        self.repeats = config.num_attention_heads // config.num_key_value_heads
        self.base = config.rope_parameters["rope_theta"]
        self.q_proj = linear(config.hidden_size, config.num_attention_heads * self.width)
        self.k_proj = linear(config.hidden_size, config.num_key_value_heads * self.width)
        self.v_proj = linear(config.hidden_size, config.num_key_value_heads * self.width)
        self.o_proj = linear(config.num_attention_heads * self.width, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        split = lambda t: t.unflatten(-1, (-1, self.width)).transpose(1, 2)  # noqa: E731
        q = split(self.q_proj(hidden))
        k = split(self.k_proj(hidden))
        v = split(self.v_proj(hidden))
        q = self.rotate(q).to(v.dtype)
        k = self.rotate(k).to(v.dtype)
        k = k.repeat_interleave(self.repeats, 1)
        v = v.repeat_interleave(self.repeats, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))

    def rotate(self, x: Tensor) -> Tensor:
        half = self.width // 2
        frequency = self.base ** (-torch.arange(half, device=x.device) / half)
        angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
        first, second = x.float().chunk(2, -1)
        return torch.cat(
            [
                first * angle.cos() - second * angle.sin(),
                second * angle.cos() + first * angle.sin(),
            ],
            -1,
        )


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x) * F.silu(self.gate_proj(x)))


class HybridBlock(nn.Module):
    """Attention and Mamba-2 side by side on the same normed input, then a gated feed-forward."""

    def __init__(self, config: FalconH1Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mamba = Mamba2Mixer(
            config.hidden_size,
            config.mamba_n_heads,
            config.mamba_d_head,
            config.mamba_d_state,
            config.mamba_d_conv,
            config.mamba_chunk_size,
            gated_norm=False,
            epsilon=config.rms_norm_eps,
        )
        self.self_attn = Attention(config)
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.mamba(normed) + self.self_attn(normed)
        return hidden + self.feed_forward(self.pre_ff_layernorm(hidden))


def _block(config: PretrainedConfig) -> nn.Module:
    if isinstance(config, FalconH1Config):
        return HybridBlock(config)
    if isinstance(config, MambaConfig):
        mixer: nn.Module = MambaMixer(config)
    else:
        mixer = Mamba2Mixer(
            config.hidden_size,
            config.num_heads,
            config.head_dim,
            config.state_size,
            config.conv_kernel,
            config.chunk_size,
            gated_norm=True,
            epsilon=config.layer_norm_epsilon,
        )
    return MixerBlock(mixer, config.hidden_size, config.layer_norm_epsilon)


class LanguageModel(nn.Module):
    """Embedding, blocks, norm and a head tied to the embedding, under transformers' names."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hybrid = isinstance(config, FalconH1Config)
        self.trunk, self.embedding, self.final_norm = (
            ("model", "embed_tokens", "final_layernorm")
            if hybrid
            else ("backbone", "embeddings", "norm_f")
        )
        trunk = nn.Module()
        trunk.add_module(
            self.embedding, nn.Embedding(config.vocab_size, config.hidden_size)
        )
        trunk.add_module(
            "layers",
            nn.ModuleList(_block(config) for _ in range(config.num_hidden_layers)),
        )
        epsilon = config.rms_norm_eps if hybrid else config.layer_norm_epsilon
        trunk.add_module(self.final_norm, RMSNorm(config.hidden_size, epsilon))
        self.add_module(self.trunk, trunk)
        nn.init.normal_(self.embedding_weight(), std=0.02)
        with torch.no_grad():  # keep the residual stream's variance level with depth
            for name, parameter in self.named_parameters():
                if name.endswith(
                    ("out_proj.weight", "o_proj.weight", "down_proj.weight")
                ):
                    parameter /= math.sqrt(2 * config.num_hidden_layers)

    def embedding_weight(self) -> nn.Parameter:
        return getattr(getattr(self, self.trunk), self.embedding).weight

    def blocks(self) -> nn.ModuleList:
        return getattr(self, self.trunk).layers

    def features(self, ids: Tensor) -> Tensor:
        """The normed hidden states the head reads, [b, l, hidden]."""
        hidden = F.embedding(ids, self.embedding_weight())
        for block in self.blocks():
            hidden = block(hidden)
        return getattr(getattr(self, self.trunk), self.final_norm)(hidden)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.features(ids), self.embedding_weight())


class HymbaLanguageModel(nn.Module):
    """KL Lens's Hymba behind the same interface, its head tied to the embedding."""

    def __init__(self, config: hymba.HymbaConfig) -> None:
        super().__init__()
        hymba.mamba_selective_scan = _hymba_scan
        hymba.causal_conv1d_fn = _hymba_convolution
        self.model = hymba.HymbaModel(config)
        inner = config.inner_size
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "dt_proj" in name:
                    steps = parameter.dim() == 1
                    rank = config.mamba_dt_rank
                    parameter.copy_(
                        initial_time_steps(inner)
                        if steps
                        else parameter.uniform_(-1, 1) * rank**-0.5
                    )
                elif "_proj" in name:
                    parameter.normal_(std=0.6 * parameter.shape[1] ** -0.5)
                elif name.endswith("conv1d.weight"):
                    parameter.uniform_(
                        -(config.mamba_d_conv**-0.5), config.mamba_d_conv**-0.5
                    )
                elif name.endswith(("memory_tokens", "embed_tokens.weight")):
                    parameter.normal_(std=0.02)
                if name.endswith(("out_proj.weight", "down_proj.weight")):
                    parameter /= math.sqrt(2 * config.num_hidden_layers)

    def embedding_weight(self) -> nn.Parameter:
        return self.model.embed_tokens.weight

    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    def features(self, ids: Tensor) -> Tensor:
        return self.model(ids).last_hidden_state


def _hymba_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, D: Tensor, z: Tensor, **_: Any
) -> Tensor:
    x = x.mT.contiguous()
    gate = z.mT
    dt = F.softplus(dt.mT.float()).contiguous()
    y = selective_scan(
        x, dt, a, b.mT.to(x.dtype).contiguous(), c.mT.to(x.dtype).contiguous()
    )
    return ((y + D * x) * F.silu(gate.float())).mT


def _hymba_convolution(
    x: Tensor, weight: Tensor, bias: Tensor, activation: str = "silu"
) -> Tensor:
    taps = weight.shape[1]
    length = x.shape[2]
    padded = F.pad(x, (taps - 1, 0))
    total = bias[:, None] + sum(
        padded[:, :, k : k + length] * weight[:, k, None] for k in range(taps)
    )
    return F.silu(total).to(x.dtype)


def language_model(config: PretrainedConfig) -> nn.Module:
    return (HymbaLanguageModel if config.model_type == "hymba" else LanguageModel)(config)


def next_token_losses(features: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each target in nats, [b, l]."""
    logits = F.linear(features, head).float()
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(targets.shape)
