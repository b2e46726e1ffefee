"""One file per family: how its configuration and weights become llama.cpp's metadata and tensors."""

from kl_lens.targets.gguf.architectures.base import (
    TensorRule,
    check_complete,
    get_architecture,
    supported_architectures,
    why_unknown,
)

# Importing a module registers its architectures.
# isort: off
from kl_lens.targets.gguf.architectures import falcon_h1 as falcon_h1
from kl_lens.targets.gguf.architectures import granite as granite
from kl_lens.targets.gguf.architectures import jamba as jamba
from kl_lens.targets.gguf.architectures import kimi_linear as kimi_linear
from kl_lens.targets.gguf.architectures import lfm2 as lfm2
from kl_lens.targets.gguf.architectures import mamba as mamba
from kl_lens.targets.gguf.architectures import nemotron_h as nemotron_h
from kl_lens.targets.gguf.architectures import qwen as qwen
# isort: on

__all__ = ["TensorRule", "check_complete", "get_architecture", "supported_architectures", "why_unknown"]
