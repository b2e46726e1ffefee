"""Times llama.cpp's operation on each weight inside a running model.

llama.cpp calls a callback (`cb_eval`, which its own debugging tools use) for every operation of the graph, and computes
the selected ones separately. So single operations of the real model are timed: with the kernels that weights were
repacked for, the real threads, and caches in the state that earlier operations left.
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
# Offsets in `struct ggml_tensor` that KL Lens reads, and the size that confirms the layout.
_OPERATION, _SOURCE, _NAME = 80, 152, 256
_OVERHEAD = 368  # the struct and ggml's own entry for it


class Tracer:
    """Seconds of every operation that reads one of the named weights, while `recording`."""

    def __init__(self, library: LlamaLibrary, weights: Collection[str]) -> None:
        functions: Any = library.functions
        if not all(hasattr(functions, name) for name in ("ggml_get_name", "ggml_tensor_overhead")):
            raise TargetError(f"{library.path} does not support timing its operations; {_OTHER}")
        functions.ggml_tensor_overhead.restype = ctypes.c_size_t
        if functions.ggml_tensor_overhead() != _OVERHEAD:
            raise TargetError(f"{library.path}: ggml_tensor has another layout than KL Lens knows; {_OTHER}")
        self._name_of = functions.ggml_get_name
        self._name_of.restype, self._name_of.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._path, self._weights = library.path, frozenset(weights)
        # (weight, kind of operation) → seconds of each call.
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.recording = False
        self._weight = ""
        self._started = 0.0
        self._wrong = False
        self.callback = Callback(self._heard)  # keeps the callback alive: ctypes does not

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
        """The weight that an operation multiplies with or looks up rows in; empty for other operations."""
        if self._wrong or self._name_of(tensor) != tensor + _NAME:
            self._wrong = True
            return ""
        source = ctypes.c_void_p.from_address(tensor + _SOURCE).value
        if not source:
            return ""
        name = ctypes.string_at(source + _NAME).decode(errors="replace").partition(" (")[0]  # "… (view)"
        return name if name in self._weights else ""

    def require_all(self) -> None:
        """Raises TargetError if a weight was never read: the table must not claim that it costs nothing."""
        if missing := sorted(self._weights - {weight for weight, _ in self.seconds}):
            raise TargetError(
                f"{self._path}: no operation reads {missing[0]} itself ({len(missing)} of {len(self._weights)} "
                f"weights), so its time is unknown; {_OTHER}"
            )


_OTHER = "plan without --max-latency, or with another libllama (LLAMA_CPP_LIB)"
