"""The two libraries behind the GGUF formats: gguf-py, and ggml's C code inside xllamacpp.

Both come with the extra `gguf` and are imported on first use.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kl_lens.base.errors import FormatError

_INSTALL = "pip install 'kl-lens[gguf]'"


@cache
def gguf_module() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise FormatError(f"GGUF formats need the package gguf: {_INSTALL}") from None


@cache
def ggml_library() -> ctypes.CDLL:
    """xllamacpp's shared library, which exports ggml's functions; the package itself is not imported."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None:
        raise FormatError(f"GGUF K-quants need the package xllamacpp: {_INSTALL}")
    for folder in spec.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("xllamacpp*.so")):
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
    raise FormatError(f"the installed xllamacpp does not export ggml_quantize_chunk: upgrade it, {_INSTALL}")


def quantize_rows(
    weight: npt.NDArray[np.float32],
    ggml_type: int,
    row_bytes: int,
    importance: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.uint8]:
    """Quantizes a (rows, columns) array with ggml, on as many threads as torch uses.

    Rows are independent, so the number of threads changes only the time. ggml aborts the process on invalid input, so
    all known cases are refused here.

    Args:
        importance: how much each column matters (mean square of its input), as in llama.cpp's importance matrix. Only
            proportions count.
    """
    library = ggml_library()
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    rows, columns = weight.shape
    kind = gguf_module().GGMLQuantizationType(ggml_type)
    if importance is not None:
        importance = _proportions(importance, columns)
    elif library.ggml_quantize_requires_imatrix(ggml_type):
        raise FormatError(f"{kind.name} needs the importance of columns (an importance matrix)")
    blocks = np.empty((rows, row_bytes), np.uint8)
    weighed = None if importance is None else importance.ctypes.data
    library.ggml_quantize_init(ggml_type)  # tables of the IQ types, once; up to six seconds

    def quantize(first: int, last: int) -> int:
        at = first * columns
        written: int = library.ggml_quantize_chunk(
            ggml_type, weight.ctypes.data, blocks.ctypes.data, at, last - first, columns, weighed
        )
        return written

    import torch

    threads = min(rows, torch.get_num_threads())
    bounds = [rows * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:  # ctypes releases the interpreter lock
        written = sum(pool.map(quantize, bounds[:-1], bounds[1:]))
    if written != blocks.nbytes:
        raise FormatError(
            f"ggml wrote {written} bytes where {blocks.nbytes} were expected: upgrade xllamacpp"
        )
    return blocks


def _proportions(importance: npt.NDArray[np.float32], columns: int) -> npt.NDArray[np.float32]:
    """Scales the importance by a power of two to a largest value in [1/2, 1): exact, and safe from ggml's overflows."""
    values = np.ascontiguousarray(importance, dtype=np.float32)
    if values.shape != (columns,):
        raise FormatError(f"importance has shape {values.shape} where {(columns,)} was expected")
    if not np.isfinite(values).all() or values.min() < 0:
        raise FormatError("importance holds NaN, infinity or a negative number; calibrate again")
    largest = float(values.max())
    if largest == 0:
        raise FormatError("importance is zero for every column; calibrate on text that reaches this weight")
    return np.ldexp(values, -math.frexp(largest)[1]).astype(np.float32)
