"""Finds a llama.cpp library and declares the few functions that a session needs.

Several builds of llama.cpp are in use, and its parameter structs change between releases. So they are treated
as opaque 512-byte values here: only fields whose offset has been the same for years are set, and only after their
default was found there. A library with another layout is refused, never guessed at.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from kl_lens.base.environment import briefly_spinning
from kl_lens.base.errors import TargetError
from kl_lens.targets.session import ALL_LAYERS, LOAD_MODES
from kl_lens.weights.formats.format import FP16
from kl_lens.weights.formats.ggml_types import GGMLType, ggml_types
from kl_lens.weights.formats.gguf_blocks import GET_LLAMA, LLAMA_VARIABLE, is_ggml

ENVIRONMENT_VARIABLE = LLAMA_VARIABLE
WHEEL = "xllamacpp"  # of the extra `gguf`: runs everywhere, so it leaves this processor's best instructions unused
_FINDING = threading.Lock()
# For example libllama.v0.5.0.so, libllama.cuda.v0.5.0.so, libllama.so.0.
_FILE = re.compile(
    r"(lib)?llama(\.(cuda|vulkan|metal))?(\.v?\d[\d.]*)?\.(so|dylib|dll)(\.\d+)*"
)
_ERROR_LEVEL = 4
_STRUCT_BYTES = 512

# Field → (byte offset, how it is spelled, defaults that llama.cpp releases have there).
_FIELDS = {
    "n_ctx": (0, "<i", (512, 0)),
    "n_batch": (4, "<i", (2048,)),
    "n_ubatch": (8, "<i", (512,)),
    "n_seq_max": (12, "<i", (1,)),
    "n_gpu_layers": (16, "<i", (-1, 0, 999, 0x7FFFFFFF)),
    "devices": (0, "<Q", (0,)),
}
_NO_DEVICES = (ctypes.c_void_p * 1)(
    None
)  # the list of devices, the first field, ends with a null
_LOAD_MODE = (
    24,
    (-1, 1),
)  # like the switches, only in libraries with `llama_load_mode_name`
SWITCHES = (
    72,
    bytes((0, 0, 1, 0, 0)),
)  # vocabulary only, check, repack, no host buffers, no allocation
_REPACK = 74
_CALLBACK = 48  # called with the share of weights loaded; null by default, like its data
# `targets.LOAD_MODES` → llama.cpp's mode (0 reads, 1 maps), and whether kernels get the weights repacked.
_LOADS = dict(
    zip(
        LOAD_MODES, ((1, True), (0, True), (1, True), (0, False), (1, False)), strict=True
    )
)


class Parameters(ctypes.Structure):
    """A `llama_*_params` struct: more room than any release needs, passed by value."""

    _fields_ = (("data", ctypes.c_uint8 * _STRUCT_BYTES),)

    def integer(self, offset: int, code: str = "<i") -> int:
        return int(struct.unpack_from(code, self.data, offset)[0])

    def put(self, offset: int, value: int, code: str = "<i") -> None:
        struct.pack_into(code, self.data, offset, value)


class Batch(ctypes.Structure):
    """`llama_batch`: unchanged since it was introduced."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int32
