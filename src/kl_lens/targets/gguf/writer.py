"""Writes the file: header first, then one tensor after the other, each read, quantized and written alone."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kl_lens.errors import TargetError
from kl_lens.formats import get_format
from kl_lens.formats.ggml import gguf_module

if TYPE_CHECKING:
    from kl_lens.targets.gguf.architectures import TensorRule
    from kl_lens.targets.gguf.tokenizer import TokenizerData
    from kl_lens.targets.gguf.weights import WeightSource

FLOAT32 = "fp32"  # what llama.cpp needs for everything that is no matrix product; no format of a plan
_CHUNK = 1 << 24  # weights that are turned to float32 at a time

# general.file_type, which tools show: the kind of most of the weights.
_FILE_TYPES = {
    FLOAT32: 0, "fp16": 1, "q4_0": 2, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q5_k": 16, "q6_k": 18,
    "q4_1": 3, "q3_k": 11, "iq2_xxs": 19, "iq2_xs": 20, "q2_k": 21, "iq3_xxs": 23, "iq4_nl": 25, "iq3_s": 26,
    "iq2_s": 28, "iq4_xs": 30,
}  # fmt: skip


@dataclass(frozen=True)
class TensorJob:
    """One tensor of the file, decided: where from, which shape, which format."""

    rule: TensorRule
    shape: tuple[int, ...]
    format: str

    @property
    def bytes(self) -> int:
        return (
            4 * math.prod(self.shape) if self.format == FLOAT32 else get_format(self.format).bytes(self.shape)
        )


def write_file(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tokenizer: TokenizerData | None,
    jobs: Sequence[TensorJob],
    weights: WeightSource,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes `path`, or leaves what was there before untouched.

    Args:
        metadata: keys that begin with a dot belong to the architecture and get its name in front.
        progress: called with (bytes written, bytes in all) after each tensor.
    """
    gguf = gguf_module()
    total, done = sum(job.bytes for job in jobs), 0
    with _renamed_when_complete(path) as partial:
        writer = gguf.GGUFWriter(partial, architecture)
        try:
            _add_metadata(writer, architecture, metadata)
            _add_tokenizer(writer, tokenizer)
            writer.add_file_type(_file_type(jobs))
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for job in jobs:
                _announce(writer, job)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for job in jobs:
                writer.write_tensor_data(stored_bytes(job, weights))
                done += job.bytes
                if progress:
                    progress(done, total)
        finally:
            writer.close()


def stored_bytes(job: TensorJob, weights: WeightSource) -> npt.NDArray[np.uint8]:
    """The tensor as the file holds it."""
    if job.rule.parameter is None:
        return np.zeros(job.bytes, np.uint8)
    name = job.rule.parameter
    tensor = job.rule.transform(weights.read(name))
    if tuple(tensor.shape) != job.shape:
        raise TargetError(
            f"{name}: expected shape {job.shape} for {job.rule.name}, found {tuple(tensor.shape)}"
        )
    if job.format == FLOAT32:
        values = tensor.float().contiguous()
        if not bool(values.isfinite().all()):
            raise TargetError(f"{name}: holds NaN or infinity; repair or fetch the checkpoint again")
        return values.numpy().reshape(-1).view(np.uint8)
    fmt = get_format(job.format)
    rows = tensor.reshape(-1, tensor.shape[-1])
    step = max(1, _CHUNK // rows.shape[1])
    data = np.empty(job.bytes, np.uint8)
    at = 0
    for first in range(0, rows.shape[0], step):  # rows are independent in every format
        packed = fmt.pack(fmt.quantize(rows[first : first + step], name))
        data[at : at + packed.size] = packed
        at += packed.size
    return data


def _announce(writer: Any, job: TensorJob) -> None:
    gguf = gguf_module()
    if job.format in (FLOAT32, "fp16"):
        dtype = np.dtype(np.float32 if job.format == FLOAT32 else np.float16)
        writer.add_tensor_info(job.rule.name, job.shape, dtype, job.bytes)
        return
    kind = gguf.GGMLQuantizationType[job.format.upper()]
    row_bytes = get_format(job.format).bytes((1, job.shape[-1]))
    shape = (*job.shape[:-1], row_bytes)  # gguf wants the shape in bytes here
    writer.add_tensor_info(job.rule.name, shape, np.dtype(np.uint8), job.bytes, raw_dtype=kind)


def _add_metadata(writer: Any, architecture: str, metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        name = architecture + key if key.startswith(".") else key
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, [int(item) for item in value])


def _add_tokenizer(writer: Any, tokenizer: TokenizerData | None) -> None:
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    for name, index in tokenizer.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    writer.add_add_bos_token(tokenizer.add_bos)


def _file_type(jobs: Sequence[TensorJob]) -> int:
    sizes: dict[str, int] = {}
    for job in jobs:
        sizes[job.format] = sizes.get(job.format, 0) + math.prod(job.shape)
    return _FILE_TYPES[max(sizes, key=lambda name: sizes[name])]


@contextmanager
def _renamed_when_complete(path: Path) -> Iterator[Path]:
    """A temporary path beside the real one: a file under its own name is always whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
