"""Checks a checkpoint's files before anything is loaded, so that errors are one line."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor

from kl_lens.base.errors import CheckpointError, one_line
from kl_lens.base.files import damage, tensor_digest

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
# Settings that count layers, which have at least one tensor each, and settings that are the length of an axis.
_LAYER_COUNT = re.compile(r"^n(um)?_(\w+_)?layers?$")
_AXIS = re.compile(r"^(d_model|\w*(size|_dim|_rank|_width|_heads|_experts))$")
# Types of tensors, as safetensors and torch spell them: plain floats, and numbers of one byte or less.
_FLOATS = re.compile(r"B?F(16|32|64)|b?float(16|32|64)")
_NARROW = re.compile(r"([FIU]|u?int|float)[468](_\w+)?")
_SCALE = re.compile("scale|SCB|absmax")  # in the names of their scales
# Heads for further tokens, and vision towers: no part of the language model.
LEFT_OUT = re.compile(r"^(mtp|model\.visual)\.")
# Left in files by older versions of transformers, and computed anew.
_HARMLESS = re.compile(
    r"\.(inv_freq|masked_bias|attn(ention)?\.bias|position_ids|num_batches_tracked)$"
)
BELONG = "weights and config.json do not belong together"
ORIGINAL = "give the original checkpoint, in 16 or 32 bits"
_ALWAYS_FINE = 1000  # sizes below this are never refused


@contextmanager
def refusing(
    message: str | Callable[[Exception], str],
    kinds: tuple[type[Exception], ...] = (Exception,),
) -> Iterator[None]:
    """Within the block, errors of libraries (default: all; over a strange setting they can be anything) become a
    `CheckpointError`: this message and the error's own, or what a function says about the error."""
    try:
        yield
    except CheckpointError:
        raise
    except kinds as error:
        line = f"{message} ({one_line(error)})" if isinstance(message, str) else ""
        raise CheckpointError(line or message(error)) from error  # type: ignore[operator]


@dataclass(frozen=True)
class Stored:
    """One tensor of a weight file."""

    path: Path
    name: str
    kind: str  # its type, as the file spells it
    shape: tuple[int, ...]
    bytes: int
    begin: int = 0  # in a safetensors file
    # Of other files: reads the values.
    made: Callable[[], Tensor] | None = field(default=None, compare=False, repr=False)


def read_config(folder: Path) -> dict[str, Any]:
    """Reads and checks config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a model: it has no config.json")
    config = _read_json(path)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object; download it again")
    classes = config.get("auto_map", {})
    if not isinstance(classes, dict) or not all(
        isinstance(name, (str, list)) for name in classes.values()
    ):
        raise CheckpointError(
            f"{path}: auto_map must name classes, not {classes!r}; remove it"
        )
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise CheckpointError(
            f"{path}: model_type must be a name, not {kind!r}; download it again"
        )
    return config


@dataclass(frozen=True)
class Foreign:
    """What stands for a checkpoint folder's weights: tensors of files in another program's format."""

    path: Path
    tensors: list[Stored]
    # What numbers compare with, where these are not the weights as they were trained.
    original: str = ""


FOREIGN: dict[Path, Foreign] = {}  # by the folder with their configuration


def weight_files(folder: Path) -> list[Path]:
    """The weight files, safetensors before pickles. Raises if one is missing or outside the folder."""
    if folder in FOREIGN:
        return sorted({tensor.path for tensor in FOREIGN[folder].tensors})
    for name in INDEXES:
        index = folder / name
        if index.is_file():
            return [_inside(folder, path) for path in _shards(index)]
    for name in SINGLE:
        if (folder / name).is_file():
            return [_inside(folder, folder / name)]
    raise CheckpointError(
        f"{folder} has no weights ({' or '.join(SINGLE)}, or shards with an index)"
    )


def _inside(folder: Path, path: Path) -> Path:
    """Raises for a link out of the folder, except to the hub's cache (`blobs`)."""
    target = path.resolve()
    if not target.is_relative_to(folder.resolve()) and target.parent.name != "blobs":
        raise CheckpointError(
            f"{path} is a link to {target}, outside its folder; copy the weights there"
        )
    return path


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder))


def is_quantized(name: str, kind: str) -> bool:
    """Whether a tensor of this type holds weights that are no plain floats; indexes, masks and counters do not."""
    # Old GPT-2 files keep masks as attn.bias.
    narrow = _NARROW.fullmatch(kind) and not name.endswith("bias")
    return bool(narrow or name.endswith("weight")) and not _FLOATS.fullmatch(kind)


def quant_method(config: dict[str, Any]) -> str | None:
    """What quantized the weights, according to config.json."""
    settings = config.get("quantization_config")
    return str(settings.get("quant_method")) if isinstance(settings, dict) else None


def refuse_quantized(
    folder: Path, config: dict[str, Any], advice: str | None = None
) -> None:
    """Raises for stored weights that mean nothing without scales, if there are none or nothing says how to use them.
    `advice`: raise for all quantized weights, with this advice; None: transformers will multiply with the scales."""
    tensors = stored_tensors(folder)
    names = [tensor.name.rpartition(".") for tensor in tensors]
    scaled = {owner for owner, _, leaf in names if _SCALE.search(leaf)}
    method = quant_method(config)
    for tensor in tensors:
        name = tensor.name
        if not is_quantized(name, tensor.kind):
            continue
        if not scaled & {name, name.rpartition(".")[0]}:
            reason = "and the files hold no scales for it"
        elif method is None:
            reason = "and config.json has no quantization_config that says how to read it"
        elif advice:
            reason = f"quantized with {method}"
        else:
            continue
        raise CheckpointError(
            f"{folder}: {name} is stored as {tensor.kind}, {reason}; {advice or ORIGINAL}"
        )


