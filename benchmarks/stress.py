"""Plants outlier channels in chosen components without changing what the model computes.

Large pretrained Mamba models have outlier channels, and with them components that low precision destroys; small
ones do not. `stress` rescales a channel on both sides of a product: up in the columns of one projection, down
in whatever feeds that column (a norm's weight, or the rows of the projection before it). In float32 the outputs
stay the same, and with factors that are powers of two they stay the same to the last bit of each weight; but the
planted columns dominate their rows' quantization scales, so the chosen components become sensitive: a known
ground truth. A stressed model is an instrument for tests and demonstrations, not a finding about the original.

Not every component can be stressed: the input of Mamba-1's `x_proj` and `out_proj` passes through SiLU gates,
which no rescaling commutes with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from kl_lens.base.errors import CheckpointError
from kl_lens.model import LoadedModel

# Where outliers are planted in the stressed variants: (components, factor), two channels each.
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


@dataclass(frozen=True)
class Planted:
    """Which columns of which components became larger."""

    components: tuple[str, ...]
    channels: tuple[int, ...]


@dataclass(frozen=True)
class _Pair:
    """Columns of `readers` (names) that all read one channel, and the function that scales that channel."""

    readers: tuple[str, ...]
    channels: int
    scale_source: Callable[[int, float], None]
    columns_of: Callable[[int], list[int]]


def plant(model: LoadedModel, name: str) -> None:
    """The stressed variant of a reference, in place."""
    for pattern, factor in STRESSED[name]:
        stress(model, pattern, factor=factor)


def stress(
    model: LoadedModel,
    components: str = ".*",
    *,
    channels: int = 2,
    factor: float = 32.0,
    seed: int = 0,
) -> list[Planted]:
    """Makes so many columns `factor` times larger in every stressable component whose name matches; says where.

    Components that read the same norm (q, k and v; both branches of a parallel block) are stressed together. Raises
    CheckpointError if nothing matches, or if the outputs moved after all; then everything is undone.
    """
    if math.log2(factor) % 1:
        raise CheckpointError(f"factor {factor} is no power of two; the outputs would not stay the same")
    pairs = list(_pairs(model))
    chosen = [pair for pair in pairs if any(re.search(components, name) for name in pair.readers)]
    if not chosen:
        able = sorted({name.rpartition(".")[2] for pair in pairs for name in pair.readers})
        raise CheckpointError(
            f"no component that can be stressed matches {components!r}; in {model.name} these kinds can be: "
            f"{', '.join(able) or 'none'}"
        )
    ids = _probe_ids(model)
    before = model.chain.full_logits(ids)
    originals = {name: p.detach().clone() for name, p in model.model.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    planted = [_plant(model, pair, channels, factor, generator) for pair in chosen]
    model.__dict__.pop("fingerprint", None)
    after = model.chain.full_logits(ids)
    drift = float((after - before).abs().max() / before.abs().max())
    if not drift <= 1e-4:
        with torch.no_grad():
            for name, parameter in model.model.named_parameters():
                parameter.copy_(originals[name])
        raise CheckpointError(
            f"stressing {model.name} moved its outputs by {drift:.1e} of their range; undone: "
            "this architecture is wired otherwise than stress() assumes"
        )
    return planted


@torch.no_grad()
def _plant(
    model: LoadedModel, pair: _Pair, channels: int, factor: float, generator: torch.Generator
) -> Planted:
    picked = torch.randperm(pair.channels, generator=generator)[:channels].tolist()
    for channel in picked:
        pair.scale_source(channel, 1 / factor)
        for name in pair.readers:
            weight: torch.Tensor = model.model.get_parameter(f"{name}.weight")
            weight[:, pair.columns_of(channel)] *= factor
    return Planted(pair.readers, tuple(sorted(picked)))


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
    "norm": ("mixer.in_proj", "mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.up_proj"),
    "input_layernorm": (
        "mamba.in_proj",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
    ),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "pre_ff_layernorm": ("feed_forward.gate_proj", "feed_forward.up_proj"),
}


def _norm_pairs(name: str, module: nn.Module) -> Iterator[_Pair]:
    for norm_name, readers in _READERS_OF_NORMS.items():
        norm = getattr(module, norm_name, None)
        if norm is None or not _is_norm(norm):
            continue
        present = [f"{name}.{reader}" for reader in readers if _linear(module, reader) is not None]
        if present:
            yield _from_norm(norm, present)


def _gated_norm_pair(name: str, module: nn.Module) -> Iterator[_Pair]:
    """Mamba-2: the norm after the gate feeds out_proj alone."""
    norm = getattr(module, "norm", None)
    if hasattr(module, "A_log") and norm is not None and _is_norm(norm) and _linear(module, "out_proj"):
        yield _from_norm(norm, [f"{name}.out_proj"])


def _time_step_pair(name: str, module: nn.Module) -> Iterator[_Pair]:
    """Mamba-1: the first rows of x_proj feed dt_proj, unless a norm stands between them."""
    x_proj, dt_proj = _linear(module, "x_proj"), _linear(module, "dt_proj")
    if x_proj is None or dt_proj is None or hasattr(module, "dt_layernorm"):
        return

    def scale(channel: int, by: float) -> None:
        x_proj.weight[channel] *= by

    yield _Pair((f"{name}.dt_proj",), dt_proj.in_features, scale, lambda c: [c])


def _value_output_pair(name: str, module: nn.Module, config: object) -> Iterator[_Pair]:
    """Attention: a row of v_proj is read by one column of o_proj per query head of its group."""
    v_proj, o_proj = _linear(module, "v_proj"), _linear(module, "o_proj")
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(module, "head_dim", None)
    if v_proj is None or o_proj is None or not heads or not width or o_proj.in_features != heads * width:
        return
    per_group = heads // (v_proj.out_features // width)

    def scale(channel: int, by: float) -> None:
        v_proj.weight[channel] *= by
        if v_proj.bias is not None:
            v_proj.bias[channel] *= by

    def columns(channel: int) -> list[int]:
        group, offset = divmod(channel, width)
        return [(group * per_group + k) * width + offset for k in range(per_group)]

    yield _Pair((f"{name}.o_proj",), v_proj.out_features, scale, columns)


def _gated_mlp_pair(name: str, module: nn.Module) -> Iterator[_Pair]:
    """gate(x) · up(x) is linear in up(x): its rows against the columns of down_proj."""
    up, down = _linear(module, "up_proj"), _linear(module, "down_proj")
    if up is None or down is None or _linear(module, "gate_proj") is None:
        return

    def scale(channel: int, by: float) -> None:
        up.weight[channel] *= by
        if up.bias is not None:
            up.bias[channel] *= by

    yield _Pair((f"{name}.down_proj",), down.in_features, scale, lambda c: [c])


def _from_norm(norm: nn.Module, readers: list[str]) -> _Pair:
    weight: torch.Tensor = norm.weight  # type: ignore[assignment]

    def scale(channel: int, by: float) -> None:
        weight[channel] *= by

    return _Pair(tuple(readers), weight.numel(), scale, lambda c: [c])


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and isinstance(weight, torch.Tensor) and weight.dim() == 1


def _linear(module: nn.Module, path: str) -> nn.Linear | None:
    found: object = module
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Linear) else None


def _probe_ids(model: LoadedModel) -> torch.Tensor:
    embedding = model.anatomy.component(model.anatomy.embedding)
    return torch.randint(0, embedding.shape[0], (2, 33), generator=torch.Generator().manual_seed(0))
