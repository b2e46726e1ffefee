"""Writes the files: headers first, then each tensor is read, quantized and written on its own."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kl_lens.base.digests import bytes_digest
from kl_lens.base.errors import TargetError
from kl_lens.base.files import naming, replacing
from kl_lens.model.streaming import TensorSource
from kl_lens.targets.gguf.choices import FLOAT32, TensorJob
from kl_lens.targets.gguf.tokenizer import TokenizerData
from kl_lens.weights.formats.gguf_blocks import gguf_module
from kl_lens.weights.recipes import FP16
from kl_lens.weights.store import WeightStore


@dataclass(frozen=True)
class Header:
    """Everything in a file except the tensors' bytes."""

    architecture: str
    metadata: dict[str, Any]  # keys that begin with a dot get the architecture's name as prefix
    general: Any  # gguf's Metadata
    tokenizer: TokenizerData | None
    jobs: Sequence[TensorJob]
    name: str  # of the file; parts get a number
    part_bytes: int  # a file with more bytes of weights is written in parts

    def begin(self, folder: Path) -> Any:
        """A writer that has written the headers and is ready for tensors."""
        gguf = gguf_module()
        fits = sum(job.bytes for job in self.jobs) <= self.part_bytes
        writer = gguf.GGUFWriter(
            folder / self.name, self.architecture, split_max_size=0 if fits else self.part_bytes
        )
        writer.add_type("model")
        self.general.set_gguf_meta_model(writer)
        for key, value in self.metadata.items():
            if value or not isinstance(value, str | list | tuple):
                name = self.architecture + key if key.startswith(".") else key
                writer.add_key_value(name, *_typed(value))
        _add_tokenizer(writer, self.tokenizer)
        writer.add_file_type(self._file_type())
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for job in self.jobs:
            _announce(writer, job)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return writer

    def _file_type(self) -> int:
        """The type of most weights, which tools show; the plain variant where llama.cpp mixes types under one name."""
        sizes = Counter[str]()
        for job in self.jobs:
            sizes[job.format] += math.prod(job.shape)
        most, types = max(sizes, key=lambda name: sizes[name]), gguf_module().LlamaFileType
        name = {FLOAT32: "ALL_F32", FP16: "MOSTLY_F16"}.get(most, f"MOSTLY_{most.upper()}")
        return int(types[f"{name}_S" if f"{name}_S" in types.__members__ else name])


def size_on_disk(header: Header) -> int:
    """Bytes of all files: headers and tensors, padded to the alignment."""
    with tempfile.TemporaryDirectory() as folder:
        header.begin(Path(folder)).close()
        parts = [
            *(path.stat().st_size for path in Path(folder).iterdir()),
            *(job.bytes for job in header.jobs),
        ]
    unit = gguf_module().GGUF_DEFAULT_ALIGNMENT
    return sum(-(-part // unit) * unit for part in parts)


def write_files(
    folder: Path, header: Header, tensors: TensorSource, store: WeightStore
) -> tuple[tuple[Path, ...], dict[str, tuple[str, str]]]:
    """Writes the files to `folder`; on an error, the folder stays as it was.

    Returns the files in order of their parts, and for each tensor the digests of its stored bytes and of the weight
    store's quantized weight.
    """
    digests: dict[str, tuple[str, str]] = {}
    with replacing(folder) as place, naming(folder / header.name):
        writer = header.begin(place)
        try:
            for job in header.jobs:
                data, weights = _stored(job, tensors, store)
                writer.write_tensor_data(data)
                digests[job.rule.name] = (bytes_digest(data), weights)
        finally:
            writer.close()
        names = sorted(path.name for path in place.iterdir())
    return tuple(folder / name for name in names), digests


def parameter_counts(jobs: Sequence[TensorJob]) -> tuple[int, int, int, int]:
    """Parameters: all, shared, of one expert; and the number of experts, as gguf counts them."""
    writer = gguf_module().GGUFWriter(None, "none")
    for job in jobs:
        _announce(writer, job)
    counts: tuple[int, int, int, int] = writer.get_total_parameter_count()
    return counts


def _stored(job: TensorJob, tensors: TensorSource, store: WeightStore) -> tuple[npt.NDArray[np.uint8], str]:
    """The tensor's bytes, and the digest of the store's quantized weight if they are its rows in the file's order."""
    rule = job.rule
    if rule.parameter is None:
        return np.zeros(job.bytes, np.uint8), ""
    if job.recipe is None:
        values = rule.arranged(tensors.read(rule.parameter).float() * rule.factors).contiguous()
        if not bool(values.isfinite().all()):
            raise TargetError(f"{rule.parameter}: has NaN or infinity; repair or download the checkpoint")
        return values.numpy().reshape(-1).view(np.uint8), ""
    quantized = store.quantized(job.component, job.recipe, rule.factors)
    rows = rule.arranged(quantized.data)
    if tuple(rows.shape[:-1]) != job.shape[:-1]:
        raise TargetError(f"{rule.parameter}: has shape {tuple(rows.shape)} for {rule.name}, not {job.shape}")
    packed = job.recipe.grid.pack(replace(quantized, data=rows, shape=job.shape))
    own = isinstance(rule.factors, float) and rule.factors == 1.0
    return packed, quantized.digest if own else ""


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


def _typed(value: Any) -> tuple[Any, Any]:
    """A value of metadata with its type."""
    kinds = gguf_module().GGUFValueType
    if isinstance(value, list | tuple):
        return [int(item) for item in value], kinds.ARRAY
    known = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    return value, next(kind for own, kind in known.items() if isinstance(value, own))


def _add_tokenizer(writer: Any, tokenizer: TokenizerData | None) -> None:
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
        return
    writer.add_tokenizer_model(tokenizer.model)
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    if tokenizer.merges:
        writer.add_token_merges(tokenizer.merges)
    if tokenizer.scores:
        writer.add_token_scores(tokenizer.scores)
    for name, index in tokenizer.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    for name, switch in tokenizer.switches.items():
        writer.add_bool(f"tokenizer.ggml.{name}", switch)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
