"""Reads weights one tensor at a time from a checkpoint that is never whole in memory, under transformers' names.
Checkpoints often use older names or store each expert apart; `CheckpointTensors` translates."""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from kl_lens.base.errors import CheckpointError, one_line
from kl_lens.base.system import processors, read_at
from kl_lens.model.files import (
    LEFT_OUT,
    Stored,
    refuse_misfits,
    refusing,
    stored_tensors,
    weight_files,
)

# Names in the mamba_ssm layout; all others are in transformers' own tables.
_MAMBA_SSM = {r"^backbone\.embedding\.": "backbone.embeddings."}
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_AT_ONCE = 16 << 20  # bytes per read: a fast disk needs several threads


def join_twins(model: torch.nn.Module, are_equal: Callable[[str, str], bool]) -> None:
    """Ties embedding and head if they are the `same` by their names, as in Mamba-2 checkpoints that store one matrix
    twice and do not say so in config.json. The same function with one matrix less in every file."""
    try:
        modules = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    except NotImplementedError:
        return  # foreign code may not say which they are; then they stay two components
    weights = [getattr(module, "weight", None) for module in modules]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first, second = (names.get(id(weight)) for weight in weights)
    if first and second and first != second and are_equal(second, first):
        modules[1].weight = weights[0]
        config: Any = model.config
        config.tie_word_embeddings = True  # for saving it again


@dataclass(frozen=True)
class _Assembly:
    """A transformers parameter: stored tensors, each with its pattern in the table, and what joins them, if needed."""

    parts: tuple[tuple[str | None, Stored], ...]
    converter: WeightConverter | None
    config: Any
    is_turned: bool  # stored transposed

    def made(self, read: Callable[[Stored], Tensor]) -> Tensor:
        if self.converter is None:
            tensor = read(self.parts[0][1])
            return tensor.T.contiguous() if self.is_turned else tensor
        tensors: dict[Any, Any] = defaultdict(list)
        for pattern, part in self.parts:
            tensors[pattern].append(read(part))
        table = {
            "source_patterns": self.converter.source_patterns,
            "target_patterns": self.converter.target_patterns,
        }
        for operation in self.converter.operations:
            tensors = operation.convert(tensors, **table, config=self.config)
        (joined,) = tensors.values()
        return joined

    def shape(self, folder: Path, name: str) -> tuple[int, ...]:
        try:
            joined = self.made(lambda part: torch.empty(part.shape, device="meta"))
            return tuple(joined.shape)
        except Exception as error:  # transformers checks nothing before it joins
            refuse_misfits(folder, missing=self._lacking())
            raise CheckpointError(
                f"{folder}: {name} cannot be joined from its parts ({one_line(error)})"
            ) from error

    def _lacking(self) -> list[str]:
        """What one kind of parts has, such as the experts' `up_proj`, and another, such as `gate_proj`, has not."""
        kinds: dict[tuple[str, ...], set[tuple[str, ...]]] = defaultdict(set)
        for _, part in self.parts:
            words = re.split(r"(\d+)", part.name)
            kinds[tuple(words[::2])].add((*words[1::2], ""))
        every = set.union(*kinds.values())
        return [
            "".join(text + number for text, number in zip(kind, numbers, strict=True))
            for kind, numbered in kinds.items()
            for numbers in sorted(every - numbered)
            if len(numbers) == len(kind)
        ]


