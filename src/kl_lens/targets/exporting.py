"""What exports share: the recipe that each component gets, files beside the weights, the record, safetensors files."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kl_lens.base.errors import TargetError
from kl_lens.base.files import RECORD_FILE, bytes_digest, naming, settle, write_text
from kl_lens.run.records import Artifact, ExportedTensor, Plan
from kl_lens.run.subjects import file_digest
from kl_lens.weights.recipes import FP16, Recipe, parsed

if TYPE_CHECKING:
    import torch

    from kl_lens.model import LoadedModel
    from kl_lens.run.folder import Run

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
# Arguments of this program's own `from_pretrained`, which transformers would write into tokenizer_config.json.
LOADING = ("local_files_only", "is_local", "trust_remote_code")
# Of safetensors' types, in the order of the file.
_BYTES = {"I64": 8, "I32": 4, "U32": 4, "F32": 4, "F16": 2}
# A planned recipe and a weight's shape → the recipe that it gets, and why that is another one (or None).
Fit = Callable[[Recipe, Sequence[int]], tuple[Recipe, str | None]]


@dataclass(frozen=True)
class Choice:
    """What a component is stored as."""

    planned: Recipe
    recipe: Recipe
    reason: str | None = None  # why they differ


UNPLANNED = Choice(FP16, FP16)


def choices(model: LoadedModel, plan: Plan, fit: Fit) -> dict[str, Choice]:
    """Every component's recipe in the files, by name; what the plan does not name is FP16.

    FormatError: the plan was made with other statistics than the model has.
    """
    planned: dict[str, Recipe] = {}
    for name, recipe in parsed(plan.assignment).items():
        component = model.anatomy.component(name)
        if planned.setdefault(component.name, recipe) != recipe:
            raise TargetError(
                f"{name} is the same weight as {component.name}, but planned as {recipe}"
            )
        if not component.quantizable and recipe != FP16:
            raise TargetError(
                f"{name} is planned as {recipe}, but must stay as it is: {component.reason}"
            )
    chosen = dict.fromkeys((c.name for c in model.anatomy.components), UNPLANNED)
    for name, recipe in planned.items():
        chosen[name] = Choice(recipe, *fit(recipe, model.anatomy.component(name).shape))
    model.weights.learnt_by(
        (choice.recipe for choice in chosen.values()), plan.statistics
    )
    return chosen


def write_beside(
    model: LoadedModel, folder: Path, *, with_tokenizer: bool = True
) -> list[str]:
    """Generation settings and the tokenizer's files, with its chat template; returns notes about them."""
    if (generation := model.folder / GENERATION_FILE).is_file():
        shutil.copyfile(generation, folder / GENERATION_FILE)
    if model.tokenizer is None or not with_tokenizer:
        return []
    from kl_lens.text.windows import beginning_of  # loads torch

    for argument in LOADING:
        model.tokenizer.init_kwargs.pop(argument, None)
    model.tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))  # transformers leaves it out
    settings["add_bos_token"] = beginning_of(model.tokenizer) is not None
    write_text(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    return [model.unread_tokens] if model.unread_tokens else []


def checkpoint_settings(model: LoadedModel) -> dict[str, Any]:
    """The checkpoint's own config.json, or what transformers writes in its place."""
    file = model.folder / CONFIG_FILE
    text = model.config.to_json_string(use_diff=False)
    if model.layout == "transformers" and file.is_file():
        text = file.read_text(encoding="utf-8")
    settings: dict[str, Any] = json.loads(text)
    return settings


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def record(
    target: str,
    model: LoadedModel,
    plan: Plan,
    folder: Path,
    tensors: Iterable[ExportedTensor],
    **settings: Any,
) -> Artifact:
    """The record of everything in a folder; `Target.export` adds digests and the bytes that the runtime loads."""
    stored = tuple(tensors)
    methods = (
        Recipe.parse(tensor.realised) for tensor in stored if "+" in tensor.realised
    )
    if learnt := model.weights.learnt_by(methods):
        settings["statistics"] = learnt
    return Artifact(
        target=target,
        plan=plan.name,
        files=tuple(sorted(path.name for path in folder.iterdir())),
        tensors=stored,
        planned_bytes=sum(t.bytes for t in stored) if plan.bytes is None else plan.bytes,
        realised_bytes=0,
        model=model.name,
        model_fingerprint=model.fingerprint,
        settings={"family": model.anatomy.model_type, **settings},
    )


# -- the record beside an artifact's files -----------------------------------------------------------------


def write_record(folder: Path, artifact: Artifact) -> None:
    """Call it after the files are written: a folder with a record is complete."""
    write_text(folder / RECORD_FILE, json.dumps(artifact.to_json(), indent=1) + "\n")


def read_artifact(folder: Path) -> Artifact:
    """The record of an exported folder."""
    settle(folder)
    path = folder / RECORD_FILE
    if not path.is_file():
        raise TargetError(
            f"{folder} is not an exported model: it has no {RECORD_FILE}; run `kl-lens export`"
        )
    try:
        artifact = Artifact.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TargetError(
            f"{path} cannot be read ({error}); export the model again"
        ) from error
    for name in artifact.files:
        if Path(name).name != name:
            raise TargetError(
                f"{path} names {name!r}, which is not a file of its folder; export again"
            )
        if not (folder / name).exists():
            raise TargetError(f"{folder}: {name} is missing; export the model again")
    return artifact


def earlier_artifact(folder: Path) -> Artifact | None:
    """The record of what a folder holds, if it holds an exported model."""
    try:
        return read_artifact(folder)
    except TargetError:
        return None


def require_exported(folder: Path, artifact: Artifact) -> None:
    """Raises TargetError if a file differs from what was exported."""
    for name in artifact.files:
        if (
            name in artifact.digests
            and file_digest(folder / name) != artifact.digests[name]
        ):
            raise TargetError(
                f"{folder}: {name} was changed after the export; export the model again"
            )


def exported_places(run: Run) -> dict[tuple[str, str], Path]:
    """(target, plan) → exported folder of a run, from its journal and from the run's folder."""
    folders = {}
    for name in run.load_all("artifact"):
        target, _, plan = name.partition("/")
        folders[target, plan] = run.artifact_folder(name)
    for file in sorted((run.folder / "artifacts").glob(f"*/*/{RECORD_FILE}")):
        folders.setdefault((file.parent.parent.name, file.parent.name), file.parent)
    return folders


# -- safetensors, written tensor by tensor, so that the size is known before any tensor is -----------------


@dataclass(frozen=True)
class Entry:
    """One tensor of the file."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return _BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """What the file holds of a component: one tensor, or the parts of a packed matrix."""

    component: str
    entries: tuple[Entry, ...]
    choice: Choice
    realised: str
    # The data of each entry, and the digest of the weights in the weight store.
    make: Callable[[], tuple[Sequence[npt.NDArray[Any]], str]]
    name: str = ""  # of the record; else of the first entry


def floating(
    component: str,
    name: str,
    shape: Sequence[int],
    read: Callable[[], torch.Tensor],
    *,
    half: bool,
    choice: Choice = UNPLANNED,
    digest: Callable[[], str] = str,
) -> Piece:
    """What stays in floating point: `half` in float16, else in float32."""
    import torch

    def make() -> tuple[list[npt.NDArray[Any]], str]:
        values = read()
        stored = values.half() if half else values.float()
        if not torch.equal(stored.isfinite(), values.isfinite()):
            raise TargetError(f"{name}: has values that {dtype} cannot hold; rescale it")
        return [stored.cpu().numpy()], digest()

    dtype = "F16" if half else "F32"
    entries = (Entry(name, dtype, tuple(shape)),)
    return Piece(component, entries, choice, choice.recipe if half else "fp32", make)


def file_size(pieces: Sequence[Piece], made_for: str) -> int:
    entries = _in_file(pieces)
    return len(_header(entries, made_for)) + sum(entry.bytes for entry in entries)


def write_file(
    path: Path, pieces: Sequence[Piece], made_for: str
) -> list[ExportedTensor]:
    """`made_for`: the header's format, `mlx` or `pt`. Returns the pieces' records, in the order of the file."""
    entries = _in_file(pieces)
    header = _header(entries, made_for)
    ends = itertools.accumulate(entry.bytes for entry in entries)
    starts = {
        entry.name: len(header) + end - entry.bytes
        for entry, end in zip(entries, ends, strict=True)
    }
    records = []
    with naming(path), path.open("wb") as file:
        file.write(header)
        for piece in sorted(pieces, key=lambda piece: starts[piece.entries[0].name]):
            arrays, weights = piece.make()
            for entry, array in zip(piece.entries, arrays, strict=True):
                assert array.nbytes == entry.bytes, entry
                file.seek(starts[entry.name])
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            records.append(
                ExportedTensor(
                    component=piece.component,
                    runtime_name=piece.name or piece.entries[0].name,
                    planned=piece.choice.planned,
                    realised=piece.realised,
                    bytes=sum(array.nbytes for array in arrays),
                    reason=piece.choice.reason,
                    digest=bytes_digest(*arrays),
                    weights=weights,
                )
            )
    return records


def _in_file(pieces: Sequence[Piece]) -> list[Entry]:
    """Wide types first, so that everything is aligned."""
    entries = [entry for piece in pieces for entry in piece.entries]
    order = list(_BYTES)
    return sorted(entries, key=lambda entry: order.index(entry.dtype))


def _header(entries: Sequence[Entry], made_for: str) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": made_for}}
    at = 0
    for entry in entries:
        offsets = [at, at := at + entry.bytes]
        described[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text