_BOOL = ctypes.c_bool
_TEXT = ctypes.c_char_p
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_LogCallback, _POINTER)),
    "llama_print_system_info": (_TEXT, ()),
    "llama_supports_gpu_offload": (_BOOL, ()),
    "llama_model_default_params": (Parameters, ()),
    "llama_context_default_params": (Parameters, ()),
    "llama_model_load_from_file": (_POINTER, (_TEXT, Parameters)),
    "llama_model_free": (None, (_POINTER,)),
    "llama_model_get_vocab": (_POINTER, (_POINTER,)),
    "llama_model_n_ctx_train": (_INT, (_POINTER,)),
    "llama_model_is_recurrent": (_BOOL, (_POINTER,)),
    "llama_vocab_n_tokens": (_INT, (_POINTER,)),
    "llama_init_from_model": (_POINTER, (_POINTER, Parameters)),
    "llama_free": (None, (_POINTER,)),
    "llama_n_ctx": (ctypes.c_uint32, (_POINTER,)),
    "llama_set_n_threads": (None, (_POINTER, _INT, _INT)),
    "llama_get_memory": (_POINTER, (_POINTER,)),
    "llama_memory_clear": (None, (_POINTER, _BOOL)),
    "llama_batch_init": (Batch, (_INT, _INT, _INT)),
    "llama_batch_free": (None, (Batch,)),
    "llama_decode": (_INT, (_POINTER, Batch)),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (_POINTER, _INT)),
    "llama_tokenize": (
        _INT,
        (_POINTER, _TEXT, _INT, ctypes.POINTER(_INT), _INT, _BOOL, _BOOL),
    ),
    "llama_vocab_is_eog": (_BOOL, (_POINTER, _INT)),
    # (vocabulary, token, text, its size, leading spaces to drop, write special tokens)
    "llama_token_to_piece": (_INT, (_POINTER, _INT, _TEXT, _INT, _INT, _BOOL)),
}
# Of ggml: a type's number → the weights of a block, and its bytes.
_BLOCKS = ("ggml_blck_size", "ggml_type_size")


