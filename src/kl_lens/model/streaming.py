"""Reads weights one tensor at a time: from a model in memory, or from a checkpoint on disk that never is.

Both use transformers' parameter names, from which component names are made. Checkpoints on disk often use older names
or store each expert apart; `CheckpointTensors` translates.
"""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, reduce
from io import FileIO
from pathlib import Path
from typing import Any, Self

import torch
import transformers

from kl_lens.base.environment import processors
from kl_lens.base.errors import CheckpointError, one_line
from kl_lens.model.anatomy import component_name
from kl_lens.model.files import LEFT_OUT, Stored, refuse_misfits, stored_tensors, weight_files


class TensorSource(ABC):
    """Named tensors, read one by one; `weight` makes it a `WeightSource`."""

    device = torch.device("cpu")
    aliases: dict[str, str]  # second name of a tied weight → its first
    shapes: dict[str, tuple[int, ...]]  # each weight once: a tied head has no entry

    @cached_property
    def _parameters(self) -> dict[str, str]:
        return {component_name(name, len(shape)): name for name, shape in self.shapes.items()}

    def place(self, name: str) -> int:
        """Tensors with the same number are best read together."""
        return 0

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU in its stored type."""

    def weight(self, component: str) -> torch.Tensor:
        if component not in self._parameters:
            raise CheckpointError(f"the checkpoint has no component {component!r}")
        return self.read(self._parameters[component])

    def state(self, component: str) -> Hashable:
        """Files are assumed not to change."""
        return None

    def close(self) -> None:  # noqa: B027 - memory needs no closing
        """Closes open files."""


class ModelTensors(TensorSource):
    """The weights of a transformers model in memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        first: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            key = (tensor.data_ptr(), tuple(tensor.shape))
            if key in first:
                self.aliases[name] = first[key]
            else:
                first[key] = name
                self._tensors[name] = tensor.detach()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].cpu()


# How names on disk differ from transformers' modules: (pattern, replacement).
_RENAMES = (
    (re.compile(r"^backbone\.embedding\."), "backbone.embeddings."),
    (re.compile(r"\.block_sparse_moe\.input_linear\.weight$"), ".block_sparse_moe.experts.gate_up_proj"),
    (re.compile(r"\.block_sparse_moe\.output_linear\.weight$"), ".block_sparse_moe.experts.down_proj"),
    (re.compile(r"\.block_sparse_moe\.router\.layer\.weight$"), ".block_sparse_moe.router.weight"),
)
# The same for one family: some of these patterns mean something else elsewhere.
_OF_FAMILY = {
    "nemotron_h": ((re.compile(r"^backbone\."), "model."),),
    "kimi_linear": (
        (re.compile(r"\.block_sparse_moe\."), ".mlp."),
        (re.compile(r"\.self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)"), r".self_attn.forget_gate.\1"),
    ),
    "bailing_hybrid": (
        (re.compile(r"^model\.word_embeddings\."), "model.embed_tokens."),
        (re.compile(r"\.attention\."), ".self_attn."),
        (re.compile(r"\.self_attn\.(f_proj|dt_bias|A_log)"), r".self_attn.forget_gate.\1"),
        (re.compile(r"\.self_attn\.dense\."), ".self_attn.o_proj."),
        (re.compile(r"\.gate\.expert_bias$"), ".gate.e_score_correction_bias"),
    ),
    # Published Qwen3.5 checkpoints hold a vision tower too.
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"), ((re.compile(r"^model\.language_model\."), "model."),)
    ),
}
_CONVOLUTION = re.compile(r"^(.*\.)([qkv])_conv1d\.weight$")
_ONE_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight$")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's names for them, and LFM2's


_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
_AT_ONCE = 16 << 20  # bytes per read: a fast disk needs several threads


@dataclass(frozen=True)
class _Assembly:
    """A transformers parameter made from stored tensors."""

    parts: tuple[Stored, ...]
    shape: tuple[int, ...]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]


