"""The two libraries behind the GGUF formats: gguf-py, and ggml's own C code inside xllamacpp.

Both belong to the extra `gguf`. They are looked for on first use, so that everything else works without.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kl_lens.errors import FormatError

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
                return library
    raise FormatError(f"the installed xllamacpp does not export ggml_quantize_chunk: upgrade it, {_INSTALL}")


def quantize_rows(weight: npt.NDArray[np.float32], ggml_type: int, row_bytes: int) -> npt.NDArray[np.uint8]:
    """ggml's quantization of a (rows, columns) array, on as many threads as torch uses.

    Rows are independent, so the number of threads changes nothing but the time. ggml aborts the process on
    columns that do not divide into its blocks: callers check first.
    """
    function = ggml_library().ggml_quantize_chunk
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    rows, columns = weight.shape
    blocks = np.empty((rows, row_bytes), np.uint8)

    def quantize(first: int, last: int) -> int:
        written: int = function(
            ggml_type, weight.ctypes.data, blocks.ctypes.data, first * columns, last - first, columns, None
        )
        return written

    import torch

    threads = min(rows, torch.get_num_threads())
    bounds = [rows * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:  # ctypes lets go of the interpreter lock during the call
        written = sum(pool.map(quantize, bounds[:-1], bounds[1:]))
    if written != blocks.nbytes:
        raise FormatError(
            f"ggml wrote {written} bytes where {blocks.nbytes} were expected: upgrade xllamacpp"
        )
    return blocks
