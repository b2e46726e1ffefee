"""Weight formats: the exact values, bytes and constraints of what the runtimes store.

`roundtrip` gives the float32 values that a runtime computes with; measuring, evaluating and exporting all use it or the
`Quantized` behind it.
"""

from kl_lens.weights.formats.format import (
    FP16,
    Format,
    Quantized,
    fitting_format,
    get_format,
    known_formats,
    register,
)

# Importing a module registers its formats, in the order they are shown.
# isort: off
from kl_lens.weights.formats import integer as integer
from kl_lens.weights.formats import tables as tables
from kl_lens.weights.formats import affine as affine
from kl_lens.weights.formats import gguf_blocks as gguf_blocks
from kl_lens.weights.formats import ggml_types as ggml_types
# isort: on

__all__ = [
    "FP16",
    "Format",
    "Quantized",
    "fitting_format",
    "get_format",
    "known_formats",
    "register",
]
