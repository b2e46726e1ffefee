"""A GGUF of the same model as a template: metadata, tokenizer and small tensors are copied byte for byte.

A file that is the model itself is its own template. In a 16-bit one beside a checkpoint, matrices are found by their
values: their rows may be in another order, or some of a stacked one's. Rows are told by digests, one parameter at a
time in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kl_lens.base.errors import TargetError
from kl_lens.base.version import __version__
from kl_lens.model.files import FOREIGN
from kl_lens.targets import quarantine
from kl_lens.targets.gguf.architectures import get_architecture
from kl_lens.targets.gguf.architectures.base import (
    Architecture,
    Metadata,
    Rules,
    Shapes,
    TensorRule,
    is_float32,
)
from kl_lens.targets.gguf.header import FileInfo, TensorEntry, read_header
from kl_lens.targets.gguf.library import find_library
from kl_lens.targets.gguf.session import GGUFSession, try_out
from kl_lens.targets.gguf.writer import Header, ModelTensors
from kl_lens.targets.session import SessionSettings

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel

Digests = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
_AT_ONCE = 1 << 22  # values digested at a time
_MOST_JOINED = 1024  # parameters in one tensor, as experts are
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TOKENS = 16  # that llama.cpp and PyTorch are compared on
_MOST_KL = 0.01  # nats per token between them; kernels for BF16 round activations, too
# Of the template itself; ours are written in their place.
_OWN_KEYS = (
    "general.architecture",
    "general.alignment",
    "general.file_type",
    "general.quantization_version",
    "general.quantized_by",
)
_MOST_KL_QUANTIZED = 0.2  # where a file's kernels round activations to 8 bits
_templates: dict[tuple[str, str], Template] = {}


def architecture_of(model: LoadedModel) -> Architecture:
    """Its family's, or its template, which is checked once: TargetError if it is of another model."""
    own = FOREIGN.get(model.folder)
    path = str(own.path) if own and model.template is None else model.template
    if path is None:
        return get_architecture(model.config.model_type)
    key = (path, model.fingerprint)
    if key not in _templates:
        _templates[key] = Template.read(Path(path), model)
    return _templates[key]


@dataclass(frozen=True, eq=False)
class Template(Architecture):
    """Stands for the architecture of a family that KL Lens need not know."""

    info: FileInfo = field(kw_only=True)
    rules: Rules = field(kw_only=True)

    @classmethod
    def read(cls, path: Path, model: LoadedModel) -> Template:
        info = read_header(path, whole=True, exact=True)
        notes = cls.notes
        if model.template:
            rules = _rules_by_value(info, model)
        else:
            family = get_architecture(model.config.model_type)
            rules = _own_rules(info, family, model)
            notes = family.notes
        _refuse_other_logits(info, model)
        return cls(
            {}, lambda _: {}, lambda *_: [], lambda _: (), notes, info=info, rules=rules
        )

    def name(self, config: Any) -> str:
        return self.info.architecture

    def metadata(self, config: Any) -> Metadata:
        prefix = f"{self.info.architecture}."
        return {
            key.removeprefix(prefix): value
            for key, value in self.info.metadata.items()
            if key.startswith(prefix)
        }

    def tensors(self, config: Any, shapes: Shapes) -> Rules:
        return self.rules

    def applied(self, header: Header, *, with_tokenizer: bool) -> Header:
        """The header with the template's metadata."""
        left_out = (
            "split.",
            "kl_lens.",
            "quantize.",
            *(() if with_tokenizer else ("tokenizer.",)),
        )
        copied = [
            (key, _as_bytes(value), *self.info.kinds[key])
            for key, value in self.info.metadata.items()
            if key not in _OWN_KEYS and not key.startswith(left_out) and value != []
        ]
        own = {"general.quantized_by": f"KL Lens {__version__}"}
        return replace(header, metadata=own | header.metadata, copied=copied)


def _as_bytes(value: Any) -> Any:
    """Texts as the file has them, which may be no valid UTF-8."""
    if isinstance(value, list):
        return [_as_bytes(item) for item in value]
    return value.encode(errors="surrogateescape") if isinstance(value, str) else value


def _is_matrix(entry: TensorEntry) -> bool:
    small = len(entry.shape) < 2 or 1 in (entry.shape[-1], entry.shape[-2])
    return not small and not is_float32(entry.name)


