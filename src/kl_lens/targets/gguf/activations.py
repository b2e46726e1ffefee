"""What llama.cpp's CPU kernels do to the activations, as PyTorch functions.

A matrix product of llama.cpp first brings the activations to the type that the weight's kernel multiplies with:
8-bit blocks for quantized weights, half precision for F16. Ignoring that understates the damage of a file at
8 bits by half. Inside `as_deployed` a transformers model computes with such activations, so that a KL measured
there is the KL of the file that llama.cpp runs.

Only matrix products with a weight are affected. Looking up an embedding is not, nor is the convolution, the
scan, or anything else that llama.cpp keeps in F32. Attention's keys and values go through an F16 cache, which
is not modelled: it does not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from kl_lens.errors import TargetError

# Weight format → the type its kernel multiplies with, by block size. Q8_1, which meets Q4_1 and Q5_1, has the integers
# and scales of Q8_0; beside them it holds each block's sum, rounded to half precision, for the weights' minima. That
# last rounding works on the weights' minima alone and no change of the activations can show it: 7e-4 of a product of
# normal numbers, where the rounding shown here is 5e-3.
_PER_32 = ("q8_0", "q4_0", "q5_0", "iq4_nl", "q4_1", "q5_1")
_PER_256 = (
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs",
)  # fmt: skip
_SMALLEST = torch.finfo(torch.float32).tiny


def quantize_activations(activations: torch.Tensor, format_name: str) -> torch.Tensor:
    """The float32 activations that meet a weight of this format in llama.cpp.

    Args:
        activations: (…, columns of the weight).
        format_name: the weight's format. `fp32` leaves them alone.
    """
    if format_name == "fp32":
        return activations
    if format_name in ("fp16", "f16"):
        return activations.half().to(activations.dtype)
    if format_name in _PER_32:
        return _blocks_of_32(activations)
    if format_name in _PER_256:
        return _blocks_of_256(activations)
    raise TargetError(f"llama.cpp has no kernel for the weight format {format_name!r}")


def _blocks_of_32(activations: torch.Tensor) -> torch.Tensor:
    """Q8_0: integers from the exact scale max|x|/127, values from the scale stored in half precision."""
    blocks = _blocked(activations, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > _SMALLEST, 1 / scale.clamp_min(_SMALLEST), 0)
    integers = (blocks * inverse).round()
    return (integers * scale.half().float()).reshape(activations.shape).to(activations.dtype)


def _blocks_of_256(activations: torch.Tensor) -> torch.Tensor:
    """Q8_K: the element of largest magnitude, with its sign, lands on −127; the scale stays float32."""
    blocks = _blocked(activations, 256)
    place = blocks.abs().argmax(-1, keepdim=True)
    largest = blocks.gather(-1, place)
    safe = torch.where(largest.abs() > _SMALLEST, largest, 1)
    inverse = torch.where(largest.abs() > _SMALLEST, -127 / safe, 0)
    integers = (blocks * inverse).round().clamp_max(127)
    scale = torch.where(inverse != 0, 1 / torch.where(inverse != 0, inverse, 1), 0)
    return (integers * scale).reshape(activations.shape).to(activations.dtype)


def _blocked(activations: torch.Tensor, size: int) -> torch.Tensor:
    if activations.shape[-1] % size:
        raise TargetError(
            f"{activations.shape[-1]} activations do not divide into blocks of {size}; such a weight is stored in "
            "another format (see the artifact's fallbacks)"
        )
    return activations.float().unflatten(-1, (-1, size))


Change = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def as_deployed(model: nn.Module, formats: Mapping[str, str]) -> Iterator[None]:
    """Within the block, the inputs of the named components are what llama.cpp would multiply with.

    Args:
        model: a transformers causal language model. Its weights are left alone: quantize those too.
        formats: component name → the weight format it is *realised* in (after fallbacks). Components that are
            not named see exact activations. A tied embedding stands for the head.
    """
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for component, name in formats.items():
            if name != "fp32":
                _attach(stack, model, modules, component, lambda x, name=name: quantize_activations(x, name))  # type: ignore[misc]
        yield


def _attach(
    stack: ExitStack, model: nn.Module, modules: dict[str, nn.Module], component: str, change: Change
) -> None:
    module = modules.get(component)
    owner_name, _, leaf = component.rpartition(".")
    owner = modules.get(owner_name)
    if isinstance(module, nn.Linear):
        if leaf == "dt_proj" and isinstance(getattr(owner, "x_proj", None), nn.Linear):
            _before_time_step(stack, owner, module, change)
        else:
            _before(stack, module, change)
    elif isinstance(module, nn.Embedding):
        head = model.get_output_embeddings()  # type: ignore[operator]
        if isinstance(head, nn.Linear) and head.weight.data_ptr() == module.weight.data_ptr():
            _before(stack, head, change)
    elif module is None and owner is not None and isinstance(getattr(owner, leaf, None), nn.Parameter):
        if getattr(owner, leaf).dim() == 3:
            _inside_experts(stack, owner, leaf, change)
    elif module is None:
        raise TargetError(f"the model has no component {component!r}")


def _before(stack: ExitStack, module: nn.Module, change: Change) -> None:
    handle = module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    stack.callback(handle.remove)


def _before_time_step(stack: ExitStack, mixer: Any, dt_proj: nn.Linear, change: Change) -> None:
    """Mamba-1 multiplies with `dt_proj.weight` itself, so no hook on that module ever fires.

    What it multiplies with are the first columns of x_proj's output, behind a norm in some families.
    """
    if isinstance(getattr(mixer, "dt_layernorm", None), nn.Module):
        handle = mixer.dt_layernorm.register_forward_hook(lambda _m, _a, output: change(output))
    else:
        rank = dt_proj.in_features

        def hook(_m: nn.Module, _a: Any, output: torch.Tensor) -> torch.Tensor:
            return torch.cat([change(output[..., :rank]), output[..., rank:]], dim=-1)

        handle = mixer.x_proj.register_forward_hook(hook)
    stack.callback(handle.remove)


def _inside_experts(stack: ExitStack, experts: Any, leaf: str, change: Change) -> None:
    """Experts are parameters of one module: its input enters the first product, the gated value the second."""
    if leaf != "down_proj":
        _before(stack, experts, change)
        return
    if not getattr(experts, "has_gate", True):
        handle = experts.act_fn.register_forward_hook(lambda _m, _a, output: change(output))
        stack.callback(handle.remove)
        return
    if getattr(experts.config, "_experts_implementation", None) == "eager" or not hasattr(
        experts, "_apply_gate"
    ):
        raise TargetError(
            "activations inside experts can only be changed with transformers' grouped_mm or batched_mm "
            "implementation; call model.set_experts_implementation('batched_mm') first"
        )
    original = experts._apply_gate
    experts._apply_gate = lambda value: change(original(value))
    stack.callback(lambda: delattr(experts, "_apply_gate"))