class CheckpointTensors:
    """The weights of a checkpoint folder. safetensors are read with pread and never mapped: mapped pages count as
    memory, and the process dies if the file is truncated."""

    def __init__(self, folder: Path, model: Any, *, pinned: bool = False) -> None:
        """`model`: transformers' model of the checkpoint; its weights are not read."""
        self._folder = folder
        self._pinned = pinned
        self._readers = ThreadPoolExecutor(
            min(8, processors()), thread_name_prefix="kl-lens-file"
        )
        self._files = {
            path: path.open("rb", buffering=0) for path in weight_files(folder)
        }
        self._states = {path: _state(file) for path, file in self._files.items()}
        self._assemblies = _assemblies(folder, model)
        self.shapes = {
            name: assembly.shape(folder, name)
            for name, assembly in self._assemblies.items()
        }

    def places(self, wanted: Mapping[str, Tensor]) -> dict[int, str]:
        """Where a model's tensors are stored, by id: a shared one under one of its names. Raises for tensors that
        are missing or of another shape, and for stored ones that the model does not have."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, tensor in wanted.items():
            names[id(tensor)].append(name)
        stored = {
            key: next((name for name in aliases if name in self.shapes), "")
            for key, aliases in names.items()
        }
        refuse_misfits(
            self._folder,
            missing=[names[key][0] for key, name in stored.items() if not name],
            unused=self.shapes.keys() - wanted.keys(),
            mismatched=[
                (name, self.shapes[name], wanted[name].shape)
                for name in stored.values()
                if name and self.shapes[name] != wanted[name].shape
            ],
        )
        return stored

    def refuse_pickles(self) -> None:
        """Raises for files that cannot be read a part at a time."""
        for path in self._files:
            if path.suffix not in (".safetensors", ".gguf"):
                raise CheckpointError(
                    f"{path}: only safetensors can stay on disk; use --weights memory"
                )

    def is_twice(self, *names: str) -> bool:
        """Whether one matrix is stored under both names; an opened model has it once (`join_twins`). They are read one
        at a time, so that both are never in memory."""
        shapes = {self.shapes.get(name) for name in names}
        return (
            len(shapes) == 1
            and None not in shapes
            and len({*map(self._digest, names)}) == 1
        )

    def _digest(self, name: str) -> bytes:
        """Of its values as float32 with −0 as 0, so that it agrees with comparing an opened model."""
        digest = hashlib.blake2b()
        for rows in self.read(name).split(4096):
            digest.update((rows.float() + 0.0).contiguous().numpy().data)
        return digest.digest()

    def stored_bytes(self, name: str) -> int:
        return sum(part.bytes for _, part in self._assemblies[name].parts)

    def read(self, name: str) -> Tensor:
        return self._assemblies[name].made(self._tensor)

    def close(self) -> None:
        self._readers.shutdown()
        for file in self._files.values():
            file.close()

    def _tensor(self, stored: Stored) -> Tensor:
        if stored.made is not None:
            return stored.made()
        if stored.kind not in _TYPES:
            raise CheckpointError(
                f"{stored.path}: {stored.name} is {stored.kind}; use --weights memory"
            )
        tensor = torch.empty(
            stored.shape, dtype=_TYPES[stored.kind], pin_memory=self._pinned
        )
        if tensor.numel():
            self._fill(stored, tensor.reshape(-1).view(torch.uint8).numpy().data)
        return tensor

    def _fill(self, stored: Stored, view: memoryview) -> None:
        file = self._files[stored.path]

        def read(first: int) -> bool:
            last = min(first + _AT_ONCE, len(view))
            while first < last:
                got = read_at(file, view[first:last], stored.begin + first)
                if not got:
                    return False
                first += got
            return True

        with refusing(f"{stored.path} cannot be read", (OSError,)):
            offsets = range(0, len(view), _AT_ONCE)
            spread = self._readers.map if len(offsets) > 1 else map
            whole = all(spread(read, offsets))
            untouched = whole and _state(file) == self._states[stored.path]
        if not untouched:
            raise CheckpointError(
                f"{stored.path} was changed while {stored.name} was read from it; restore it and run the command "
                "again: measurements are kept"
            )


def _state(file: FileIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _assemblies(folder: Path, model: Any) -> dict[str, _Assembly]:
    """The model's parameters in the files' tensors, by the tables that transformers itself loads checkpoints with."""
    transforms = get_model_conversion_mapping(model, _MAMBA_SSM)
    renamings = [
        transform for transform in transforms if isinstance(transform, WeightRenaming)
    ]
    converters = [
        transform for transform in transforms if isinstance(transform, WeightConverter)
    ]
    owners = {
        pattern: transform
        for transform in converters
        for pattern in transform.source_patterns
    }
    wanted = model.state_dict()
    turned = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if hasattr(module, "is_turned")
    }
    parts: dict[str, list[tuple[str | None, Stored]]] = defaultdict(list)
    tensors = stored_tensors(folder)
    for tensor in sorted(tensors, key=lambda tensor: dot_natural_key(tensor.name)):
        if LEFT_OUT.match(tensor.name):
            continue
        name, pattern = rename_source_key(
            tensor.name, renamings, converters, model.base_model_prefix, wanted
        )
        if name not in wanted and tensor.name in wanted:
            name = tensor.name
            pattern = None
        parts[name].append((pattern, tensor))
    return {
        name: _Assembly(
            tuple(members), owners.get(members[0][0] or ""), model.config, name in turned
        )
        for name, members in parts.items()
    }