@dataclass
class LlamaLibrary:
    """A loaded libllama, its functions declared, its log captured."""

    path: Path
    origin: str  # how it was found
    functions: ctypes.CDLL
    version: str
    errors: list[str] = field(
        default_factory=list
    )  # what the library complained about, newest last
    _callback: Any = None  # keeps the callback alive: ctypes does not

    @property
    def system_info(self) -> str:
        """The build flags that llama.cpp reports: which instructions it was compiled for."""
        return (
            self.functions.llama_print_system_info().decode().strip().strip("|").strip()
        )

    @property
    def has_gpu(self) -> bool:
        return bool(self.functions.llama_supports_gpu_offload())

    def require_gpu(self, layers: int) -> None:
        if not self.has_gpu:
            count = "all" if layers >= ALL_LAYERS else layers
            raise TargetError(
                f"--gpu-layers {count}: {self.path} has no GPU backend, or finds no GPU. Leave the option out, or name "
                f"a llama.cpp built for your GPU with --llama-cpp or {ENVIRONMENT_VARIABLE}"
            )

    def knows(self, kind: GGMLType) -> bool:
        """Whether it has this type with blocks of the same size. Where its ggml cannot be asked: yes."""
        ask = [getattr(self.functions, name, None) for name in _BLOCKS]
        sizes = (kind.block, kind.bytes)
        return None in ask or tuple(f(kind.number) for f in ask if f) == sizes

    @property
    def has_load_modes(self) -> bool:
        """Whether the load mode can be chosen: the library has load modes at the offsets that KL Lens knows."""
        parameters: Parameters = self.functions.llama_model_default_params()
        offset, switches = SWITCHES
        return (
            hasattr(self.functions, "llama_load_mode_name")
            and parameters.integer(_LOAD_MODE[0]) in _LOAD_MODE[1]
            and bytes(parameters.data)[offset : offset + len(switches)] == switches
            and not any(parameters.data[_CALLBACK : _CALLBACK + 16])
        )

    def model_parameters(
        self, gpu_layers: int, load: str | None = None, callback: Any = None
    ) -> Parameters:
        """`load` is one of `LOAD_MODES`, or None for the library's default; `callback` gets the progress."""
        parameters: Parameters = self.functions.llama_model_default_params()
        self._set(parameters, "n_gpu_layers", gpu_layers)
        if gpu_layers == 0 and self.has_gpu:
            # Otherwise a prompt's products would still run on the GPU, in half precision.
            self._set(parameters, "devices", ctypes.addressof(_NO_DEVICES))
        if load is not None:
            if not self.has_load_modes:
                raise TargetError(
                    f"--load {load}: {self.path} has no load modes that KL Lens knows"
                )
            mode, repacked = _LOADS[load]
            parameters.put(_LOAD_MODE[0], mode)
            parameters.data[_REPACK] = repacked
            if callback is not None:
                parameters.put(
                    _CALLBACK, ctypes.cast(callback, ctypes.c_void_p).value or 0, "<Q"
                )
        return parameters

    def context_parameters(
        self,
        context: int,
        batch: int,
        exact_attention: bool,
        sequences: int = 1,
        caches: Mapping[str, str] | None = None,
    ) -> Parameters:
        """`batch`: tokens at once; `caches`: keys and values → their formats."""
        parameters: Parameters = self.functions.llama_context_default_params()
        self._set(parameters, "n_ctx", context)
        self._set(parameters, "n_batch", batch)
        self._set(parameters, "n_ubatch", min(batch, 512))
        self._set(parameters, "n_seq_max", sequences)
        if exact_attention or caches:
            flash, *offsets = self.attention_offsets(parameters)
            # Off for F32 keys and values; quantized values need it.
            parameters.put(flash, 0 if exact_attention else 1)
            for offset, kind in zip(offsets, ("keys", "values"), strict=True):
                parameters.put(
                    offset,
                    0
                    if exact_attention
                    else ggml_types()[(caches or {}).get(kind, FP16)].number,
                )
        return parameters

    def attention_offsets(self, parameters: Parameters) -> tuple[int, int, int]:
        """Offsets of flash_attn_type, type_k and type_v. They vary, so they are found by the defaults around them.

        The first is the last of four integers that say "unspecified" (−1), the other two are the one pair of
        neighbours that says F16 (1).
        """
        integers = [parameters.integer(offset) for offset in range(0, 136, 4)]
        automatic = [
            i
            for i in range(3, 15)
            if integers[i - 3 : i + 1] == [-1] * 4 and integers[i + 1] != -1
        ]
        halves = [i for i in range(16, 32) if integers[i : i + 2] == [1, 1]]
        if len(automatic) != 1 or len(halves) != 1:
            raise TargetError(
                f"{self.path}: unknown layout of llama_context_params for exact attention"
            )
        return 4 * automatic[0], 4 * halves[0], 4 * halves[0] + 4

    def _set(self, parameters: Parameters, name: str, value: int) -> None:
        offset, code, defaults = _FIELDS[name]
        if (default := parameters.integer(offset, code)) not in defaults:
            raise TargetError(
                f"{self.path}: {name} is not where KL Lens knows it (found {default}); this llama.cpp has another "
                f"layout, name another with --llama-cpp or {ENVIRONMENT_VARIABLE}"
            )
        parameters.put(offset, value, code)


def find_library() -> LlamaLibrary:
    """The llama.cpp library to use, the same one in all threads: the wheel, or that of `LLAMA_CPP_LIB` (a file, or a
    folder with one), which is used or refused, never replaced."""
    with _FINDING:  # opened twice, it would log to a freed callback
        return found_library(os.environ.get(ENVIRONMENT_VARIABLE))


def use_library(path: Path) -> None:
    """Makes this the library of this process and of those that it starts. Raises TargetError if it is none."""
    with _FINDING:
        found_library(str(path))
    os.environ[ENVIRONMENT_VARIABLE] = str(path)


def wheel() -> Path | None:
    """The library in the wheel, if that is installed. Windows' has no function that others can call."""
    spec = importlib.util.find_spec(WHEEL)  # finds the package without importing it
    folders = (
        [Path(folder) for folder in (spec.submodule_search_locations or ())]
        if spec
        else []
    )
    files = (path for folder in folders for path in sorted(folder.glob(f"{WHEEL}*")))
    return next((path for path in files if path.suffix == ".so"), None)


