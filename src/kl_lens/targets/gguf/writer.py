"""Writes the file: header first, then one tensor after the other, each read, quantized and written alone."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kl_lens.errors import TargetError
from kl_lens.formats.ggml import gguf_module
from kl_lens.recipes import FP16, Recipe
from kl_lens.writing import whole

if TYPE_CHECKING:
    from kl_lens.checkpoints.streaming import TensorSource
    from kl_lens.targets.gguf.architectures import TensorRule
    from kl_lens.targets.gguf.tokenizer import TokenizerData
    from kl_lens.weights import WeightStore

FLOAT32 = "fp32"  # what llama.cpp needs for everything that is no matrix product; no format of a plan

# general.file_type, which tools show: the kind of most of the weights.
_FILE_TYPES = {
    FLOAT32: 0, FP16: 1, "q4_0": 2, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q5_k": 16, "q6_k": 18,
    "q4_1": 3, "q3_k": 11, "iq2_xxs": 19, "iq2_xs": 20, "q2_k": 21, "iq3_xxs": 23, "iq4_nl": 25, "iq3_s": 26,
    "iq2_s": 28, "iq4_xs": 30,
}  # fmt: skip


@dataclass(frozen=True)
class TensorJob:
    """One tensor of the file, decided: where from, which shape, which recipe."""

    rule: TensorRule
    component: str
    shape: tuple[int, ...]
    recipe: Recipe | None  # None: F32

    @property
    def format(self) -> str:
        return FLOAT32 if self.recipe is None else self.recipe.grid.name

    @property
    def bytes(self) -> int:
        return 4 * math.prod(self.shape) if self.recipe is None else self.recipe.grid.bytes(self.shape)


@dataclass(frozen=True)
class Stored:
    """One tensor as the file holds it."""

    data: npt.NDArray[np.uint8]
    weights: str = ""  # digest of the weight store's quantized weight, where that is what was stored


@dataclass(frozen=True)
class Header:
    """Everything in a file but the tensors' bytes."""

    architecture: str
    metadata: dict[
        str, Any
    ]  # keys that begin with a dot belong to the architecture and get its name in front
    tokenizer: TokenizerData | None
    jobs: Sequence[TensorJob]

    def begin(self, path: Path) -> Any:
        """A writer whose header is in the file, ready for the tensors."""
        gguf = gguf_module()
        writer = gguf.GGUFWriter(path, self.architecture)
        _add_metadata(writer, self.architecture, self.metadata)
        _add_tokenizer(writer, self.tokenizer)
        writer.add_file_type(_file_type(self.jobs))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for job in self.jobs:
            _announce(writer, job)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return writer


def size_on_disk(header: Header) -> int:
    """Of the whole file: the header and every tensor, each filled up to the alignment."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header.gguf"
        writer = header.begin(path)
        writer.close()
        parts = [path.stat().st_size, *(job.bytes for job in header.jobs)]
    unit = gguf_module().GGUF_DEFAULT_ALIGNMENT
    return sum(-(-part // unit) * unit for part in parts)


def write_file(
    path: Path, header: Header, tensors: TensorSource, store: WeightStore
) -> dict[str, tuple[str, str]]:
    """Writes `path`, or leaves what was there before untouched. Returns for each tensor the digests of what is stored:
    of its bytes, and of the weight store's quantized weight.
    """
    from kl_lens.weights import bytes_digest

    digests: dict[str, tuple[str, str]] = {}
    with whole(path) as partial:
        writer = header.begin(partial)
        try:
            for job in header.jobs:
                stored = stored_tensor(job, tensors, store)
                writer.write_tensor_data(stored.data)
                digests[job.rule.name] = (bytes_digest(stored.data), stored.weights)
        finally:
            writer.close()
    return digests


def stored_tensor(job: TensorJob, tensors: TensorSource, store: WeightStore) -> Stored:
    """The tensor as the file holds it: the store's rows, in the file's order."""
    rule = job.rule
    if rule.parameter is None:
        return Stored(np.zeros(job.bytes, np.uint8))
    if job.recipe is None:
        values = rule.arranged(tensors.read(rule.parameter).float() * rule.factors).contiguous()
        if not bool(values.isfinite().all()):
            raise TargetError(
                f"{rule.parameter}: holds NaN or infinity; repair or fetch the checkpoint again"
            )
        return Stored(values.numpy().reshape(-1).view(np.uint8))
    quantized = store.quantized(job.component, job.recipe, rule.factors)
    rows = rule.arranged(quantized.data)
    if tuple(rows.shape[:-1]) != job.shape[:-1]:
        raise TargetError(
            f"{rule.parameter}: expected shape {job.shape} for {rule.name}, found {tuple(rows.shape)}"
        )
    packed = job.recipe.grid.pack(replace(quantized, data=rows, shape=job.shape))
    own = isinstance(rule.factors, float) and rule.factors == 1.0
    return Stored(packed, quantized.digest if own else "")


def _announce(writer: Any, job: TensorJob) -> None:
    gguf = gguf_module()
    if job.format in (FLOAT32, FP16):
        dtype = np.dtype(np.float32 if job.format == FLOAT32 else np.float16)
        writer.add_tensor_info(job.rule.name, job.shape, dtype, job.bytes)
        return
    kind = gguf.GGMLQuantizationType[job.format.upper()]
    assert job.recipe is not None
    row_bytes = job.recipe.grid.bytes((1, job.shape[-1]))
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