def _own_rules(info: FileInfo, family: Architecture, model: LoadedModel) -> Rules:
    """Of the file that the model was opened from."""
    rules = family.tensors(model.config, ModelTensors(model).shapes)
    known = {rule.name: rule for rule in rules}
    return [
        known[entry.name]
        if entry.name in known and _is_matrix(entry)
        else replace(known.get(entry.name, TensorRule(entry.name, None)), copied=entry)
        for entry in info.tensors
    ]


# -- by value ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Where rows of a tensor are."""

    parameter: str
    rows: Rows

    def rule(self, name: str, shape: tuple[int, ...]) -> TensorRule:
        rows = torch.from_numpy(self.rows)
        return TensorRule(name, self.parameter, partial(_selected, rows, shape))


def _selected(
    rows: torch.Tensor, shape: tuple[int, ...], tensor: torch.Tensor
) -> torch.Tensor:
    return tensor.flatten(0, -2)[rows.to(tensor.device)].unflatten(0, shape)


def _rules_by_value(info: FileInfo, model: LoadedModel) -> Rules:
    path = info.paths[0]
    if quantized := [entry for entry in info.tensors if entry.type not in _TYPES]:
        raise TargetError(
            f"{path} is no template: {quantized[0].name} is {quantized[0].type}; give the model's file in F16, BF16 or "
            "F32"
        )
    rows = _RowsOfModel(ModelTensors(model))
    wanted = [entry for entry in info.tensors if _is_matrix(entry)]
    found = {entry.name: rows.place(entry) for entry in wanted}
    if missing := [entry for entry in wanted if found[entry.name] is None]:
        kind = "revision" if len(missing) < len(wanted) else "model"
        raise TargetError(
            f"{path} is of another {kind} than {model.name}: {len(missing)} of its {len(wanted)} matrices are not in "
            f"the checkpoint, as {missing[0].name} ({rows.closest(missing[0])}); give llama.cpp's file of this one"
        )
    # Rows without a token may be cut.
    ends = (model.anatomy.embedding, model.anatomy.head)
    for component in model.anatomy.candidates:
        if rows.lacks(component.weight, whole=component.name not in ends):
            raise TargetError(
                f"{path} lacks {component.name}, or rows of it; give llama.cpp's own 16-bit file of {model.name}"
            )
    return [_rule(entry, found.get(entry.name)) for entry in info.tensors]


def _rule(entry: TensorEntry, found: Sequence[Found] | None) -> TensorRule:
    if not found:
        return TensorRule(entry.name, None, copied=entry)
    if not found[1:]:
        return found[0].rule(entry.name, entry.shape[:-1])
    first, *further = (part.rule(entry.name, (len(part.rows),)) for part in found)
    return replace(first, shape=entry.shape, further=tuple(further))


class _RowsOfModel:
    """Digests of the rows of every matrix of a model, and which of them a template has."""

    def __init__(self, tensors: ModelTensors) -> None:
        self._tensors = tensors
        self._names = [name for name, shape in tensors.shapes.items() if len(shape) > 1]
        # (parameter, transposed, type of the template) → digests of its rows in that type.
        self._digests: dict[tuple[str, bool, str], Digests] = {}
        self._placed: dict[str, list[Digests]] = {}

    def place(self, entry: TensorEntry) -> list[Found] | None:
        """Where a tensor's rows are, in their order, mostly in one parameter. None: the model lacks them; nothing: they
        are its columns."""
        wanted = _digests_of_entry(entry)
        found: list[Found] = []
        left = wanted
        while len(left) and len(found) < _MOST_JOINED:
            # Of equal matrices, one that is not placed yet.
            names = sorted(self._names, key=self._placed.__contains__)
            runs = (
                Found(name, _leading(self._of(name, False, entry), left))
                for name in names
            )
            longest = max(runs, key=lambda run: len(run.rows))
            if not len(longest.rows):
                break
            found.append(longest)
            left = left[len(longest.rows) :]
        if not len(left):
            for run in found:
                self._placed.setdefault(run.parameter, []).append(wanted)
            return found
        turned = (_leading(self._of(name, True, entry), wanted) for name in self._names)
        return [] if any(len(rows) == len(wanted) for rows in turned) else None

    def closest(self, entry: TensorEntry) -> str:
        """The parameter with most of a tensor's rows, in words."""
        wanted = _digests_of_entry(entry)
        shapes = self._tensors.shapes
        shared = {
            name: int(np.isin(wanted, self._of(name, False, entry)).sum())
            for name in self._names
            if shapes[name][-1] == entry.shape[-1]
        }
        if not shared:
            return f"no matrix has {entry.shape[-1]} columns"
        name = max(shared, key=lambda name: (shared[name], shapes[name] == entry.shape))
        return f"closest is {name} with {shared[name]} of its {len(wanted)} rows"

    def lacks(self, parameter: str, *, whole: bool) -> bool:
        """Whether a parameter, or a row of it if the `whole` is needed, is nowhere in the template."""
        if parameter not in self._placed:
            return True
        placed = np.concatenate(self._placed[parameter])
        known = (self._digests.get((parameter, False, kind)) for kind in _TYPES)
        return whole and not any(
            digests is not None and bool(np.isin(digests, placed).all())
            for digests in known
        )

    def _of(self, name: str, turned: bool, entry: TensorEntry) -> Digests:
        shape = self._tensors.shapes[name]
        if shape[-2 if turned else -1] != entry.shape[-1]:
            return np.zeros(0, np.uint64)
        key = (name, turned, entry.type)
        if key not in self._digests:
            values = self._tensors.read(name)
            rows = (values.mT if turned else values).flatten(0, -2)
            self._digests[key] = _digests(rows, _TYPES[entry.type])
        return self._digests[key]


