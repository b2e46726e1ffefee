"""Traces a transformers model with its state on the outside and its scans cut out.

The model's own code runs, once, under the tracer. Three things are put in its way: a cache whose convolution and
key/value states are inputs and outputs of the traced graph; functions in place of the state-space scans, which
hand out what enters a scan and return an input of the graph in its place; and an expert layer that does not branch
on data. So neither the length of the prompt nor a choice between prefill and decode is baked into the graph, and
the scans are built afterwards from OpenVINO's own operations (`scans.py`).
"""

from __future__ import annotations

import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kl_lens.base.errors import TargetError
from kl_lens.model.patching import patched, with_globals

# Families whose exported logits are tested against PyTorch's, whole prompts, chunks and single tokens. Any other that
# can be traced is exported, too, once its graph has been proven on the model itself (`graph.py`).
FAMILIES = (
    "mamba",
    "falcon_mamba",
    "mamba2",
    "falcon_h1",
    "zamba2",
    "jamba",
    "bamba",
    "nemotron_h",
    "granitemoehybrid",
    "hymba",
    "zamba",
    "lfm2",
    "lfm2_moe",
    "qwen3_next",
    "qwen3_5_text",
    "kimi_linear",
    "minimax",
    "rwkv",
)
# Scan function that a mixer of transformers calls → our method that replaces it.
_SCANS = {
    "mamba_selective_scan": "selective",
    "mamba2_chunk_scan": "chunked",
    "torch_chunk_gated_delta_rule": "delta",
    "chunk_kimi_delta_attention": "delta",
    "rwkv_linear_attention": "weighted",
}
T = torch.Tensor
_NO_STATE = torch.zeros(1)  # returned as the last state; our cache ignores it
SAMPLE_TOKENS = 7  # anything but 1: models take another path for a single token


@dataclass
class ScanSite:
    """A scan that was cut out of the traced graph: its inputs and the shape of its result."""

    name: str  # the layer's index; ".1", ".2" … for further scans of the same layer
    kind: str  # selective (Mamba-1), chunked (Mamba-2), lightning (MiniMax), delta (gated rule), weighted (RWKV-4)
    state_shape: tuple[int, ...]
    arguments: list[T] = field(default_factory=list)  # from the latest forward
    result_shape: tuple[int, ...] = ()  # without the time axis, which comes first


class GraphCache:
    """Stands in for transformers' cache while tracing: states come from inputs, new states are collected."""

    def __init__(self, states: dict[str, T] | None, graph: GraphForward) -> None:
        self.states = states
        self.graph = graph  # no states: a forward from an empty past
        self.updated: dict[str, T] = {}

    # What a state-space mixer calls. It never sees a state, so it never takes its one-token path.
    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    get_recurrent_state = is_recording_past = has_previous_state = get_conv_state

    def update_conv_state(
        self,
        new: T,
        layer_idx: int | str,
        conv_kernel_size: int = 4,
        state_idx: int = 0,
        **_: Any,
    ) -> T:
        """Puts the last (kernel width − 1) columns in front of (1, channels, time)."""
        past = conv_kernel_size - 1
        name = f"convolution.{layer_idx}" + (f".{state_idx}" if state_idx else "")
        self.graph.convolutions[name] = (new.shape[1], conv_kernel_size)
        if self.states is None:
            return functional.pad(new, (past, 0))
        joined = torch.cat([self.states[name], new], dim=-1)
        self.updated[name] = joined[:, :, -past:]
        return joined

    def update_recurrent_state(self, state: T, layer_idx: int, **_: Any) -> T:
        return state

    # What attention calls.
    def update(self, key: T, value: T, layer_idx: int, *_: Any, **__: Any) -> tuple[T, T]:
        self.graph.attention[layer_idx] = (key.shape[1], key.shape[-1], value.shape[-1])
        if self.states is None:
            return key, value
        key = torch.cat([self.states[f"key.{layer_idx}"], key], dim=2)
        value = torch.cat([self.states[f"value.{layer_idx}"], value], dim=2)
        self.updated[f"key.{layer_idx}"] = key
        self.updated[f"value.{layer_idx}"] = value
        return key, value

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        keys = [k for k in self.states or () if k.startswith("key.")]
        return self.states[keys[0]].shape[2] if self.states and keys else 0


