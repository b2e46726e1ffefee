"""One file per family: how its configuration and weights become llama.cpp's metadata and tensors."""

import re

from kl_lens.base.errors import UnsupportedError
from kl_lens.targets.gguf.architectures import (
    attention_only,
    falcon_h1,
    granite,
    jamba,
    kimi_linear,
    lfm2,
    mamba,
    nemotron_h,
    qwen,
)
from kl_lens.targets.gguf.architectures.base import Architecture

_MODULES = (
    attention_only,
    falcon_h1,
    granite,
    jamba,
    kimi_linear,
    lfm2,
    mamba,
    nemotron_h,
    qwen,
)
# transformers' model type → its architecture.
ARCHITECTURES = {
    name: module.ARCHITECTURE for module in _MODULES for name in module.ARCHITECTURE.names
}
# Families that llama.cpp runs under a different name, or that its Python package does not list yet.
_OTHER_NAMES = ("mixtral", "phi", "minimax", "qwen4_exp_text")


def get_architecture(model_type: str) -> Architecture:
    if reason := why_unknown(model_type):
        raise UnsupportedError(reason)
    return ARCHITECTURES[model_type]


def why_unknown(model_type: str) -> str | None:
    """Why such models cannot be exported, or None."""
    if model_type in ARCHITECTURES:
        return None
    from gguf.constants import MODEL_ARCH_NAMES

    names = {re.sub(r"[-_.]", "", name) for name in MODEL_ARCH_NAMES.values()}
    if (
        model_type not in _OTHER_NAMES
        and re.sub(r"[-_.]|text$", "", model_type) not in names
    ):
        return f"llama.cpp has no {model_type} architecture, so there is no GGUF of it"
    written = ", ".join(sorted(ARCHITECTURES))
    return (
        f"KL Lens writes GGUF files of {model_type} models only like another: give llama.cpp's own in 16 bits with "
        f"--template; it needs none for {written}"
    )
