"""Plan files: readable, editable by hand, and checked when read.

A plan is named after its file: `plans/small.json` holds the plan `small`. A copy needs its own name; otherwise its
artifacts would overwrite the first one's.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kl_lens.base.errors import FormatError, PlanError
from kl_lens.base.files import write_text
from kl_lens.planning.cost import cost_of
from kl_lens.run.records import PLAN_FAMILIES, Component, Measured, Plan, checked_plan_name
from kl_lens.weights.recipes import FP16, Recipe

PLAN_FILE_VERSION = 3
_FIELDS = {
    "version",
    "name",
    "family",
    "made_by",
    "target",
    "predicted_kl",
    "interaction",
    "bytes",
    "bits_per_weight",
    "fixed_bytes",
    "limits",
    "measured",
    "statistics",
    "contest",
    "fingerprint",
    "assignment",
    "notes",
}
_LARGEST_NUMBER = 2**63


def plan_path(folder: Path | str, name: str) -> Path:
    return Path(folder) / f"{checked_plan_name(name)}.json"


def write_plan(plan: Plan, path: Path | str, components: Iterable[Component]) -> Path:
    """Writes a plan atomically. Every quantizable component is named, FP16 ones too."""
    path = Path(path)
    if checked_plan_name(plan.name) != path.stem:
        raise PlanError(f"{path}: the file of plan {plan.name} must be called {plan.name}.json")
    components = tuple(components)
    cost = cost_of(components, plan.assignment)
    notes = {key: value for key, value in plan.notes.items() if key != "not_named"}
    if cost.fallbacks:
        notes["fallbacks"] = {**notes.get("fallbacks", {}), **cost.fallbacks}
    content = {
        "version": PLAN_FILE_VERSION,
        "name": plan.name,
        "family": plan.family,
        "made_by": plan.made_by,
        "target": plan.target,
        "predicted_kl": plan.predicted_kl,
        "interaction": plan.interaction,
        "bytes": cost.bytes,
        "bits_per_weight": round(cost.bits_per_weight, 6),
        "fixed_bytes": plan.fixed_bytes,
        "limits": plan.limits,
        "measured": plan.measured.to_json() if plan.measured else None,
        "statistics": plan.statistics,
        "contest": plan.contest,
        "fingerprint": _fingerprint(cost.stored, plan.statistics, plan.target),
        "notes": notes,
        "assignment": cost.stored,
    }
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def read_plan(path: Path | str, components: Iterable[Component]) -> Plan:
    """Reads a plan and checks every line against the model.

    Components not named stay FP16; `notes["not_named"]` lists them. Bytes are computed again. If the assignment was
    edited, or the model is another, the old prediction and measurement are dropped and `edited` is set; `repredicted`
    makes a new prediction.
    """
    path = Path(path)
    components = tuple(components)
    content = _load(path)
    assignment = _checked_assignment(path, content["assignment"], components)
    missing = [c.name for c in components if c.quantizable and c.name not in assignment]
    full = {c.name: assignment.get(c.name, FP16) for c in components if c.quantizable}
    size = cost_of(components, full).bytes
    made_by, statistics = content.get("made_by") or "hand", content.get("statistics")
    target = content.get("target")
    if content.get("fingerprint") != _fingerprint(full, statistics, target) or content.get("bytes") != size:
        made_by = made_by if made_by == "hand" else f"{made_by}, edited by hand"
        plan = Plan(path.stem, full, made_by, bytes=size, statistics=statistics, target=target, edited=True)
    else:
        plan = Plan(
            path.stem,
            full,
            made_by,
            content.get("predicted_kl"),
            size,
            dict(content.get("notes") or {}),
            content.get("family") or "other",
            Measured.from_json(content["measured"]) if content.get("measured") else None,
            dict(content.get("limits") or {}),
            content.get("fixed_bytes") or 0,
            statistics,
            target,
            1.0 if content.get("interaction") is None else content["interaction"],
            content.get("contest"),
        )
    if missing:
        plan.notes["not_named"] = missing
    return plan


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except FileNotFoundError:
        raise PlanError(f"{path}: no such plan; make one with kl-lens plan") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read: {error}") from None
    except _DuplicateKey as error:
        raise PlanError(f"{path}: {error.args[0]!r} appears twice; keep one of the two lines") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: not valid JSON: {error}; look for a missing comma or quote") from None
    if not isinstance(content, dict) or not isinstance(content.get("assignment"), dict):
        raise PlanError(f'{path}: not a plan: expected an object with an "assignment" of component to format')
    version = content.get("version")
    if version != PLAN_FILE_VERSION:
        raise PlanError(
            f"{path}: plan file version {version!r}; this program reads version {PLAN_FILE_VERSION}: "
            "make the plan again"
        )
    _require_storable(path, content)
    if unknown := sorted(set(content) - _FIELDS):
        raise PlanError(f"{path}: unknown field {unknown[0]!r}{_hint(unknown[0], _FIELDS)}")
    if not isinstance(content.get("notes") or {}, dict):
        raise PlanError(f"{path}: notes must be an object")
    _require_types(path, content)
    return content


def _require_storable(path: Path, content: Mapping[str, Any]) -> None:
    """Numbers must be finite and strings valid Unicode, also inside nested values."""
    waiting: list[tuple[str, Any]] = list(content.items())
    while waiting:
        field, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{field}.{key}", inner) for key, inner in value.items()]
            waiting += [(field, key) for key in value]
        elif isinstance(value, list):
            waiting += [(field, inner) for inner in value]
        elif isinstance(value, int | float) and not abs(value) < _LARGEST_NUMBER:  # nan compares as False
            raise PlanError(f"{path}: {field} is not a finite number; give one, or null")
        elif isinstance(value, str) and not value.isascii() and _is_broken(value):
            raise PlanError(f"{path}: {field} holds invalid characters (half a surrogate pair)")


def _is_broken(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _require_types(path: Path, content: Mapping[str, Any]) -> None:
    """Checks the type of every field; all but the assignment may be missing or null."""

    def require(field: str, fits: Callable[[Any], bool], expected: str, value: Any) -> None:
        if value is not None and not fits(value):
            raise PlanError(f"{path}: {field} is {value!r}; expected {expected} or null")

    name = content.get("name")
    if name is not None and name != path.stem:
        raise PlanError(
            f"{path}: the name inside is {name!r}, but must be that of the file; "
            f'write "name": {json.dumps(path.stem)} if it is a copy, or rename the file'
        )
    try:
        checked_plan_name(path.stem)
    except PlanError as error:
        raise PlanError(f"{path}: {error}; rename the file and the name inside") from None
    for field in ("made_by", "statistics", "target", "contest", "fingerprint"):
        require(field, lambda v: isinstance(v, str), "a string", content.get(field))
    family = content.get("family")
    require("family", lambda v: v in PLAN_FAMILIES, f"one of {', '.join(PLAN_FAMILIES)}", family)
    for field in ("bytes", "fixed_bytes"):
        require(field, _is_count, "a whole number of bytes", content.get(field))
    for field in ("predicted_kl", "bits_per_weight"):
        require(field, _is_amount, "a number", content.get(field))
    require("interaction", lambda v: _is_amount(v) and v > 0, "a positive number", content.get("interaction"))
    require("limits", lambda v: isinstance(v, dict), "an object", content.get("limits"))
    for limit, value in (content.get("limits") or {}).items():
        require(f"limits.{limit}", _is_amount, "a number", value if value is not None else "null")
    expected = f"an object of {', '.join(Measured.__dataclass_fields__)}"
    require("measured", _is_measured, expected, content.get("measured"))


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_measured(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != set(Measured.__dataclass_fields__):
        return False
    estimates = [value["kl"], value["perplexity"]]
    return (
        all(isinstance(e, dict) and set(e) <= {"value", "standard_error"} for e in estimates)
        and all(_is_amount(e.get("value")) for e in estimates)
        and all(e.get("standard_error") is None or _is_amount(e["standard_error"]) for e in estimates)
        and all(_is_amount(v) and v > 0 for v in (value["perplexity"]["value"], value["original_perplexity"]))
        and isinstance(value["text"], str)
        and _is_count(value["windows"])
    )


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
            raise PlanError(f"{path}: {name}: expected the name of a format, got {wanted!r}")
        try:
            recipe = Recipe.parse(wanted)
        except FormatError as error:
            raise PlanError(f"{path}: {name}: {error}") from None
        if not component.quantizable:
            if recipe != FP16:
                raise PlanError(f"{path}: {name} cannot be {recipe}: {component.reason}; remove the line")
            continue
        if reason := recipe.grid.fits(component.shape):
            raise PlanError(f"{path}: {name} cannot be {recipe}: {reason}; choose another format")
        if assignment.setdefault(component.name, recipe) != recipe:
            raise PlanError(
                f"{path}: {name} is the same weight as {component.name}, which has {assignment[component.name]}, "
                f"not {recipe}; give both the same format"
            )
    return assignment


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else "; `kl-lens inspect` lists the known names"


def _fingerprint(assignment: Mapping[str, str], statistics: str | None, target: str | None) -> str:
    """Of everything the numbers depend on: recipes, statistics, target."""
    facts: list[Any] = sorted(assignment.items())
    facts += [fact for fact in (statistics, target) if fact is not None]
    text = json.dumps(facts)
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
