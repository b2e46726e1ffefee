"""GGUF files for llama.cpp: write them from a plan, run them, and predict what running them does.

Needs the extra `gguf` (the packages gguf and xllamacpp); a native llama.cpp is used when one is found.
"""

from typing import TYPE_CHECKING

from kl_lens.lazy import lazy_names
from kl_lens.targets.gguf.export import DEFAULT_MAP, FORMATS, export, uniform_plan
from kl_lens.targets.gguf.header import read_header
from kl_lens.targets.gguf.library import find_library
from kl_lens.targets.gguf.session import GGUFSession, open_session

if TYPE_CHECKING:
    from kl_lens.targets.gguf.activations import as_deployed, quantize_activations
    from kl_lens.targets.gguf.architectures import supported_architectures
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "kl_lens.targets.gguf.activations": ["as_deployed", "quantize_activations"],
            "kl_lens.targets.gguf.architectures": ["supported_architectures"],
        },
    )

__all__ = [
    "DEFAULT_MAP",
    "FORMATS",
    "GGUFSession",
    "as_deployed",
    "export",
    "find_library",
    "open_session",
    "quantize_activations",
    "read_header",
    "supported_architectures",
    "uniform_plan",
]
