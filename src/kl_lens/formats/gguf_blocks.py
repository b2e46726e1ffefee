"""GGUF's block formats, quantized by llama.cpp's own code.

Q8_0, Q4_0, Q5_0 and Q5_1 go through gguf-py, whose results equal the C code's bit for bit; the K-quants,
which search for good scales, go through ggml's C function itself. gguf-py turns all of them back into
float32 with the same values as ggml does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kl_lens.formats.base import Format, Quantized
from kl_lens.formats.ggml import gguf_module, quantize_rows
from kl_lens.formats.registry import register

if TYPE_CHECKING:
    import torch

# Blocks this small are stored with a scale of zero whatever their integers are, and below about 2^−120 the
# C code divides by zero on the way, with a result that depends on the processor. Make them plain zeros.
SMALLEST_MAGNITUDE = 2.0**-60


@dataclass(frozen=True)
class GGUFFormat(Format):
    """One ggml type: `block_size` weights in `block_bytes` bytes, scales included."""

    block_size: int = 32
    block_bytes: int = 34

    @property
    def block(self) -> int:
        return self.block_size

    @property
    def searches(self) -> bool:
        return self.block_size == 256

    @property
    def gguf_type(self) -> str:
        """The name of the type in gguf-py and llama.cpp."""
        return self.name.upper()

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) // self.block_size * self.block_bytes

    def _quantize(self, weight: torch.Tensor) -> Quantized:
        import torch

        gguf = gguf_module()
        ggml_type = gguf.GGMLQuantizationType[self.gguf_type]
        rows = torch.nn.functional.hardshrink(weight.flatten(0, -2), SMALLEST_MAGNITUDE).cpu().numpy()
        if self.block_size == 256:  # a K-quant
            row_bytes = weight.shape[-1] // self.block_size * self.block_bytes
            blocks = quantize_rows(rows, int(ggml_type), row_bytes)
        else:
            blocks = gguf.quantize(rows, ggml_type)
        data = torch.from_numpy(blocks).reshape(*weight.shape[:-1], -1)
        return Quantized(self.name, tuple(weight.shape), data.to(weight.device))

    def _dequantize(self, quantized: Quantized) -> torch.Tensor:
        import torch

        gguf = gguf_module()
        rows = quantized.data.flatten(0, -2).cpu().numpy()
        values = gguf.dequantize(rows, gguf.GGMLQuantizationType[self.gguf_type])
        return torch.from_numpy(values).reshape(quantized.shape).to(quantized.data.device)


# What stands in for a K-quant that does not fit is what llama.cpp puts there. For the others llama.cpp has no
# rule; FP16 is its own last resort.
register(GGUFFormat("q8_0", 8, 32, True, ("fp16",), 32, 34))
register(GGUFFormat("q6_k", 6, 16, True, ("q8_0", "fp16"), 256, 210))
register(GGUFFormat("q5_k", 5, 32, False, ("q5_1", "fp16"), 256, 176))
register(GGUFFormat("q4_k", 4, 32, False, ("q5_0", "fp16"), 256, 144))
register(GGUFFormat("q4_0", 4, 32, True, ("fp16",), 32, 18))
register(GGUFFormat("q5_0", 5, 32, True, ("fp16",), 32, 22))
register(GGUFFormat("q5_1", 5, 32, False, ("fp16",), 32, 24))
