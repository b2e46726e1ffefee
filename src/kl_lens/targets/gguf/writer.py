"""Writes the files: headers first, then each tensor is read, quantized and written on its own."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kl_lens.base.errors import TargetError
from kl_lens.base.files import naming, replacing
from kl_lens.weights.formats.ggml import gguf_module
from kl_lens.weights.recipes import FP16, Recipe

if TYPE_CHECKING:
    from kl_lens.model.streaming import TensorSource
    from kl_lens.targets.gguf.architectures import TensorRule
    from kl_lens.targets.gguf.tokenizer import TokenizerData
    from kl_lens.weights.store import WeightStore

FLOAT32 = "fp32"  # for everything that is not a matrix product; not a format of plans

# general.file_type, which tools show: the type of most weights.
_FILE_TYPES = {
    FLOAT32: 0, FP16: 1, "q4_0": 2, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14, "q5_k": 16, "q6_k": 18,
    "q4_1": 3, "q3_k": 11, "iq2_xxs": 19, "iq2_xs": 20, "q2_k": 21, "iq3_xxs": 23, "iq4_nl": 25, "iq3_s": 26,
    "iq2_s": 28, "iq4_xs": 30,
}  # fmt: skip


@dataclass(frozen=True)
class TensorJob:
    """One tensor of the file: its source, shape and recipe."""

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
    weights: str = ""  # digest of the weight store's quantized weight, if that was stored


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
    from kl_lens.base.digests import bytes_digest

    digests: dict[str, tuple[str, str]] = {}
    with replacing(folder) as place, naming(folder / header.name):
        writer = header.begin(place)
        try:
            for job in header.jobs:
                stored = stored_tensor(job, tensors, store)
                writer.write_tensor_data(stored.data)
                digests[job.rule.name] = (bytes_digest(stored.data), stored.weights)
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


def stored_tensor(job: TensorJob, tensors: TensorSource, store: WeightStore) -> Stored:
    """The tensor as the file holds it: the store's rows, in the file's order."""
    rule = job.rule
    if rule.parameter is None:
        return Stored(np.zeros(job.bytes, np.uint8))
    if job.recipe is None:
        values = rule.arranged(tensors.read(rule.parameter).float() * rule.factors).contiguous()
        if not bool(values.isfinite().all()):
            raise TargetError(
                f"{rule.parameter}: has NaN or infinity; repair the checkpoint or download it again"
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


def _file_type(jobs: Sequence[TensorJob]) -> int:
    sizes: dict[str, int] = {}
    for job in jobs:
        sizes[job.format] = sizes.get(job.format, 0) + math.prod(job.shape)
    return _FILE_TYPES[max(sizes, key=lambda name: sizes[name])]
