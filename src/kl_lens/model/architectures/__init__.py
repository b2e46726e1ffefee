"""Models that transformers does not have, in plain PyTorch with their published names."""

from __future__ import annotations


def register() -> None:
    """Registers them with transformers' Auto classes."""
    import transformers

    from kl_lens.model.architectures.hymba import HymbaConfig, HymbaForCausalLM
    from kl_lens.model.architectures.mambavision import MambaVisionConfig, MambaVisionForImageClassification

    transformers.AutoConfig.register(HymbaConfig.model_type, HymbaConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(HymbaConfig, HymbaForCausalLM, exist_ok=True)
    transformers.AutoConfig.register(MambaVisionConfig.model_type, MambaVisionConfig, exist_ok=True)
    transformers.AutoModelForImageClassification.register(
        MambaVisionConfig, MambaVisionForImageClassification, exist_ok=True
    )
