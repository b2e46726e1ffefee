"""Models that transformers does not have, in plain PyTorch with their published names."""

from __future__ import annotations

HYMBA = "hymba"
MAMBAVISION = "mambavision"  # model types in config.json


def register(model_type: str) -> None:
    """Registers the model of this type, if it is one of them, with transformers' Auto classes. Only then, because each
    loads parts of transformers, which takes a second."""
    import transformers

    if model_type == HYMBA:
        from kl_lens.model.architectures.hymba import HymbaConfig, HymbaForCausalLM

        transformers.AutoConfig.register(HYMBA, HymbaConfig, exist_ok=True)
        transformers.AutoModelForCausalLM.register(
            HymbaConfig, HymbaForCausalLM, exist_ok=True
        )
    elif model_type == MAMBAVISION:
        from kl_lens.model.architectures.mambavision import (
            MambaVisionConfig,
            MambaVisionForImageClassification,
        )

        transformers.AutoConfig.register(MAMBAVISION, MambaVisionConfig, exist_ok=True)
        transformers.AutoModelForImageClassification.register(
            MambaVisionConfig, MambaVisionForImageClassification, exist_ok=True
        )
