"""Plants outlier channels in chosen components without changing what the model computes.

Large pretrained Mamba models have outlier channels, and with them components that low precision destroys; small
ones do not. `plant` rescales channels on both sides of a product: up in the columns of one projection, down
in whatever feeds that column (a norm's weight, or the rows of the projection before it). In float32 the outputs
stay the same, because factors are powers of two; but the planted columns dominate their rows' quantization scales,
so the chosen components become sensitive: a known ground truth. A stressed model is an instrument for tests and
demonstrations, not a finding about the original.

Not every component can be stressed: the input of Mamba-1's `x_proj` and `out_proj` passes through SiLU gates,
which no rescaling commutes with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from kl_lens.model import LoadedModel

# Where outliers are planted in the stressed variants: (components, factor), CHANNELS each.
STRESSED = {
    "reference:mamba": [
        (r"layers\.0\..*in_proj", 64.0),
        (r"layers\.4\..*dt_proj", 64.0),
        (r"layers\.9\..*in_proj", 16.0),
    ],
    "reference:mamba2": [
        (r"layers\.0\..*in_proj", 64.0),
        (r"layers\.9\..*out_proj", 64.0),
        (r"layers\.4\..*out_proj", 16.0),
    ],
    "reference:hybrid": [
        (r"layers\.0\..*(in_proj|q_proj)", 32.0),
        (r"layers\.5\..*o_proj", 64.0),
        (r"layers\.3\..*down_proj", 64.0),
    ],
}
CHANNELS = 2


@dataclass(frozen=True)
class _Pair:
    """Columns of `readers` (names) that all read one channel, and the module whose rows make that channel."""

    readers: tuple[str, ...]
    channels: int
    source: nn.Module
    columns_of: Callable[[int], list[int]] = lambda channel: [channel]


def plant(model: LoadedModel, name: str) -> None:
    """The stressed variant of a reference, in place."""
    ids = torch.randint(
        0, model.config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0)
    )
    before = model.chain.full_logits(ids)
    for pattern, factor in STRESSED[name]:
        generator = torch.Generator().manual_seed(0)
        for pair in _pairs(model):
            if any(re.search(pattern, reader) for reader in pair.readers):
                _plant(model, pair, factor, generator)
    model.__dict__.pop("fingerprint", None)
    drift = float(
        (model.chain.full_logits(ids) - before).abs().max() / before.abs().max()
    )
    if not drift <= 1e-4:
        raise SystemExit(
            f"planting outliers in {name} moved its outputs by {drift:.1e} of their range"
        )


@torch.no_grad()
def _plant(
    model: LoadedModel, pair: _Pair, factor: float, generator: torch.Generator
) -> None:
    for channel in torch.randperm(pair.channels, generator=generator)[:CHANNELS].tolist():
        pair.source.weight[channel] /= factor
        if getattr(pair.source, "bias", None) is not None:
            pair.source.bias[channel] /= factor
        for name in pair.readers:
            model.model.get_parameter(f"{name}.weight")[:, pair.columns_of(channel)] *= (
                factor
            )


def _pairs(model: LoadedModel) -> Iterator[_Pair]:
    chain = model.chain
    for index, block in enumerate(chain.blocks):
        prefix = f"{chain.blocks_name}.{index}"
        for module_name, module in block.named_modules():
            name = f"{prefix}.{module_name}" if module_name else prefix
            yield from _norm_pairs(name, module)
            yield from _gated_norm_pair(name, module)
            yield from _time_step_pair(name, module)
            yield from _value_output_pair(name, module, model.config)
            yield from _gated_mlp_pair(name, module)


# Which projections read which norm inside one block. Names are relative to the block.
_READERS_OF_NORMS = {
    "norm": ("mixer.in_proj",),
    "input_layernorm": (
        "mamba.in_proj",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
    ),
}


def _norm_pairs(name: str, module: nn.Module) -> Iterator[_Pair]:
    for norm_name, readers in _READERS_OF_NORMS.items():
        norm = getattr(module, norm_name, None)
        present = [
            f"{name}.{reader}"
            for reader in readers
            if _linear(module, reader) is not None
        ]
        if norm is not None and present:
            yield _Pair(tuple(present), norm.weight.numel(), norm)


def _gated_norm_pair(name: str, module: nn.Module) -> Iterator[_Pair]:
    """Mamba-2: the norm after the gate feeds out_proj alone."""
    norm = getattr(module, "norm", None)
    if hasattr(module, "A_log") and hasattr(
        norm, "weight"
    ):  # a Falcon-H1 may have nothing in its place
        yield _Pair((f"{name}.out_proj",), norm.weight.numel(), norm)


def _time_step_pair(name: str, module: nn.Module) -> Iterator[_Pair]:
    """Mamba-1: the first rows of x_proj feed dt_proj."""
    x_proj = _linear(module, "x_proj")
    dt_proj = _linear(module, "dt_proj")
    if x_proj is not None and dt_proj is not None:
        yield _Pair((f"{name}.dt_proj",), dt_proj.in_features, x_proj)


def _value_output_pair(name: str, module: nn.Module, config: object) -> Iterator[_Pair]:
    """Attention: a row of v_proj is read by one column of o_proj per query head of its group."""
    v_proj = _linear(module, "v_proj")
    o_proj = _linear(module, "o_proj")
    if v_proj is None or o_proj is None:
        return
    width = module.head_dim
    per_group = config.num_attention_heads // (v_proj.out_features // width)

    def columns(channel: int) -> list[int]:
        group, offset = divmod(channel, width)
        return [(group * per_group + k) * width + offset for k in range(per_group)]

    yield _Pair((f"{name}.o_proj",), v_proj.out_features, v_proj, columns)


def _gated_mlp_pair(name: str, module: nn.Module) -> Iterator[_Pair]:
    """gate(x) · up(x) is linear in up(x): its rows against the columns of down_proj."""
    up = _linear(module, "up_proj")
    down = _linear(module, "down_proj")
    if up is not None and down is not None:
        yield _Pair((f"{name}.down_proj",), down.in_features, up)


def _linear(module: nn.Module, path: str) -> nn.Linear | None:
    inner: object = module
    for part in path.split("."):
        inner = getattr(inner, part, None)
    return inner if isinstance(inner, nn.Linear) else None
