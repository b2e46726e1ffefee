"""Plans as files: readable, editable by hand, and checked when they are read back."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kl_lens.errors import FormatError, PlanError
from kl_lens.formats import get_format
from kl_lens.planning.cost import FP16, cost_of
from kl_lens.records import Component, Plan
from kl_lens.writing import write_text

PLAN_FILE_VERSION = 1
_FIELDS = {
    "version",
    "name",
    "made_by",
    "predicted_kl",
    "bytes",
    "bits_per_weight",
    "fingerprint",
    "assignment",
    "notes",
}


def plan_path(folder: Path | str, name: str) -> Path:
    if not name or Path(name).name != name:
        raise PlanError(f"{name!r} is no name for a plan; use letters, digits, dots, dashes and underscores")
    return Path(folder) / f"{name}.json"


def write_plan(plan: Plan, path: Path | str, components: Iterable[Component]) -> Path:
    """Writes a plan whole or not at all. Every quantizable component is named, FP16 ones too."""
    path = Path(path)
    components = tuple(components)
    cost = cost_of(components, plan.assignment)
    notes = {key: value for key, value in plan.notes.items() if key not in ("edited", "not_named")}
    if cost.fallbacks:
        notes["fallbacks"] = {**notes.get("fallbacks", {}), **cost.fallbacks}
    content = {
        "version": PLAN_FILE_VERSION,
        "name": plan.name,
        "made_by": plan.made_by,
        "predicted_kl": plan.predicted_kl,
        "bytes": cost.bytes,
        "bits_per_weight": round(cost.bits_per_weight, 6),
        "fingerprint": _fingerprint(cost.stored),
        "notes": notes,
        "assignment": cost.stored,
    }
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def read_plan(path: Path | str, components: Iterable[Component]) -> Plan:
    """Reads a plan and checks every line of it against the model.

    Components that are not named stay FP16; `notes["not_named"]` lists them. Bytes are computed afresh. Where
    the assignment was edited since it was written, or the model is another, what was predicted and measured of
    the old one is dropped and `notes["edited"]` says so; `repredicted` makes a new prediction.
    """
    path = Path(path)
    components = tuple(components)
    content = _load(path)
    assignment = _checked_assignment(path, content["assignment"], components)
    missing = [c.name for c in components if c.quantizable and c.name not in assignment]
    full = {c.name: assignment.get(c.name, FP16) for c in components if c.quantizable}
    size = cost_of(components, full).bytes
    notes, predicted = dict(content.get("notes") or {}), content.get("predicted_kl")
    made_by = str(content.get("made_by") or "hand")
    if content.get("fingerprint") != _fingerprint(full) or content.get("bytes") != size:
        notes, predicted = {"edited": True}, None
        made_by = made_by if made_by == "hand" else f"{made_by}, edited by hand"
    if missing:
        notes["not_named"] = missing
    return Plan(str(content.get("name") or path.stem), full, made_by, predicted, size, notes)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except FileNotFoundError:
        raise PlanError(f"{path}: no such plan; `kl-lens plan` makes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read: {error}") from None
    except _DuplicateKey as error:
        raise PlanError(f"{path}: {error.args[0]!r} appears twice; keep one of the two lines") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"{path}: no valid JSON: {error}; look for a missing comma or quote") from None
    if not isinstance(content, dict) or not isinstance(content.get("assignment"), dict):
        raise PlanError(f'{path}: no plan: expected an object with an "assignment" of component to format')
    version = content.get("version")
    if version != PLAN_FILE_VERSION:
        raise PlanError(
            f"{path}: plan file version {version!r}; this program reads version {PLAN_FILE_VERSION}"
        )
    if unknown := sorted(set(content) - _FIELDS):
        raise PlanError(f"{path}: unknown field {unknown[0]!r}{_hint(unknown[0], _FIELDS)}")
    predicted = content.get("predicted_kl")
    if predicted is not None and (isinstance(predicted, bool) or not isinstance(predicted, int | float)):
        raise PlanError(f"{path}: predicted_kl is {predicted!r}; expected a number or null")
    if not isinstance(content.get("notes") or {}, dict):
        raise PlanError(f"{path}: notes must be an object")
    return content


def _checked_assignment(
    path: Path, lines: Mapping[str, Any], components: tuple[Component, ...]
) -> dict[str, str]:
    by_name = {c.name: c for c in components}
    aliases = {alias: c for c in components for alias in c.tied_with}
    assignment: dict[str, str] = {}
    for name, wanted in lines.items():
        component = by_name.get(name) or aliases.get(name)
        if component is None:
            raise PlanError(f"{path}: the model has no component {name!r}{_hint(name, [*by_name, *aliases])}")
        if not isinstance(wanted, str):
            raise PlanError(f"{path}: {name}: expected the name of a format, found {wanted!r}")
        try:
            fmt = get_format(wanted)
        except FormatError as error:
            raise PlanError(f"{path}: {name}: {error}") from None
        if not component.quantizable:
            if fmt.name != FP16:
                raise PlanError(f"{path}: {name} cannot be {fmt.name}: {component.reason}; take the line out")
            continue
        if reason := fmt.fits(component.shape):
            raise PlanError(f"{path}: {name} cannot be {fmt.name}: {reason}; choose another format")
        if assignment.setdefault(component.name, fmt.name) != fmt.name:
            raise PlanError(
                f"{path}: {name} is the same weight as {component.name}, which has {assignment[component.name]}, "
                f"not {fmt.name}; give both one format"
            )
    return assignment


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else "; `kl-lens inspect` lists what there is"


def _fingerprint(assignment: Mapping[str, str]) -> str:
    text = json.dumps(sorted(assignment.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _DuplicateKey(Exception):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _DuplicateKey(key)
        result[key] = value
    return result
