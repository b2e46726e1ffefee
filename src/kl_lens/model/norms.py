"""The gated norm of Mamba-2 layers with several groups, as the models' authors compute it.

mamba_ssm, which these models are trained with, normalises each group of channels by itself: `Mamba2` builds its norm
with `group_size = d_ssm // ngroups`, and its fused kernel does the same. llama.cpp follows. transformers does it for
Zamba2, Falcon-H1 and Nemotron-H. For the families below it normalises over all groups at once, except in mamba_ssm's
fused kernel, which it calls in training. With one group, as most of their checkpoints have, there is no difference.
"""

from __future__ import annotations

from torch import nn

# Families whose transformers class normalises over all groups → where their configuration says how many there are.
NORMALISED_OVER_ALL = {
    "mamba2": "n_groups",
    "bamba": "mamba_n_groups",
    "granitemoehybrid": "mamba_n_groups",
}


def groups_of(config: object) -> int:
    """How many groups the gated norm has that transformers would take as one; 1 where transformers is right."""
    groups = getattr(config, NORMALISED_OVER_ALL.get(getattr(config, "model_type", ""), ""), 1)
    return groups if isinstance(groups, int) else 1


def normalise_per_group(model: nn.Module) -> None:
    """Gives the gated norms of a model with several groups transformers' own grouped norm, in place."""
    groups = groups_of(getattr(model, "config", None))
    if groups == 1:
        return
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    for module in model.modules():
        # The same attributes and the same parameter: only `forward` differs, and the size of a group.
        if type(module).__name__.endswith("RMSNormGated"):
            module.__class__ = Zamba2RMSNormGated
            module.group_size = module.weight.numel() // groups  # type: ignore[operator, assignment]
