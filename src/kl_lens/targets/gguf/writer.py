"""Writes the files: headers first, then each tensor is read, quantized and written on its own.

A file's `general.*` metadata and its name are as llama.cpp's converter makes them.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kl_lens.base.accelerators import on_host
from kl_lens.base.errors import TargetError
from kl_lens.base.files import bytes_digest, naming
from kl_lens.base.units import tag_of
from kl_lens.base.version import __version__
from kl_lens.model import LoadedModel
from kl_lens.model.files import read_stored
from kl_lens.run.records import ExportedTensor, Plan
from kl_lens.targets.exporting import GENERATION_FILE
from kl_lens.targets.gguf.architectures.base import TensorRule
from kl_lens.targets.gguf.tokenizer import CHAT_TEMPLATE, PREFIX, TokenizerData
from kl_lens.targets.tokenizer import read_json
from kl_lens.weights.formats import Quantized
from kl_lens.weights.formats.ggml_types import as_blocks, ggml_types
from kl_lens.weights.formats.gguf_blocks import gguf_module
from kl_lens.weights.recipes import FP16, Recipe
from kl_lens.weights.store import WeightStore

NO_TOKENIZER = "none"
FLOAT32 = "fp32"  # for everything that is not a matrix product; not a format of plans
# llama.cpp's numbers of kinds of files; of the others, gguf's are taken.
_FILE_TYPES = {FLOAT32: 0, FP16: 1, "mxfp4": 38, "q2_0": 41}


class ModelTensors:
    """A model's parameters and buffers, each once, under transformers' names; its weights may be on disk."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._tensors = dict[str, torch.Tensor]()
        first: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, tensor in model.model.state_dict(keep_vars=True).items():
            if first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name) == name:
                self._tensors[name] = tensor
        self.shapes = {
            name: tuple(tensor.shape) for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """The values on the CPU."""
        if (stored := self._model.further_heads.get(name)) is not None:
            return read_stored(stored)
        tensor = self._tensors[name]
        residency = self._model.residency
        return (
            tensor.detach() if residency is None else residency.original(tensor)
        ).cpu()


@dataclass(frozen=True)
class TensorJob:
    """One tensor of the file: its source, shape and recipe (None: F32)."""

    rule: TensorRule
    component: str
    shape: tuple[int, ...]
    planned: Recipe | None
    recipe: Recipe | None
    reason: str | None  # why they differ
    parts: tuple[TensorJob, ...] = ()  # of a tensor that several parameters make

    @property
    def format(self) -> str:
        if self.rule.copied is not None:
            return self.rule.copied.format
        return FLOAT32 if self.recipe is None else self.recipe.grid.name

    @property
    def bytes(self) -> int:
        if self.rule.copied is not None:
            return self.rule.copied.bytes
        return (
            4 * math.prod(self.shape)
            if self.recipe is None
            else self.recipe.grid.bytes(self.shape)
        )

    @property
    def planned_bytes(self) -> int:
        """In the planned format, or in FP16 if that does not fit the shape."""
        if self.planned is None:
            return 4 * math.prod(self.shape)
        fmt = self.planned.grid
        return (
            2 * math.prod(self.shape) if fmt.fits(self.shape) else fmt.bytes(self.shape)
        )

    def record(self, digest: str, weights: str) -> ExportedTensor:
        formats = (self.planned or self.format, self.recipe or self.format)
        return ExportedTensor(
            self.component,
            self.rule.name,
            *formats,
            self.bytes,
            self.reason,
            digest,
            weights,
        )


@dataclass(frozen=True)
class Header:
    """Everything in a file except the tensors' bytes."""

    architecture: str
    metadata: dict[
        str, Any
    ]  # keys that begin with a dot get the architecture's name as prefix
    general: Any  # gguf's Metadata
    tokenizer: TokenizerData | None
    jobs: Sequence[TensorJob]
    name: str  # of the file; parts get a number
    part_bytes: int  # a file with more bytes of weights is written in parts
    # Of a template, in place of general metadata and tokenizer: key, value, type, type within a list.
    copied: Sequence[tuple[str, Any, int, int | None]] = ()

    @property
    def pre_tokenizer(self) -> str:
        """llama.cpp's name for how text is split before merging."""
        metadata = {key: value for key, value, *_ in self.copied}
        metadata |= self.tokenizer.metadata if self.tokenizer else {}
        name = metadata.get(f"{PREFIX}pre", metadata.get(f"{PREFIX}model", NO_TOKENIZER))
        return name if isinstance(name, str) else name.decode(errors="replace")

    def begin(self, folder: Path) -> Any:
        """A writer that has written the headers and is ready for tensors."""
        gguf = gguf_module()
        fits = sum(job.bytes for job in self.jobs) <= self.part_bytes
        writer = gguf.GGUFWriter(
            folder / self.name,
            self.architecture,
            split_max_size=0 if fits else self.part_bytes,
        )
        kinds = gguf.GGUFValueType
        for key, value, kind, inner in self.copied:
            within = None if inner is None else kinds(inner)
            writer.add_key_value(key, value, kinds(kind), within)
        if not self.copied:
            writer.add_type("model")
            self.general.set_gguf_meta_model(writer)
        tokenizer = self.tokenizer.metadata if self.tokenizer else {}
        if self.pre_tokenizer == NO_TOKENIZER:
            tokenizer = {f"{PREFIX}model": "no_vocab"}
        for key, value in (self.metadata | tokenizer).items():
            if key == CHAT_TEMPLATE and value:
                writer.add_chat_template(value)
            elif value or isinstance(value, int | float):
                name = self.architecture + key if key.startswith(".") else key
                writer.add_key_value(name, *_typed(value))
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
        most = max(sizes, key=lambda name: sizes[name])
        types = gguf_module().LlamaFileType
        if most in _FILE_TYPES:
            return _FILE_TYPES[most]
        name = f"MOSTLY_{most.upper()}"
        return int(types[f"{name}_S" if f"{name}_S" in types.__members__ else name])


def size_on_disk(header: Header) -> int:
    """Bytes of all files: headers and tensors, padded to the alignment."""
    with tempfile.TemporaryDirectory() as folder:
        header.begin(Path(folder)).close()
        parts = [path.stat().st_size for path in Path(folder).iterdir()]
    unit = gguf_module().GGUF_DEFAULT_ALIGNMENT
    return sum(
        -(-part // unit) * unit for part in (*parts, *(job.bytes for job in header.jobs))
    )


def write_files(
    folder: Path, header: Header, tensors: ModelTensors, store: WeightStore
) -> list[ExportedTensor]:
    """Writes the files; returns the records of their tensors."""
    records = []
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder / header.name):
        writer = header.begin(folder)
        try:
            for job in header.jobs:
                stored = [
                    (part, *_stored(part, tensors, store)) for part in job.parts or (job,)
                ]
                writer.write_tensor_data(np.concatenate([data for _, data, _ in stored]))
                records += [
                    part.record(bytes_digest(data), weights)
                    for part, data, weights in stored
                ]
        finally:
            writer.close()
    return records


def parameter_counts(jobs: Sequence[TensorJob]) -> tuple[int, int, int, int]:
    """Parameters: all, shared, of one expert; and the number of experts, as gguf counts them."""
    writer = gguf_module().GGUFWriter(None, "none")
    for job in jobs:
        _announce(writer, job)
    counts: tuple[int, int, int, int] = writer.get_total_parameter_count()
    return counts


def _stored(
    job: TensorJob, tensors: ModelTensors, store: WeightStore
) -> tuple[npt.NDArray[np.uint8], str]:
    """The tensor's bytes, and the digest of the store's quantized weight if they are its rows in the file's order."""
    rule = job.rule
    if (entry := rule.copied) is not None:
        return np.fromfile(entry.path, np.uint8, entry.bytes, offset=entry.offset), ""
    if rule.parameter is None:
        return np.array(rule.constant, np.float32).view(np.uint8), ""
    if job.recipe is None:
        values = rule.arranged(
            tensors.read(rule.parameter).float() * rule.factors
        ).contiguous()
        if not bool(values.isfinite().all()):
            raise TargetError(
                f"{rule.parameter}: has NaN or infinity; repair or download the checkpoint"
            )
        return values.numpy().reshape(-1).view(np.uint8), ""
    if rule.parameter in tensors.shapes:
        quantized = store.quantized(job.component, job.recipe, rule.factors)
    else:  # a head for further tokens
        quantized = job.recipe.grid.quantize(tensors.read(rule.parameter), rule.parameter)
    parts = {name: rule.arranged(part) for name, part in quantized.tensors.items()}
    if tuple(parts["data"].shape[:-1]) != job.shape[:-1]:
        raise TargetError(
            f"{rule.parameter}: has shape {tuple(parts['data'].shape)} for {rule.name}, not {job.shape}"
        )
    blocks = as_blocks(Quantized(quantized.format, job.shape, **parts))
    packed = on_host(blocks).contiguous().numpy().reshape(-1).view(np.uint8)
    unchanged = isinstance(rule.factors, float) and rule.factors == 1.0
    return packed, quantized.digest if unchanged else ""


def _announce(writer: Any, job: TensorJob) -> None:
    kind = ggml_types()[job.format].number
    writer.add_tensor_info(
        job.rule.name, job.shape, np.dtype(np.float32), job.bytes, raw_dtype=kind
    )


def _typed(value: Any) -> tuple[Any, Any]:
    """A value of metadata with its type."""
    kinds = gguf_module().GGUFValueType
    # gguf takes integers for signed ones.
    return value, kinds.UINT32 if type(value) is int else kinds.get_type(value)


def general_metadata(folder: Path, name: str, counts: tuple[int, int, int, int]) -> Any:
    """gguf's `Metadata`, from the model card, the settings in the checkpoint's folder and the model's name (a folder's
    or a hub id). `counts` of parameters: all, shared, of one expert, and how many experts."""
    gguf = gguf_module()
    try:
        card = gguf.Metadata.load_model_card(folder)
        config = gguf.Metadata.load_hf_parameters(folder)
        metadata = _from(card, config, name, counts[0])
    except Exception:  # cards are written by hand: invalid YAML, or a number as a name
        metadata = _from({}, {}, name, counts[0])
    settings = read_json(folder / GENERATION_FILE)
    sampling = {
        "sampling_top_k": "top_k",
        "sampling_top_p": "top_p",
        "sampling_temp": "temperature",
    }
    for field, key in sampling.items():
        if isinstance(value := settings.get(key), int | float):
            setattr(metadata, field, value)
    metadata.size_label = metadata.size_label or gguf.size_label(*counts)
    metadata.quantized_by = f"KL Lens {__version__}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        metadata.source_repo_url = f"https://huggingface.co/{name}"
    return metadata


def _from(
    card: dict[str, Any], config: dict[str, Any], name: str, parameters: int
) -> Any:
    gguf = gguf_module()
    owner, _, leaf = name.rpartition("/")
    # `_name_or_path` is often a path on the trainer's machine.
    config = {key: value for key, value in config.items() if key != "_name_or_path"}
    metadata = gguf.Metadata.apply_metadata_heuristic(
        gguf.Metadata(), card, config, Path(leaf or name), parameters
    )
    if owner and metadata.organization is None:
        metadata.organization = gguf.Metadata.id_to_title(owner)
    writer = gguf.GGUFWriter(None, "none")
    metadata.set_gguf_meta_model(writer)
    kinds = {"STRING": str, "ARRAY": list, "UINT32": int}
    for field in writer.kv_data[0].values():
        if not isinstance(field.value, kinds.get(field.type.name, object)):
            raise ValueError(f"{field.value} is not of type {field.type.name}")
    return metadata


def file_name(metadata: Any, plan: Plan, jobs: Sequence[TensorJob]) -> str:
    """By the GGUF naming convention, BaseName-SizeLabel-FineTune-Version-Encoding: `Mamba2-130M-KL-4.5bpw.gguf`."""
    stem = gguf_module().naming_convention(
        metadata.name,
        metadata.basename,
        metadata.finetune,
        metadata.version,
        metadata.size_label,
        None,
    )
    formats = {
        job.format for job in jobs if job.recipe is not None and job.format != FP16
    }
    if plan.family == "stock":
        encoding = tag_of(plan.name.removeprefix("stock.")).upper()
    elif not formats:
        encoding = "F16"
    elif len(formats) == 1 and len(set(plan.assignment.values())) == 1:
        encoding = formats.pop().upper()
    else:
        # As in plans: what is not quantizable counts as FP16, though the file has it in float32.
        weights = [math.prod(job.shape) for job in jobs]
        stored = [
            2 * count if job.recipe is None else job.bytes
            for job, count in zip(jobs, weights, strict=True)
        ]
        bits = 8 * sum(stored) / sum(weights)
        encoding = f"KL-{bits:.1f}bpw"
    return f"{tag_of(stem)}-{encoding}.gguf"
