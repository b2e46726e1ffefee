"""GGUF's block formats, quantized as llama.cpp does it, bit for bit.

Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 are rounded in torch, on the weight's device (`blocks.py`); the K-quants and the IQ
types, which search for good scales, go through ggml's C function itself, and so does everything that is told how much
each column matters. Back to float32 they come in torch, IQ2 and IQ3 by gguf-py.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kl_lens.base.accelerators import on_host
from kl_lens.base.errors import FormatError
from kl_lens.base.lazy import Tensor, torch
from kl_lens.base.system import WINDOWS
from kl_lens.weights.formats.blocks import LAYOUTS, dequantized, nearest
from kl_lens.weights.formats.format import (
    FP16,
    LARGEST_MAGNITUDE,
    Bytes,
    Floats,
    Format,
    Quantized,
    checked_float32,
    register,
)

# Such small blocks are stored with a scale of zero anyway, and below about 2^−120 the C code divides by zero, with a
# result that depends on the processor. Make them plain zeros.
SMALLEST_MAGNITUDE = 2.0**-60
_WIDE = 64  # blocks per row for gguf-py


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
        return self.name.startswith("iq") or self.name.endswith("_k")

    @property
    def needs_importance(self) -> bool:
        # As `ggml_quantize_requires_imatrix` says.
        return self.name in ("iq2_xs", "iq2_xxs")

    @property
    def takes_importance(self) -> bool:
        """Whether the importance of columns changes anything."""
        return self.name != "q8_0"

    def quantize(self, weight: Tensor, name: str = "weight") -> Quantized:
        if self.needs_importance:
            raise FormatError(
                f"{name}: {self.name} needs the importance of columns; "
                f"run kl-lens calibrate and use {self.name}+imatrix"
            )
        return super().quantize(weight, name)

    def quantize_with(self, weight: Tensor, importance: Tensor) -> Quantized:
        """The stored form, searched with llama.cpp's weighting by the mean square of each column's input."""
        self._require_fit(tuple(weight.shape), "weight")
        values = checked_float32(weight, "weight")
        stored = self._blocks(values, importance)
        # The search can move minima outside FP16's range, but only near its end.
        is_close = float(values.abs().max()) > LARGEST_MAGNITUDE / 2
        if is_close and not self.dequantize(stored).isfinite().all():
            raise FormatError(
                f"{self.name} cannot hold weights so close to FP16's end; rescale them"
            )
        return stored

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) // self.block_size * self.block_bytes

    def _quantize(self, weight: Tensor) -> Quantized:
        return self._blocks(weight, None)

    def _blocks(self, weight: Tensor, importance: Tensor | None) -> Quantized:
        whole = torch.nn.functional.hardshrink(weight, SMALLEST_MAGNITUDE)
        if importance is None and not self.searches:
            return nearest(self.name, whole)
        rows = on_host(whole.flatten(0, -2)).contiguous().numpy()
        blocks = self._searched(rows, importance)
        data = torch.from_numpy(blocks).reshape(*weight.shape[:-1], -1)
        return Quantized(self.name, tuple(weight.shape), data.to(weight.device))

    def _searched(self, rows: Floats, importance: Tensor | None) -> Bytes:
        """By ggml, on as many threads as torch uses: rows are independent. ggml aborts the process on invalid input, so
        all known cases are refused before."""
        library = ggml_library()
        kind = int(gguf_module().GGMLQuantizationType[self.name.upper()])
        count, columns = rows.shape
        blocks = np.empty(
            (count, columns // self.block_size * self.block_bytes), np.uint8
        )
        weights = None if importance is None else _proportions(importance, columns)
        weighed = None if weights is None else weights.ctypes.data
        # Tables of the IQ types, once; up to six seconds.
        library.ggml_quantize_init(kind)

        def quantize(first: int, last: int) -> int:
            span = (first * columns, last - first, columns)
            return library.ggml_quantize_chunk(
                kind, rows.ctypes.data, blocks.ctypes.data, *span, weighed
            )

        threads = min(count, torch.get_num_threads())
        bounds = [count * i // threads for i in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:  # ctypes releases the interpreter lock
            written = sum(pool.map(quantize, bounds[:-1], bounds[1:]))
        if written != blocks.nbytes:
            raise FormatError(
                f"ggml wrote {written} bytes where {blocks.nbytes} were expected: upgrade xllamacpp"
            )
        return blocks

    def dequantize(self, quantized: Quantized) -> Tensor:
        if self.name in LAYOUTS:
            return dequantized(LAYOUTS[self.name], quantized.data)
        blocks = quantized.data.cpu().numpy()
        # In wide rows, because gguf-py works on sixteen at a time: narrow ones take two to five times as long.
        beside = math.gcd(blocks.size // self.block_bytes, _WIDE)
        values = gguf_values(self.name, blocks.reshape(-1, beside * self.block_bytes))
        return torch.from_numpy(values).reshape(quantized.shape).to(quantized.data.device)


# If 256 does not divide the columns, the first replacement is llama.cpp's own (`tensor_type_fallback`). For the others
# llama.cpp has no rule; FP16 is its last resort.
for _name, _bits, _other, _block, _bytes in (
    ("q8_0", 8, "", 32, 34),
    ("q6_k", 6, "q8_0", 256, 210),
    ("q5_k", 5, "q5_1", 256, 176),
    ("q4_k", 4, "q5_0", 256, 144),
    ("q4_0", 4, "", 32, 18),
    ("q5_0", 5, "", 32, 22),
    ("q5_1", 5, "", 32, 24),
    ("q4_1", 4, "", 32, 20),
    ("iq4_nl", 4, "", 32, 18),
    ("iq4_xs", 4, "iq4_nl", 256, 136),
    ("q3_k", 3, "q4_0", 256, 110),
    ("iq3_s", 3, "iq4_nl", 256, 110),
    ("iq3_xxs", 3, "iq4_nl", 256, 98),
    ("q2_k", 2, "q4_0", 256, 84),
    ("iq2_s", 2, "iq4_nl", 256, 82),
    ("iq2_xs", 2, "iq4_nl", 256, 74),
    ("iq2_xxs", 2, "iq4_nl", 256, 66),
):
    _fallback = (_other, FP16) if _other else (FP16,)
    register(GGUFFormat(_name, _bits, None, _fallback, _block, _bytes))


_INSTALL = "pip install 'kl-lens[gguf]'"
LLAMA_VARIABLE = "LLAMA_CPP_LIB"
GET_LLAMA = (
    "unpack llama-…-bin-win-cpu-x64.zip from https://github.com/ggml-org/llama.cpp/releases and name its folder with "
    f"--llama-cpp or {LLAMA_VARIABLE}"
    if WINDOWS
    else f"{_INSTALL}, or give --llama-cpp"
)
_GGML = re.compile(r"(lib)?ggml(-base)?(\.v?\d[\d.]*)?\.(so|dylib|dll)(\.\d+)*")


@cache
def gguf_module() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise FormatError(f"GGUF formats need the package gguf: {_INSTALL}") from None


def gguf_values(name: str, rows: Bytes) -> Floats:
    """The values of rows of blocks, by gguf-py."""
    gguf = gguf_module()
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[name.upper()])


@cache
def ggml_library() -> ctypes.CDLL:
    """A library with ggml's functions: that of xllamacpp, which is not imported, or else of the llama.cpp that the user
    named."""
    for path in _ggml_files():
        library = ctypes.CDLL(str(path))
        if hasattr(library, "ggml_quantize_chunk"):
            library.ggml_quantize_chunk.restype = ctypes.c_size_t
            library.ggml_quantize_chunk.argtypes = [
                ctypes.c_int,  # ggml type
                ctypes.c_void_p,  # float32 source, all rows
                ctypes.c_void_p,  # destination, all rows
                ctypes.c_int64,  # index of the first weight to quantize, at the start of a row
                ctypes.c_int64,  # rows to quantize
                ctypes.c_int64,  # columns
                ctypes.c_void_p,  # importance of each column, or null
            ]
            library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
            return library
    raise FormatError(f"GGUF K-quants need llama.cpp's ggml_quantize_chunk: {GET_LLAMA}")


def _ggml_files() -> Iterator[Path]:
    spec = importlib.util.find_spec("xllamacpp")
    for package in (spec and spec.submodule_search_locations) or ():
        yield from sorted(Path(package).glob("xllamacpp*.so"))
    if chosen := os.environ.get(LLAMA_VARIABLE):
        path = Path(chosen)
        folder = path if path.is_dir() else path.parent
        yield from (file for file in sorted(folder.rglob("*ggml*")) if is_ggml(file))


def is_ggml(file: Path) -> bool:
    """Whether a file has ggml's functions by its name; builds for Windows keep them apart from llama.cpp's."""
    return bool(_GGML.fullmatch(file.name))


def _proportions(importance: Tensor, columns: int) -> Floats:
    """Only proportions count. Scales them by a power of two to a largest value in [1/2, 1): exact, and safe from ggml's
    overflows."""
    values = importance.detach().float().cpu().numpy()
    if values.shape != (columns,):
        raise FormatError(
            f"importance has shape {values.shape} where {(columns,)} was expected"
        )
    if not np.isfinite(values).all() or values.min() < 0:
        raise FormatError(
            "importance holds NaN, infinity or a negative number; calibrate again"
        )
    largest = float(values.max())
    if largest == 0:
        raise FormatError(
            "importance is zero for every column; calibrate on text that reaches this weight"
        )
    return np.ldexp(values, -math.frexp(largest)[1]).astype(np.float32)
