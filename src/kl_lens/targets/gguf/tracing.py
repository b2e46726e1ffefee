"""How long llama.cpp takes for each weight inside a running model.

llama.cpp asks a callback (`cb_eval`, what its own debugging tools use) about every operation of the graph, and computes
those it is told to one by one. So the clock stands around single operations of the real model: the kernels that the
loader repacked weights for, the threads, and caches that hold what the operations before left in them.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from kl_lens.errors import TargetError
from kl_lens.targets.gguf.library import LlamaLibrary

Callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
# Of `struct ggml_tensor`: what KL Lens reads, and how it knows that the rest is where it was.
_OPERATION, _SOURCE, _NAME = 80, 152, 256
_OVERHEAD = 368  # the struct and ggml's note of it


class Tracer:
    """Seconds of every operation that reads one of the named weights, while `recording`."""

    def __init__(self, library: LlamaLibrary, weights: Collection[str]) -> None:
        functions: Any = library.functions
        if not all(hasattr(functions, name) for name in ("ggml_get_name", "ggml_tensor_overhead")):
            raise TargetError(f"{library.path} does not let its operations be timed; {_OTHER}")
        functions.ggml_tensor_overhead.restype = ctypes.c_size_t
        if functions.ggml_tensor_overhead() != _OVERHEAD:
            raise TargetError(f"{library.path}: ggml_tensor has another layout than KL Lens knows; {_OTHER}")
        self._name_of = functions.ggml_get_name
        self._name_of.restype, self._name_of.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._path, self._weights = library.path, frozenset(weights)
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(
            list
        )  # (weight, kind of operation) → each
        self.recording = False
        self._weight = ""
        self._started = 0.0
        self._wrong = False
        self.callback = Callback(self._heard)  # held here: ctypes frees what nobody holds

    def _heard(self, tensor: int, asked: bool, _: object) -> bool:
        if not self.recording:
            return not asked  # compute all at once
        if asked:
            self._weight = self._read_by(tensor)
            self._started = time.perf_counter()
        elif self._weight:
            seconds = time.perf_counter() - self._started
            operation = ctypes.c_int32.from_address(tensor + _OPERATION).value
            self.seconds[self._weight, operation].append(seconds)
        return True

    def _read_by(self, tensor: int) -> str:
        """The weight that an operation multiplies with, or looks up in; empty for all others."""
        if self._wrong or self._name_of(tensor) != tensor + _NAME:
            self._wrong = True
            return ""
        source = ctypes.c_void_p.from_address(tensor + _SOURCE).value
        if not source:
            return ""
        name = ctypes.string_at(source + _NAME).decode(errors="replace").partition(" (")[0]  # "… (view)"
        return name if name in self._weights else ""

    def require_all(self) -> None:
        """Raises TargetError where a weight was never read: a table must not say that it costs nothing."""
        if missing := sorted(self._weights - {weight for weight, _ in self.seconds}):
            raise TargetError(
                f"{self._path}: no operation reads {missing[0]} itself ({len(missing)} of {len(self._weights)} "
                f"weights), so its time cannot be told; {_OTHER}"
            )


_OTHER = "plan without --max-latency, or with another libllama (LLAMA_CPP_LIB)"