def _leading(known: Digests, wanted: Digests) -> Rows:
    """Where the wanted rows are among the known ones, up to the first that is not."""
    if not (known == wanted[:1]).any():
        return np.zeros(0, np.int64)
    order = np.argsort(known, kind="stable")
    places = np.searchsorted(known, wanted, sorter=order)
    rows = order[np.minimum(places, len(known) - 1)]
    same = known[rows] == wanted
    return rows if same.all() else rows[: same.argmin()]


def _digests_of_entry(entry: TensorEntry) -> Digests:
    kind = _TYPES[entry.type]
    data = np.memmap(entry.path, np.uint8, "c", entry.offset, (entry.bytes,))
    rows = torch.from_numpy(data).view(kind).reshape(-1, entry.shape[-1])
    return _digests(rows, kind)


def _digests(rows: torch.Tensor, kind: torch.dtype) -> Digests:
    """Of each row, with its values rounded to this type."""
    columns = rows.shape[-1]
    integers = torch.int32 if kind == torch.float32 else torch.int16
    factors = np.random.default_rng(0).integers(2**63, size=columns, dtype=np.uint64)
    factors = 2 * factors + np.uint64(1)
    parts = []
    for part in rows.split(max(1, _AT_ONCE // columns)):
        words = part.to(kind).contiguous().view(integers).numpy()
        unsigned = words.view(np.uint32 if kind == torch.float32 else np.uint16)
        parts.append((unsigned * factors).sum(axis=-1, dtype=np.uint64))
    return np.concatenate(parts)


def _refuse_other_logits(info: FileInfo, model: LoadedModel) -> None:
    """Raises if llama.cpp does not compute from the template what PyTorch computes."""
    try:
        find_library()
    except TargetError:
        return  # no file can be opened here
    path = info.paths[0]
    quarantine.require_opens(try_out, path, info.paths, "llama.cpp")
    settings = SessionSettings(context=_TOKENS, exact=True)
    with GGUFSession(path, settings) as session:
        ids = torch.arange(1, _TOKENS + 1) * 37 % session.vocabulary
        actual = torch.from_numpy(session.logits(ids.tolist()))
    expected = model.chain.full_logits(ids[None].to(model.device))[0].float().cpu()
    both = min(expected.shape[-1], actual.shape[-1])
    original = expected[:, :both].log_softmax(-1)
    difference = original - actual[:, :both].log_softmax(-1)
    loss = float((original.exp() * difference).sum(-1).mean())
    is_plain = all(entry.type in _TYPES for entry in info.tensors)
    if not loss < (_MOST_KL if is_plain else _MOST_KL_QUANTIZED):
        raise TargetError(
            f"{path}: from the same weights llama.cpp computes something else than PyTorch (KL {loss:.2g} nats per "
            "token); update llama.cpp, or convert the model with a newer one"
        )
