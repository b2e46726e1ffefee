"""A 16-bit GGUF of the same model as a template: where its matrices come from is found by their values.

Metadata, tokenizer and small tensors are copied byte for byte. Rows of a matrix may be in another order than in the
checkpoint, or be some of a stacked one's: rows are told by digests, one parameter at a time in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kl_lens.base.errors import TargetError
from kl_lens.base.version import __version__
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
_AT_ONCE = 1 << 22  # values digested at a time
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
_templates: dict[tuple[str, str], Template] = {}


def architecture_of(model: LoadedModel) -> Architecture:
    """Its family's, or its template, which is checked once: TargetError if it is of another model."""
    if model.template is None:
        return get_architecture(model.config.model_type)
    key = (model.template, model.fingerprint)
    if key not in _templates:
        _templates[key] = Template.read(model)
    return _templates[key]


@dataclass(frozen=True)
class Found:
    """Where a tensor's rows are."""

    parameter: str
    rows: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Template(Architecture):
    """Stands for the architecture of a family that KL Lens need not know."""

    info: FileInfo = field(kw_only=True)
    rules: Rules = field(kw_only=True)

    @classmethod
    def read(cls, model: LoadedModel) -> Template:
        info = read_header(Path(str(model.template)), whole=True, exact=True)
        _refuse_quantized(info)
        path = info.paths[0]
        tensors = ModelTensors(model)
        wanted = [entry for entry in info.tensors if _is_matrix(entry)]
        rows = _RowsOfModel(tensors.shapes, tensors.read)
        places = {entry.name: rows.place(entry) for entry in wanted}
        missing = [entry for entry in wanted if not places[entry.name][0]]
        _refuse_misfits(path, model, wanted, missing, rows)
        _refuse_other_logits(path, info.paths, model)
        found = {name: found for name, (_, found) in places.items()}
        rules = [_rule(entry, found.get(entry.name)) for entry in info.tensors]
        return cls({}, lambda _: {}, lambda *_: [], lambda _: (), info=info, rules=rules)

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
        left_out = ("split.", "kl_lens.", *(() if with_tokenizer else ("tokenizer.",)))
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


def _rule(entry: TensorEntry, found: Found | None) -> TensorRule:
    if found is None:
        return TensorRule(entry.name, None, copied=entry)
    rows = found.rows
    count = len(rows)
    in_order = bool((rows == np.arange(rows[0], rows[0] + count)).all())
    select = slice(rows[0], rows[0] + count) if in_order else torch.from_numpy(rows)
    transform = partial(_selected, select, entry.shape[:-1])
    return TensorRule(entry.name, found.parameter, transform)


def _selected(
    rows: slice | torch.Tensor, shape: tuple[int, ...], tensor: torch.Tensor
) -> torch.Tensor:
    flat = tensor.flatten(0, -2)
    chosen = rows if isinstance(rows, slice) else rows.to(flat.device)
    return flat[chosen].unflatten(0, shape)


# -- by value ------------------------------------------------------------------------------------------------