class GraphForward(nn.Module):
    """The function that is traced: (ids, states…, scan results…) → (logits, new states…, scan arguments…)."""

    def __init__(self, model: nn.Module, *, stateful: bool, with_head: bool) -> None:
        super().__init__()
        self.model = model
        self.stateful = stateful
        self.with_head = with_head
        self.sites: list[ScanSite] = []
        # States that the model keeps between calls, except those of its scans. Found by running one forward.
        self.convolutions: dict[str, tuple[int, int]] = {}  # name → (channels, kernel)
        # Layer → (heads, key, value width).
        self.attention: dict[int, tuple[int, int, int]] = {}
        self.probing = False
        self.prefix = 0  # positions that the model itself puts before the first token
        self._results: dict[str, T] = {}
        # Scans of each layer so far in this forward.
        self._calls: Counter[int] = Counter()
        self._time: Any = 0
        self._cache = GraphCache(None, self)

    @property
    def state_names(self) -> list[str]:
        pairs = (
            f"{kind}.{layer}" for layer in self.attention for kind in ("key", "value")
        )
        return [*self.convolutions, *pairs] if self.stateful else []

    def state_shapes(self, sequences: int, past: int) -> list[tuple[int, ...]]:
        """Of what `state_names` names."""
        shapes: list[tuple[int, ...]] = [
            (sequences, channels, kernel - 1)
            for channels, kernel in self.convolutions.values()
        ]
        for heads, *widths in self.attention.values():
            shapes += [(sequences, heads, past, width) for width in widths]
        return shapes if self.stateful else []

    def example_inputs(self, tokens: int) -> tuple[T, ...]:
        """Inputs of the right shapes for tracing. They include a few past tokens, so that no axis is empty."""
        positions = tokens if self.stateful else tokens + self.prefix
        shapes = self.state_shapes(1, self.prefix + 3)
        shapes += [(positions, *site.result_shape) for site in self.sites]
        ids = torch.ones(1, tokens, dtype=torch.long)
        return (ids, *map(torch.zeros, shapes))

    def forward(self, ids: T, *tensors: T) -> tuple[T, ...]:
        names = self.state_names
        states = dict(zip(names, tensors[: len(names)], strict=True))
        sites = (site.name for site in self.sites)
        self._results = dict(zip(sites, tensors[len(names) :], strict=not self.probing))
        self._time = ids.shape[1]
        self._calls.clear()
        self._cache = cache = GraphCache(
            states if self.stateful and not self.probing else None, self
        )
        output = self._run_model(ids, cache)
        new_states = [cache.updated[name] for name in names] if not self.probing else []
        arguments = [argument for site in self.sites for argument in site.arguments]
        return (output, *new_states, *arguments)

    def _run_model(self, ids: T, cache: GraphCache) -> T:
        forward = self.model.forward
        accepted = inspect.signature(forward).parameters
        # MiniMax wants a cache of its own class, unless it is told not to use one.
        use_cache = str(getattr(self.model.config, "model_type", "")) != "minimax"
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": use_cache}
        if "cache_params" in accepted:
            arguments["cache_params"] = cache
        elif (
            "past_key_values" not in accepted
        ):  # RWKV's state, which our replacements keep
            arguments["use_cache"] = False
        else:
            past = cache.get_seq_length()
            positions = torch.arange(self._time, device=ids.device) + past
            arguments["past_key_values"] = cache
            arguments["position_ids"] = positions[None]
            arguments["attention_mask"] = self._masks(
                positions, torch.arange(self._time + past)
            )
        if self.with_head:
            return self.model(**arguments).logits
        return self.model.base_model(**arguments).last_hidden_state  # type: ignore[operator]

    def _masks(self, positions: T, keys: T) -> Any:
        """A mask for each kind of layer where the model wants a dict; else one mask for all layers."""
        distance = positions[:, None] - keys[None, :]
        full = torch.zeros(1).masked_fill((distance < 0)[None, None], float("-inf"))
        window = getattr(self.model.config, "sliding_window", None)
        near = (
            full
            if not window
            else full.masked_fill((distance >= window)[None, None], float("-inf"))
        )
        base: Any = self.model.base_model
        forward = inspect.unwrap(type(base).forward)
        if "dict" not in forward.__code__.co_names:
            return near
        recurrent = dict.fromkeys(("linear_attention", "mamba", "conv"))
        return {
            "full_attention": full,
            "attention": full,
            "sliding_attention": near,
            **recurrent,
        }

    # -- what replaces the library's functions, one set for each mixer -------------------------------------

    def _site(self, layer: int, kind: str) -> ScanSite:
        """The site of this call. A mixer may scan several times, once per head."""
        number = self._calls[layer]
        self._calls[layer] += 1
        name = f"{layer}.{number}" if number else str(layer)
        if self.probing and all(site.name != name for site in self.sites):
            self.sites.append(ScanSite(name, kind, ()))
        return next(site for site in self.sites if site.name == name)

    def selective(
        self,
        layer: int,
        hidden_states: T,
        dt: T,
        A: T,
        B: T,
        C: T,
        D: T | None = None,
        z: T | None = None,
        delta_bias: T | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Any:
        """x, Δ (1, channels, time); A (channels, states); B, C (1, states, time)."""
        site = self._site(layer, "selective")
        # Channels innermost from here on: with time innermost, one token leaves the vector units nothing to do.
        x = hidden_states.transpose(1, 2)
        dt = dt.transpose(1, 2)
        if delta_bias is not None:
            dt = dt + delta_bias
        if delta_softplus:
            dt = functional.softplus(dt)
        site.arguments = [x[0], dt[0], A, B[0].t(), C[0].t()]
        site.state_shape = (A.shape[0], A.shape[1])
        site.result_shape = (A.shape[0],)
        y = self._result_of(site)[None]
        if D is not None:
            y = y + x * D
        if z is not None:
            y = y * functional.silu(z.transpose(1, 2))
        y = y.transpose(1, 2)
        return (y, _NO_STATE) if return_last_state else y

    def chunked(
        self,
        layer: int,
        hidden_states: T,
        dt: T,
        A: T,
        B: T,
        C: T,
        chunk_size: int,
        D: T | None = None,
        dt_bias: T | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        kind: str = "chunked",
        **_: Any,
    ) -> Any:
        """x (1, time, heads, width); Δ (1, time, heads); A (heads,); B, C (1, time, groups, states)."""
        site = self._site(layer, kind)
        if dt_bias is not None:
            dt = dt + dt_bias
        if dt_softplus:
            dt = functional.softplus(dt)
        if tuple(dt_limit) != (0.0, float("inf")):  # softplus is never negative
            dt = torch.clamp(dt, dt_limit[0], dt_limit[1])
        site.arguments = [hidden_states[0], dt[0], A, B[0], C[0]]
        heads = hidden_states.shape[2]
        width = hidden_states.shape[3]
        states = B.shape[3]
        site.state_shape = (int(heads), int(width), int(states))
        site.result_shape = (int(heads), int(width))
        y = self._result_of(site)[None]
        if D is not None:
            y = y + hidden_states * D[..., None]
        return (y, _NO_STATE) if return_final_states else y

    def delta(
        self,
        layer: int,
        query: T,
        key: T,
        value: T,
        g: T,
        beta: T,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> Any:
        """query, key, value (1, time, heads, width); beta (1, time, heads); g, the logarithm of the decay, the same, or
        with the key's width behind."""
        site = self._site(layer, "delta")
        if use_qk_l2norm_in_kernel:
            query, key = (
                x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
                for x in (query, key)
            )
        query = query * query.shape[-1] ** -0.5
        site.arguments = [query[0], key[0], value[0], g[0], beta[0]]
        site.state_shape = (int(key.shape[2]), int(key.shape[3]), int(value.shape[3]))
        site.result_shape = (int(value.shape[2]), int(value.shape[3]))
        return self._result_of(site)[None], _NO_STATE

    def weighted(
        self, layer: int, time_decay: T, time_first: T, key: T, value: T, **_: Any
    ) -> Any:
        """decay and first (channels,); key, value (1, time, channels)."""
        site = self._site(layer, "weighted")
        site.arguments = [key[0], value[0], -torch.exp(time_decay), time_first]
        channels = int(time_decay.shape[0])
        site.state_shape = (3, channels)  # numerator, denominator, largest exponent
        site.result_shape = (channels,)
        return self._result_of(site)[None], None

    def shifted(self, name: str, _: nn.Module, hidden: T) -> T:
        """RWKV's time shift: the hidden states of the previous token."""
        joined = self._cache.update_conv_state(
            hidden.transpose(1, 2), name, conv_kernel_size=2
        )
        return joined[:, :, :-1].transpose(1, 2)

    def lightning(self, layer: int, module: Any, hidden_states: T, **_: Any) -> Any:
        """MiniMax's linear attention: Mamba-2's recurrence with steps of one and a decay for each head."""
        mixed = module.act_fn(module.qkv_proj(hidden_states))
        mixed = mixed.unflatten(-1, (module.num_attention_heads, -1))
        query, key, value = mixed.split(module.head_dim, -1)
        steps = torch.ones_like(value[..., 0])
        rates = -module.slope_rate.flatten()
        y = self.chunked(layer, value, steps, rates, key, query, 0, kind="lightning")
        gate = torch.sigmoid(module.output_gate(hidden_states))
        return module.out_proj(gate * module.norm(y.flatten(2))), None

    def _result_of(self, site: ScanSite) -> T:
        """(time, …). Callers add the axis of sequences with [None], not by a reshape: behind the If of Mamba-2's scan
        the CPU plugin (2026.4.1) would read unwritten memory."""
        if self.probing:
            return torch.zeros(
                site.arguments[0].shape[0], *(int(n) for n in site.result_shape)
            )
        return self._results[site.name]


def _convolution(
    hidden_states: T,
    weight: T,
    bias: T | None = None,
    activation: str | None = None,
    **_: Any,
) -> T:
    """Of (1, channels, kernel − 1 + time): what came before is in it already."""
    y = functional.conv1d(
        hidden_states, weight.unsqueeze(1), bias, groups=weight.shape[0]
    )
    if activation in ("silu", "swish"):
        return functional.silu(y.transpose(1, 2)).transpose(1, 2)  # channels innermost
    if activation is None:
        return y
    raise TargetError(
        f"convolution activation {activation!r}: only silu is known to the OpenVINO target"
    )


def _dense_experts(self: Any, hidden_states: T, top_k_index: T, top_k_weights: T) -> T:
    """Runs every expert on every token and gives the ones not chosen weight zero: exact, without branches."""
    experts = torch.arange(self.num_experts, device=hidden_states.device)
    # (tokens, k, experts)
    chosen = (top_k_index[:, :, None] == experts).to(top_k_weights.dtype)
    # (experts, tokens, 1)
    share = (chosen * top_k_weights[:, :, None]).sum(1).t()[:, :, None]
    up = self.gate_up_proj if self.has_gate else self.up_proj
    # (experts, tokens, width)
    inner = torch.matmul(hidden_states[None], up.transpose(1, 2))
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    return (torch.matmul(inner, self.down_proj.transpose(1, 2)) * share).sum(0)


@contextmanager
def prepared(
    model: nn.Module, *, stateful: bool, with_head: bool
) -> Iterator[GraphForward]:
    """The model, ready to trace. Its own forwards are restored when the block ends."""
    graph = GraphForward(model, stateful=stateful, with_head=with_head)
    # The fused operation where the model knows it: OpenVINO has one, too.
    attention = getattr(model.config, "_attn_implementation", "sdpa")
    change_attention = attention != "sdpa" and getattr(model, "_supports_sdpa", False)
    try:
        if change_attention:
            model.set_attn_implementation("sdpa")  # type: ignore[operator]
        with patched(_replacements(model, graph)):
            graph.probing = True
            with torch.no_grad():
                graph(torch.ones(1, SAMPLE_TOKENS, dtype=torch.long))
            graph.probing = False
            if graph.sites:
                graph.prefix = graph.sites[0].arguments[0].shape[0] - SAMPLE_TOKENS
            yield graph
    finally:
        if change_attention:
            model.set_attn_implementation(attention)  # type: ignore[operator]


def _replacements(
    model: nn.Module, graph: GraphForward
) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    for name, module in model.named_modules():
        if (replacement := _replacement(name, module, graph)) is not None:
            yield module, types.MethodType(replacement, module)


def _replacement(
    name: str, module: nn.Module, graph: GraphForward
) -> Callable[..., Any] | None:
    """A forward without loops and branches for a mixer or an expert layer; None for other modules."""
    if type(module).__name__.endswith("Experts") and hasattr(module, "num_experts"):
        unknown = ("has_bias", "is_transposed", "has_post_expert_norm")
        odd = [name for name in unknown if getattr(module, name, False)]
        if odd or not hasattr(module, "has_gate"):
            raise TargetError(
                f"{name}: expert layers with {odd or 'an unknown layout'} cannot be exported"
            )
        return _dense_experts
    if name.endswith("time_shift") and isinstance(module, nn.ZeroPad2d):
        return partial(graph.shifted, name)
    if hasattr(module, "slope_rate"):
        return partial(graph.lightning, _layer(module))
    plain = inspect.unwrap(type(module).forward)
    called = set(plain.__code__.co_names)
    scans = [name for name in _SCANS if name in called & set(plain.__globals__)]
    if hasattr(module, "A_log") and hasattr(module, "conv1d") and len(scans) != 1:
        raise TargetError(
            f"{name}: {type(module).__name__} does not call the scan functions of transformers 5.22; "
            "install that version to export this model to OpenVINO"
        )
    replacements: dict[str, Callable[..., Any]] = {
        function: partial(getattr(graph, _SCANS[function]), _layer(module))
        for function in scans
    }
    if "causal_conv1d_fn" in called:
        replacements["causal_conv1d_fn"] = _convolution
    return with_globals(plain, replacements) if replacements else None


def _layer(module: Any) -> int:
    return int(module.layer_idx if hasattr(module, "layer_idx") else module.layer_id)