class CheckpointTensors(TensorSource):
    """The weights of a checkpoint folder. safetensors are read with pread and never mapped: mapped pages count as
    memory, and the process dies if the file is truncated."""

    def __init__(self, folder: Path, model_type: str, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._readers = ThreadPoolExecutor(min(8, processors()), thread_name_prefix="kl-lens-file")
        self._files = {path: path.open("rb", buffering=0) for path in weight_files(folder)}
        self._seen = {path: _state(file) for path, file in self._files.items()}
        self.aliases = {}
        renames = (*_RENAMES, *_OF_FAMILY.get(model_type, ()))
        stored = {
            reduce(lambda name, rename: rename[0].sub(rename[1], name), renames, tensor.name): tensor
            for tensor in stored_tensors(folder)
            if not LEFT_OUT.match(tensor.name)
        }
        self._assemblies = assemblies_of(stored)
        self.shapes = {name: assembly.shape for name, assembly in self._assemblies.items()}

    @classmethod
    def fitting(cls, folder: Path, config: Any) -> Self:
        """Checked against transformers' model of this configuration, with a tied head as the embedding's alias."""
        self = cls(folder, config.model_type)
        embedding = next(
            (n for n in self.shapes if n.endswith(("embeddings.weight", "embed_tokens.weight"))), None
        )
        if embedding and (
            getattr(config, "tie_word_embeddings", False) or self.is_twice("lm_head.weight", embedding)
        ):
            self.shapes.pop("lm_head.weight", None)
            self.aliases["lm_head.weight"] = embedding
        try:
            with torch.device("meta"):
                wanted = transformers.AutoModelForCausalLM.from_config(config).state_dict()
        except Exception as error:  # what a library raises over a strange setting can be anything
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise CheckpointError(
                f"{folder}: config.json does not describe a model ({reason}); download it again"
            ) from error
        refuse_misfits(
            folder,
            missing=wanted.keys() - self.shapes.keys() - self.aliases.keys(),
            mismatched=[
                (name, shape, wanted[name].shape)
                for name, shape in self.shapes.items()
                if name in wanted and wanted[name].shape != shape
            ],
        )
        return self

    def refuse_pickles(self) -> None:
        """Raises for files that cannot be read a part at a time."""
        pickled = next((path for path in self._files if path.suffix != ".safetensors"), None)
        if pickled is not None:
            raise CheckpointError(
                f"{pickled}: only safetensors can stay on disk; convert it, or use --weights memory"
            )

    def is_twice(self, name: str, other: str) -> bool:
        """Whether one matrix is stored under both names; an opened model has it once (`join_twins`). They are read one
        at a time, so that both are never in memory."""
        one, two = self._assemblies.get(name), self._assemblies.get(other)
        return bool(one and two and one.shape == two.shape) and self._digest(name) == self._digest(other)

    def _digest(self, name: str) -> bytes:
        """Of its values as float32 with −0 as 0, so that it agrees with comparing an opened model."""
        digest = hashlib.blake2b()
        for rows in self.read(name).split(4096):
            digest.update((rows.float() + 0.0).contiguous().numpy().data)
        return digest.digest()

    def place(self, name: str) -> int:
        return list(self._files).index(self._assemblies[name].parts[0].path)

    def stored_bytes(self, name: str) -> int:
        return sum(part.bytes for part in self._assemblies[name].parts)

    def read(self, name: str) -> torch.Tensor:
        assembly = self._assemblies[name]
        return assembly.join([self._tensor(part) for part in assembly.parts])

    def close(self) -> None:
        self._readers.shutdown()
        for file in self._files.values():
            file.close()

    def _tensor(self, stored: Stored) -> torch.Tensor:
        if stored.pickled is not None:
            return stored.pickled.clone()  # not the mapped file
        if stored.kind not in _TYPES:
            raise CheckpointError(
                f"{stored.path}: {stored.name} is stored as {stored.kind}; use --weights memory"
            )
        tensor = torch.empty(stored.shape, dtype=_TYPES[stored.kind], pin_memory=self._pinned)
        if tensor.numel():
            self._fill(stored, tensor.reshape(-1).view(torch.uint8).numpy().data)
        return tensor

    def _fill(self, stored: Stored, view: memoryview) -> None:
        file = self._files[stored.path]

        def read(first: int) -> bool:
            last = min(first + _AT_ONCE, len(view))
            while first < last:
                got = os.preadv(file.fileno(), [view[first:last]], stored.begin + first)
                if not got:
                    return False
                first += got
            return True

        try:
            places = range(0, len(view), _AT_ONCE)
            whole = all(self._readers.map(read, places) if len(places) > 1 else map(read, places))
            untouched = whole and _state(file) == self._seen[stored.path]
        except OSError as error:
            raise CheckpointError(f"{stored.path} cannot be read ({one_line(error)})") from error
        if not untouched:
            raise CheckpointError(
                f"{stored.path} was changed while {stored.name} was read from it; restore it and run the command "
                "again: measurements are kept"
            )


def _state(file: FileIO) -> tuple[int, int]:
    known = os.fstat(file.fileno())
    return known.st_size, known.st_mtime_ns


def assemblies_of(stored: dict[str, Stored]) -> dict[str, _Assembly]:
    """One assembly per transformers parameter; separate experts are stacked."""
    assemblies: dict[str, _Assembly] = {}
    experts: dict[str, dict[str, dict[int, Stored]]] = defaultdict(lambda: defaultdict(dict))
    convolutions: dict[str, dict[str, Stored]] = defaultdict(dict)
    for name, item in stored.items():
        if match := _ONE_EXPERT.match(name):
            experts[match[1]][_MIXTRAL.get(match[3], match[3])][int(match[2])] = item
        elif match := _CONVOLUTION.match(name):
            convolutions[match[1]][match[2]] = item
        else:
            assemblies[name] = _Assembly((item,), item.shape, lambda parts: parts[0])
    for owner, kernels in convolutions.items():
        parts = tuple(kernels[part] for part in sorted(kernels, key="qkv".index))
        shape = (sum(kernel.shape[0] for kernel in parts), *parts[0].shape[1:])
        assemblies[f"{owner}conv1d.weight"] = _Assembly(parts, shape, lambda parts: torch.cat(list(parts)))
    for owner, kinds in experts.items():
        ordered = {kind: _in_order(owner, kind, items) for kind, items in kinds.items()}
        if "gate_proj" in ordered:
            gates, ups = ordered.pop("gate_proj"), ordered.pop("up_proj", ())
            if [gate.shape for gate in gates] != [up.shape for up in ups]:
                raise CheckpointError(
                    f"{owner}: {len(gates)} gate_proj and {len(ups)} up_proj do not fit together; download the "
                    "checkpoint again"
                )
            rows, columns = gates[0].shape
            shape = (len(gates), 2 * rows, columns)
            assemblies[f"{owner}.gate_up_proj"] = _Assembly((*gates, *ups), shape, _gates_above_ups)
        for kind, items in ordered.items():
            shape = (len(items), *items[0].shape)
            assemblies[f"{owner}.{kind}"] = _Assembly(items, shape, lambda parts: torch.stack(list(parts)))
    return assemblies


def _in_order(owner: str, kind: str, items: dict[int, Stored]) -> tuple[Stored, ...]:
    if sorted(items) != list(range(len(items))):
        raise CheckpointError(f"{owner}: experts {sorted(items)} of {kind} have gaps in their numbers")
    if len(shapes := {item.shape for item in items.values()}) > 1 or len(*shapes) != 2:
        raise CheckpointError(
            f"{owner}: {kind} of its experts must be matrices of one shape, not {sorted(shapes)}"
        )
    return tuple(items[index] for index in range(len(items)))


def _gates_above_ups(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """transformers keeps each expert's gate rows above its up rows."""
    count = len(parts) // 2
    return torch.cat([torch.stack(list(parts[:count])), torch.stack(list(parts[count:]))], dim=1)