class _RowsOfModel:
    """Digests of the rows of every matrix of a model, and which of them a template has."""

    def __init__(self, shapes: Shapes, read: Callable[[str], torch.Tensor]) -> None:
        self._read = read
        self._shapes = {name: shape for name, shape in shapes.items() if len(shape) > 1}
        # (parameter, transposed, type of the template) → digests of its rows in that type.
        self._digests: dict[tuple[str, bool, str], Digests] = {}
        self._placed: dict[str, list[Digests]] = {}

    def place(self, entry: TensorEntry) -> tuple[bool, Found | None]:
        """Whether the model has a tensor's rows, and where; columns have no place."""
        wanted = _digests_of_entry(entry)
        # Of equal matrices, one that is not placed yet.
        for name in sorted(self._shapes, key=self._placed.__contains__):
            rows = self._rows(self._of(name, False, entry), wanted)
            if rows is not None:
                self._placed.setdefault(name, []).append(wanted)
                return True, Found(name, rows)
        turned = (self._of(name, True, entry) for name in self._shapes)
        return any(self._rows(known, wanted) is not None for known in turned), None

    def closest(self, entry: TensorEntry) -> str:
        """The parameter with most of a tensor's rows, in words."""
        wanted = _digests_of_entry(entry)
        shared = {
            name: int(np.isin(wanted, self._of(name, False, entry)).sum())
            for name, shape in self._shapes.items()
            if shape[-1] == entry.shape[-1]
        }
        if not shared:
            return f"no matrix has {entry.shape[-1]} columns"
        name = max(
            shared, key=lambda name: (shared[name], self._shapes[name] == entry.shape)
        )
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
        shape = self._shapes[name]
        if shape[-2 if turned else -1] != entry.shape[-1]:
            return np.zeros(0, np.uint64)
        key = (name, turned, entry.type)
        if key not in self._digests:
            values = self._read(name)
            rows = (values.mT if turned else values).flatten(0, -2)
            kind = _TYPES[entry.type]
            step = max(1, _AT_ONCE // rows.shape[-1])
            parts = [_digested(_words(part.to(kind))) for part in rows.split(step)]
            self._digests[key] = np.concatenate(parts)
        return self._digests[key]

    @staticmethod
    def _rows(known: Digests, wanted: Digests) -> npt.NDArray[np.int64] | None:
        """Where each digest is among the known ones, in one run if possible; None: one of them is not."""
        starts = np.flatnonzero(known == wanted[:1])
        for start in starts:
            if np.array_equal(known[start : start + len(wanted)], wanted):
                return np.arange(start, start + len(wanted))
        if not len(starts):
            return None
        order = np.argsort(known, kind="stable")
        places = np.searchsorted(known, wanted, sorter=order)
        rows = order[np.minimum(places, len(known) - 1)]
        return rows if np.array_equal(known[rows], wanted) else None


def _digests_of_entry(entry: TensorEntry) -> Digests:
    kind = np.uint32 if entry.type == "F32" else np.uint16
    words = np.memmap(entry.path, np.uint8, "r", entry.offset, (entry.bytes,)).view(kind)
    rows = words.reshape(-1, entry.shape[-1])
    step = max(1, _AT_ONCE // entry.shape[-1])
    parts = [_digested(rows[at : at + step]) for at in range(0, len(rows), step)]
    return np.concatenate(parts)


def _words(values: torch.Tensor) -> npt.NDArray[Any]:
    kind = torch.int32 if values.dtype == torch.float32 else torch.int16
    words = values.contiguous().view(kind).numpy()
    return words.view(np.uint32 if kind == torch.int32 else np.uint16)


def _digested(rows: npt.NDArray[Any]) -> Digests:
    factors = np.random.default_rng(0).integers(
        2**63, size=rows.shape[-1], dtype=np.uint64
    )
    products = rows.astype(np.uint64) * (2 * factors + np.uint64(1))
    digests: Digests = products.sum(axis=-1, dtype=np.uint64)
    return digests


# -- what is no template -------------------------------------------------------------------------------------


def _refuse_quantized(info: FileInfo) -> None:
    quantized = [entry for entry in info.tensors if entry.type not in _TYPES]
    if quantized:
        raise TargetError(
            f"{info.paths[0]} is no template: {quantized[0].name} is {quantized[0].type}; give the model's file in "
            "F16, BF16 or F32"
        )


def _refuse_misfits(
    path: Path,
    model: LoadedModel,
    wanted: Sequence[TensorEntry],
    missing: Sequence[TensorEntry],
    rows: _RowsOfModel,
) -> None:
    if missing:
        kind = "revision" if len(missing) < len(wanted) else "model"
        raise TargetError(
            f"{path} is of another {kind} than {model.name}: {len(missing)} of its {len(wanted)} matrices are not in "
            f"the checkpoint, as {missing[0].name} ({rows.closest(missing[0])}); give llama.cpp's file of this one"
        )
    ends = (
        model.anatomy.embedding,
        model.anatomy.head,
    )  # rows without a token may be cut
    for component in model.anatomy.candidates:
        if rows.lacks(component.weight, whole=component.name not in ends):
            raise TargetError(
                f"{path} lacks {component.name}, or rows of it; give llama.cpp's own 16-bit file of {model.name}"
            )


def _refuse_other_logits(path: Path, files: Sequence[Path], model: LoadedModel) -> None:
    """Raises if llama.cpp does not compute from the template what PyTorch computes."""
    try:
        find_library()
    except TargetError:
        return  # no file can be opened here
    quarantine.require_opens(try_out, path, files, "llama.cpp")
    settings = SessionSettings(context=_TOKENS, exact=True)
    with GGUFSession(path, settings) as session:
        ids = torch.arange(1, _TOKENS + 1) * 37 % session.vocabulary
        actual = torch.from_numpy(session.logits(ids.tolist()))
    expected = model.chain.full_logits(ids[None].to(model.device))[0].float().cpu()
    both = min(expected.shape[-1], actual.shape[-1])
    original = expected[:, :both].log_softmax(-1)
    difference = original - actual[:, :both].log_softmax(-1)
    loss = float((original.exp() * difference).sum(-1).mean())
    if not loss < _MOST_KL:
        raise TargetError(
            f"{path}: from the same weights llama.cpp computes something else than PyTorch (KL {loss:.2g} nats per "
            "token); update llama.cpp, or convert the model with a newer one"
        )
