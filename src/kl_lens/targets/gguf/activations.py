"""What llama.cpp's CPU kernels do to the activations, as PyTorch functions.

Before a matrix product, llama.cpp converts the activations to the type that the weight's kernel multiplies with:
8-bit blocks for quantized weights, half precision for F16. Ignoring that understates the loss of an 8-bit
file by half. Inside `as_deployed` a transformers model computes with such activations, so that a KL measured
there is the KL of the file that llama.cpp runs.

Attention's keys and values go through an F16 cache, which is not modelled: it does not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from kl_lens.base.errors import TargetError
from kl_lens.base.system import ON_X86
from kl_lens.targets.inputs import inputs_changed
from kl_lens.weights.formats.ggml_types import ggml_types
from kl_lens.weights.recipes import FP16, Recipe

# Q8_1, used with Q4_1 and Q5_1, has the integers and scales of Q8_0, and each block's sum in half precision for the
# weights' minima. That last rounding affects only the minima, so changed activations cannot model it. It is small: 7e-4
# of a product of normal numbers, against 5e-3 for the rounding modelled here.
# Activations that llama.cpp looks up in a table, with inputs and outputs in half precision.
_TABLED = ("GELUTanh", "NewGELUActivation")
_SMALLEST = torch.finfo(torch.float32).tiny


def quantize_activations(activations: torch.Tensor, format_name: str) -> torch.Tensor:
    """The float32 activations (…, columns) that llama.cpp multiplies with a weight of this format."""
    if format_name == "fp32":
        return activations
    if format_name in (FP16, "f16"):
        return activations.half().to(activations.dtype)
    if format_name not in ggml_types():
        raise TargetError(
            f"llama.cpp has no kernel for the weight format {format_name!r}"
        )
    rounded = _blocks_of_256 if ggml_types()[format_name].block == 256 else _blocks_of_32
    return rounded(activations)


def _blocks_of_32(activations: torch.Tensor) -> torch.Tensor:
    """Q8_0: integers from the exact scale max|x|/127, ties to even, values from the scale stored in half precision."""
    blocks = _blocked(activations, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = largest / 127
    # Kernels for x86 multiply by 127/max|x|, others by 1/(max|x|/127): one activation in a million differs.
    inverse = _quotient(127, largest) if ON_X86 else _quotient(1, scale)
    inverse = torch.where(scale > _SMALLEST, inverse, 0)
    integers = (blocks * inverse).round()
    return (
        (integers * scale.half().float()).reshape(activations.shape).to(activations.dtype)
    )


def _blocks_of_256(activations: torch.Tensor) -> torch.Tensor:
    """Q8_K: the element of largest magnitude, with its sign, lands on −127; the scale stays float32."""
    blocks = _blocked(activations, 256)
    index = blocks.abs().argmax(-1, keepdim=True)
    largest = blocks.gather(-1, index)
    safe = torch.where(largest.abs() > _SMALLEST, largest, 1)
    inverse = torch.where(largest.abs() > _SMALLEST, _quotient(-127, safe), 0)
    # Except on x86, compilers fuse the product with the addition of 1.5 · 2^23 that rounds it, so the exact product
    # is rounded once.
    product = blocks * inverse if ON_X86 else blocks.double() * inverse.double()
    integers = product.round().clamp_max(127).float()
    scale = torch.where(inverse != 0, 1 / torch.where(inverse != 0, inverse, 1), 0)
    return (integers * scale).reshape(activations.shape).to(activations.dtype)


def _quotient(number: float, tensor: torch.Tensor) -> torch.Tensor:
    """One division, as in C: PyTorch's `number / tensor` is a reciprocal and a product, rounded twice."""
    return tensor.new_full((), number) / tensor  # `new_tensor` would wait for the GPU


def _blocked(activations: torch.Tensor, size: int) -> torch.Tensor:
    if activations.shape[-1] % size:
        raise TargetError(
            f"{activations.shape[-1]} activations do not divide into blocks of {size}; such a weight is stored in "
            "another format (see the artifact's fallbacks)"
        )
    return activations.float().unflatten(-1, (-1, size))


@contextmanager
def as_deployed(model: nn.Module, recipes: Mapping[str, Recipe]) -> Iterator[None]:
    """Within, the named components' inputs are rounded as llama.cpp would round them, and GELU comes from its table;
    weights are left alone.

    `recipes`: component → the recipe it is *realised* in (after fallbacks). A tied embedding stands for the head.
    """
    changes = {
        c: partial(quantize_activations, format_name=r.grid.name)
        for c, r in recipes.items()
    }
    with ExitStack() as stack:
        for module in model.modules():
            if type(module).__name__ in _TABLED:
                stack.callback(module.register_forward_hook(_from_table).remove)
        stack.enter_context(inputs_changed(model, changes))
        yield


def _from_table(
    module: nn.Module, inputs: tuple[torch.Tensor], _: torch.Tensor
) -> torch.Tensor:
    """Beyond ±10 there is no table."""
    values = inputs[0]
    halves = module.forward(values.half().to(values.dtype)).half().to(values.dtype)
    return torch.where(values.abs() < 10, halves, values.clamp_min(0))
