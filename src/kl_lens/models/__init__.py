"""Models that transformers does not have, in plain PyTorch under their published names; known to its Auto classes."""

from __future__ import annotations


def register() -> None:
    """Makes transformers' `AutoConfig` and `AutoModelForCausalLM` find them by `model_type`; once is enough."""
    import transformers

    from kl_lens.models.hymba import HymbaConfig, HymbaForCausalLM

    transformers.AutoConfig.register(HymbaConfig.model_type, HymbaConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(HymbaConfig, HymbaForCausalLM, exist_ok=True)