def check_sizes(folder: Path, config: dict[str, Any]) -> None:
    """Raises for counts and sizes that cannot fit weights of this size; a library would try to allocate them."""
    tensors = len(stored_tensors(folder))
    stored = weight_bytes(folder)
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    for name, value in (item for part in parts for item in part.items()):
        if not isinstance(value, int):
            continue
        if _LAYER_COUNT.match(name) and value > tensors:
            content = f"{tensors} tensors"
        elif _AXIS.match(name) and value > max(stored, _ALWAYS_FINE):
            content = f"{stored} bytes"
        else:
            continue
        raise CheckpointError(
            f"{folder / 'config.json'}: {name} is {value}, but the weights have only {content}; {BELONG}"
        )


def stored_tensors(folder: Path) -> list[Stored]:
    """Every tensor of the weight files. Raises for a damaged file."""
    if folder in FOREIGN:
        return FOREIGN[folder].tensors
    return [tensor for path in weight_files(folder) for tensor in _contents(path)]


def _contents(path: Path) -> Iterator[Stored]:
    if path.suffix == ".safetensors":
        with (
            refusing(lambda error: f"{path} {damage(path)} ({one_line(error)})"),
            safe_open(path, framework="numpy"),  # checks it
            path.open("rb") as file,
        ):
            length = int.from_bytes(file.read(8), "little")
            table = json.loads(file.read(length))
        table.pop("__metadata__", None)
        for name, entry in table.items():
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            start = 8 + length + begin
            yield Stored(path, name, entry["dtype"], shape, end - begin, start)
        return
    advice = "or convert it to safetensors with the tool that made it: it may hold more than tensors"
    with refusing(
        lambda error: f"{path} {damage(path)}, {advice} ({one_line(error, 80)})"
    ):
        options = {"weights_only": True, "mmap": is_zipfile(path)}
        for name, tensor in torch.load(path, map_location="cpu", **options).items():
            shape = tuple(tensor.shape)
            kind = dtype_name(tensor)
            # A copy: the file is mapped.
            yield Stored(path, name, kind, shape, tensor.nbytes, made=tensor.clone)


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def read_stored(stored: Stored) -> Tensor:
    """The values of one tensor."""
    if stored.made is not None:
        return stored.made()
    with safe_open(stored.path, framework="pt") as file:
        return file.get_tensor(stored.name)


def refuse_broken_numbers(folder: Path, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises for NaN or infinity: every measurement would be wrong."""
    for name, tensor in named:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = (float(value) for value in tensor.aminmax())
        if math.isfinite(low) and math.isfinite(high):
            continue
        fault = "NaN" if math.isnan(low) else f"infinite in {dtype_name(tensor)}"
        raise CheckpointError(
            f"{folder}: a number in {name} is {fault}; the weights are damaged"
        )


def weights_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Of tensors by their names: two models with one digest are one."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in named:
        about = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        digest.update(tensor_digest(tensor, about=about).encode())
    return digest.hexdigest()


def refuse_misfits(
    folder: Path,
    *,
    missing: Iterable[str] = (),
    unused: Iterable[str] = (),
    mismatched: Iterable[tuple[str, Any, Any]] = (),
) -> None:
    """Raises for tensors that the model needs or the files have alone, or that differ in shape (file's, model's).
    transformers fills what is missing with random numbers and continues; we must not."""
    if wrong := sorted(mismatched):
        name, stored, wanted = wrong[0]
        raise CheckpointError(
            f"{folder}: tensor {name} has shape {tuple(stored)}, config.json asks for {tuple(wanted)}"
            f"{and_more(wrong)}; {BELONG}"
        )
    if lacking := sorted(missing):
        raise CheckpointError(
            f"{folder}: the weights lack {lacking[0]}{and_more(lacking)}; download the checkpoint again, or check "
            "that config.json belongs to these weights"
        )
    if extra := sorted(
        name for name in unused if not _HARMLESS.search(name) and not LEFT_OUT.match(name)
    ):
        raise CheckpointError(
            f"{folder}: {extra[0]}{and_more(extra)} is not in config.json's model; {BELONG}"
        )


def _read_json(path: Path) -> Any:
    def refuse_nan(constant: str) -> float:
        if constant == "NaN":  # infinity is fine: Mamba-2's time_step_limit
            raise ValueError("it contains NaN")
        return float(constant)

    with refusing(
        lambda error: f"{path} {damage(path)} (not valid JSON: {one_line(error)})",
        (ValueError, RecursionError),  # ValueError: not JSON or not UTF-8
    ):
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_nan)


def and_more(items: Sequence[Any]) -> str:
    """What to write behind the first of these."""
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _shards(index: Path) -> list[Path]:
    content = _read_json(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files or "metadata" not in content:
        raise CheckpointError(f"{index} is not a valid shard index; download it again")
    names = sorted({str(name) for name in files.values()})
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(
                f"{index} names {name}, which is outside its folder; download it again"
            )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: shard {missing[0]} is missing{and_more(missing)}; download it"
        )
    return [index.parent / name for name in names]
