"""Changes the inputs of a transformers model's matrix products: "as deployed" models a runtime's activations this way.

Only products with a weight are affected; not the embedding's lookup, the convolution, the scan, or anything else that
runtimes keep in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from kl_lens.base.errors import TargetError

Change = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def inputs_changed(model: nn.Module, changes: Mapping[str, Change]) -> Iterator[None]:
    """Within, each named component's inputs go through its change first.

    A tied embedding stands for the head; an embedding alone has no product. Weights are left alone.
    """
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for component, change in changes.items():
            _attach(stack, model, modules, component, change)
        yield


def _attach(
    stack: ExitStack,
    model: nn.Module,
    modules: dict[str, nn.Module],
    component: str,
    change: Change,
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
        if (
            isinstance(head, nn.Linear)
            and head.weight.data_ptr() == module.weight.data_ptr()
        ):
            _before(stack, head, change)
    elif (
        module is None
        and owner is not None
        and isinstance(getattr(owner, leaf, None), nn.Parameter)
    ):
        if getattr(owner, leaf).dim() == 3:
            _inside_experts(stack, owner, leaf, change)
    elif module is None:
        raise TargetError(f"the model has no component {component!r}")


def _before(stack: ExitStack, module: nn.Module, change: Change) -> None:
    handle = module.register_forward_pre_hook(
        lambda _, args: (change(args[0]), *args[1:])
    )
    stack.callback(handle.remove)


def _before_time_step(
    stack: ExitStack, mixer: Any, dt_proj: nn.Linear, change: Change
) -> None:
    """Mamba-1 uses `dt_proj.weight` directly, so a hook on that module never fires.

    Its input is the first columns of x_proj's output, behind a norm in some families.
    """
    if isinstance(getattr(mixer, "dt_layernorm", None), nn.Module):
        handle = mixer.dt_layernorm.register_forward_hook(
            lambda _m, _a, output: change(output)
        )
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
        handle = experts.act_fn.register_forward_hook(
            lambda _m, _a, output: change(output)
        )
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