@cache
def found_library(chosen: str | None) -> LlamaLibrary:
    if not chosen and (installed := wheel()):
        return _opened(installed, f"{WHEEL} {metadata.version(WHEEL)}", origin=WHEEL)
    if not chosen:
        raise TargetError(f"no llama.cpp library found; {GET_LLAMA}")
    path = Path(chosen)
    if path.is_dir():
        files = [
            path for path in sorted(path.rglob("*llama*")) if _FILE.fullmatch(path.name)
        ]
        path = min(
            files, key=lambda path: (len(path.parts), len(path.name)), default=path
        )
    if path.is_dir() or (path.is_absolute() and not path.is_file()):
        raise TargetError(
            f"{chosen}: no llama.cpp library there; --llama-cpp and {ENVIRONMENT_VARIABLE} take a libllama file, "
            "or a folder with one"
        )
    return _opened(path, "", origin="your choice")


class _Joined(ctypes.CDLL):
    """llama.cpp's functions and ggml's: Windows finds none of the libraries that a library uses."""

    def __init__(self, library: ctypes.CDLL, folder: Path) -> None:
        super().__init__(library._name, handle=library._handle)
        files = filter(is_ggml, sorted(folder.iterdir()))
        self._others = [ctypes.CDLL(str(file)) for file in files]

    def __getattr__(self, name: str) -> Any:
        with suppress(AttributeError):
            return super().__getattr__(name)
        for library in self._others:
            if hasattr(library, name):
                return getattr(library, name)
        raise AttributeError(name)


def _opened(path: Path, package: str, origin: str) -> LlamaLibrary:
    try:
        with briefly_spinning():
            functions = ctypes.CDLL(str(path))
            if not hasattr(functions, "ggml_backend_reg_count"):
                functions = _Joined(functions, path.parent)
    except OSError as error:
        raise TargetError(f"{path} cannot be loaded: {error}") from error
    missing = [name for name in _SIGNATURES if not hasattr(functions, name)]
    if missing:
        raise TargetError(
            f"{path} is not a llama.cpp library of 2025 or later: it lacks {missing[0]}"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(functions, name)
        function.restype = result
        function.argtypes = list(arguments)
    for name in _BLOCKS:
        if hasattr(functions, name):
            getattr(functions, name).restype = ctypes.c_int64
    version = (
        ", ".join([*([package] if package else []), *_versions(functions)]) or "unknown"
    )
    library = LlamaLibrary(path, origin, functions, version)

    def log(level: int, text: bytes | None, _: object) -> None:
        if level == _ERROR_LEVEL and text:
            library.errors.append(text.decode(errors="replace").strip())
            del library.errors[:-20]

    library._callback = _LogCallback(log)
    functions.llama_log_set(library._callback, None)
    functions.llama_backend_init()
    _load_backends(functions, path)
    return library


def _load_backends(functions: ctypes.CDLL, path: Path) -> None:
    """Builds with loadable backends start with none, not even the CPU. Packages have one CPU backend per set of
    instructions beside the library; ggml takes the best that this processor runs."""
    if not (
        hasattr(functions, "ggml_backend_reg_count")
        and hasattr(functions, "ggml_backend_load_all")
    ):
        return
    functions.ggml_backend_reg_count.restype = ctypes.c_size_t
    if functions.ggml_backend_reg_count() == 0 and hasattr(
        functions, "ggml_backend_load_all_from_path"
    ):
        functions.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
        functions.ggml_backend_load_all_from_path(os.fsencode(path.resolve().parent))
    if functions.ggml_backend_reg_count() == 0:
        functions.ggml_backend_load_all()


def _versions(functions: ctypes.CDLL) -> Iterator[str]:
    for label, name in (
        ("llama.cpp", "llama_version"),
        ("ggml", "ggml_version"),
        ("commit", "ggml_commit"),
    ):
        if hasattr(functions, name):
            function = getattr(functions, name)
            function.restype = ctypes.c_char_p
            function.argtypes = []
            yield f"{label} {(function() or b'?').decode()}"
