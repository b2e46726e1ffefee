"""A file's `general.*` metadata and its name, as llama.cpp's converter makes them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kl_lens.base.units import tag_of
from kl_lens.base.version import __version__
from kl_lens.run.records import Plan
from kl_lens.targets.chat import GENERATION_FILE, read_json
from kl_lens.targets.gguf.choices import TensorJob
from kl_lens.weights.formats.gguf_blocks import gguf_module
from kl_lens.weights.recipes import FP16

_HUB = "https://huggingface.co/"


def general_metadata(folder: Path, name: str, counts: tuple[int, int, int, int]) -> Any:
    """gguf's `Metadata`, from the model card, the settings in the checkpoint's folder and the model's name (a folder's
    or a hub id). `counts` of parameters: all, shared, of one expert, and how many experts."""
    gguf = gguf_module()
    try:
        card, config = gguf.Metadata.load_model_card(folder), gguf.Metadata.load_hf_parameters(folder)
        metadata = _from(card, config, name, counts[0])
        usable = _usable(metadata)
    except Exception:  # cards are written by hand: invalid YAML, or a number as a name
        usable = False
    if not usable:
        metadata = _from({}, {}, name, counts[0])
    settings = read_json(folder / GENERATION_FILE)
    sampling = {"sampling_top_k": "top_k", "sampling_top_p": "top_p", "sampling_temp": "temperature"}
    for field, key in sampling.items():
        if isinstance(value := settings.get(key), int | float):
            setattr(metadata, field, value)
    metadata.size_label = metadata.size_label or gguf.size_label(*counts)
    metadata.quantized_by = f"KL Lens {__version__}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        metadata.source_repo_url = _HUB + name
    return metadata


def _from(card: dict[str, Any], config: dict[str, Any], name: str, parameters: int) -> Any:
    gguf = gguf_module()
    owner, _, own = name.rpartition("/")
    # `_name_or_path` is often a path on the trainer's machine.
    config = {key: value for key, value in config.items() if key != "_name_or_path"}
    metadata = gguf.Metadata.apply_metadata_heuristic(
        gguf.Metadata(), card, config, Path(own or name), parameters
    )
    if owner and metadata.organization is None:
        metadata.organization = gguf.Metadata.id_to_title(owner)
    return metadata


def _usable(metadata: Any) -> bool:
    """Whether all text fields are text."""
    writer = gguf_module().GGUFWriter(None, "none")
    metadata.set_gguf_meta_model(writer)
    kinds = {"STRING": str, "ARRAY": list, "UINT32": int}
    return all(
        isinstance(field.value, kinds.get(field.type.name, object)) for field in writer.kv_data[0].values()
    )


def file_name(metadata: Any, plan: Plan, jobs: Sequence[TensorJob]) -> str:
    """By the GGUF naming convention, BaseName-SizeLabel-FineTune-Version-Encoding: `Mamba2-130M-KL-4.5bpw.gguf`."""
    stem = gguf_module().naming_convention(
        metadata.name, metadata.basename, metadata.finetune, metadata.version, metadata.size_label, None
    )
    return f"{tag_of(stem)}-{_encoding(plan, jobs)}.gguf"


def _encoding(plan: Plan, jobs: Sequence[TensorJob]) -> str:
    if plan.family == "stock":
        return tag_of(plan.name.removeprefix("stock.")).upper()
    formats = {job.format for job in jobs if job.recipe is not None and job.format != FP16}
    if not formats:
        return "F16"
    if len(formats) == 1 and len(set(plan.assignment.values())) == 1:
        return formats.pop().upper()
    bits = 8 * sum(job.bytes for job in jobs) / sum(math.prod(job.shape) for job in jobs)
    return f"KL-{bits:.1f}bpw"
