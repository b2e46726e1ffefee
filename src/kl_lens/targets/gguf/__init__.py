"""GGUF files for llama.cpp: write them from a plan, run them, and predict what running them does.

Needs the extra `gguf` (the packages gguf and xllamacpp); a native llama.cpp is used when one is found.
"""

from typing import TYPE_CHECKING

from kl_lens.base.lazy import lazy_names
from kl_lens.targets.gguf.export import export as export, uniform_plan as uniform_plan
from kl_lens.targets.gguf.header import read_header as read_header
from kl_lens.targets.gguf.library import find_library as find_library
from kl_lens.targets.gguf.menu import FORMATS as FORMATS
from kl_lens.targets.gguf.session import GGUFSession as GGUFSession, open_session as open_session

if TYPE_CHECKING:
    from kl_lens.targets.gguf.activations import (
        as_deployed as as_deployed,
        quantize_activations as quantize_activations,
    )
    from kl_lens.targets.gguf.architectures import supported_architectures as supported_architectures
else:
    __getattr__, __all__ = lazy_names(__name__)
