"""Plan files: readable, editable by hand, and checked when read.

A plan is named after its file: `plans/small.json` holds the plan `small`. A copy needs its own name; otherwise its
artifacts would overwrite the first one's.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kl_lens.base.errors import FormatError, KLLensError, PlanError
from kl_lens.base.files import write_text
from kl_lens.planning.predict import cost_of
from kl_lens.run.records import PLAN_FAMILIES, Component, Plan, checked_plan_name
from kl_lens.weights.recipes import FP16, Recipe

PLAN_FILE_VERSION = 3
# In this order. Those that are not a plan's own: version, bits_per_weight (for people), fingerprint.
_FIELDS = (
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
    "caches",
    "held_bytes",
    "notes",
    "assignment",
)
_MEMORY = ("caches", "held_bytes")  # only of plans for a memory


def plan_path(folder: Path | str, name: str) -> Path:
    return Path(folder) / f"{checked_plan_name(name)}.json"


def require_distinct(folder: Path, name: str) -> None:
    """Raises if another plan's name differs only by case: macOS and Windows would keep one file for both."""
    for path in folder.glob("*.json"):
        if path.stem != name and path.stem.casefold() == name.casefold():
            raise PlanError(
                f"{name}: {path} differs only by case, and is the same file on macOS and Windows; use another name"
            )


def write_plan(plan: Plan, path: Path | str, components: Iterable[Component]) -> Path:
    """Writes a plan atomically. Every quantizable component is named, FP16 ones too."""
    path = Path(path)
    if checked_plan_name(plan.name) != path.stem:
        raise PlanError(
            f"{path}: the file of plan {plan.name} must be called {plan.name}.json"
        )
    require_distinct(path.parent, plan.name)
    components = tuple(components)
    cost = cost_of(components, plan.assignment)
    notes = {key: value for key, value in plan.notes.items() if key != "not_named"}
    if cost.fallbacks:
        notes["fallbacks"] = {**notes.get("fallbacks", {}), **cost.fallbacks}
    facts = plan.to_json() | {
        "version": PLAN_FILE_VERSION,
        "bytes": cost.bytes,
        "bits_per_weight": round(cost.bits_per_weight, 6),
        "fingerprint": _fingerprint(cost.stored, plan.statistics, plan.target),
        "notes": notes,
        "assignment": cost.stored,
    }
    content = {
        name: facts[name] for name in _FIELDS if facts[name] or name not in _MEMORY
    }
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")
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
    facts = {name: value for name, value in content.items() if value is not None}
    fingerprint = facts.pop("fingerprint", None)
    for name in ("version", "bits_per_weight"):
        facts.pop(name, None)
    facts = {"name": path.stem, "made_by": "hand", **facts, "assignment": full}
    try:
        plan = Plan.from_json(facts)
        if plan.family not in PLAN_FAMILIES:
            raise ValueError(
                f"family is {plan.family!r}; expected one of {', '.join(PLAN_FAMILIES)}"
            )
        perplexity = plan.measured.original_perplexity if plan.measured else 1.0
        if not (plan.interaction > 0 and perplexity > 0):
            raise ValueError("interaction and perplexity must be above zero")
    except ValueError as error:
        raise PlanError(f"{path}: {error}") from None
    current = _fingerprint(full, plan.statistics, plan.target)
    if fingerprint != current or plan.bytes != size:
        made_by = plan.made_by
        plan = Plan(
            path.stem,
            full,
            made_by if made_by == "hand" else f"{made_by}, edited by hand",
            statistics=plan.statistics,
            target=plan.target,
            edited=True,
        )
    if missing:
        plan.notes["not_named"] = missing
    return replace(plan, bytes=size)


def stored_plans(
    folder: Path, components: Iterable[Component]
) -> dict[str, Plan | KLLensError]:
    """The plans in a folder by name, or why one cannot be read."""
    components = tuple(components)
    plans: dict[str, Plan | KLLensError] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            plans[path.stem] = read_plan(path, components)
        except KLLensError as error:
            plans[path.stem] = error
    return plans


def _load(path: Path) -> dict[str, Any]:
    if path.is_fifo():
        raise PlanError(f"{path}: a pipe, where a file is needed")
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates
        )
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except FileNotFoundError:
        raise PlanError(f"{path}: no such plan; make one with kl-lens plan") from None
    except (OSError, UnicodeError) as error:
        raise PlanError(f"{path}: cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("assignment"), dict):
        raise PlanError(
            f'{path}: not a plan: expected an object with an "assignment" of component to format'
        )
    version = content.get("version")
    name = content.get("name", path.stem)
    if version != PLAN_FILE_VERSION:
        raise PlanError(
            f"{path}: plan file version {version!r}; this program reads version {PLAN_FILE_VERSION}: "
            "make the plan again"
        )
    if unknown := sorted(set(content) - set(_FIELDS)):
        raise PlanError(
            f"{path}: unknown field {unknown[0]!r}{_hint(unknown[0], _FIELDS)}"
        )
    if name != path.stem:
        raise PlanError(
            f"{path}: the name inside is {name!r}, but must be that of the file; "
            f'write "name": {json.dumps(path.stem)} if it is a copy, or rename the file'
        )
    try:
        checked_plan_name(path.stem)
    except PlanError as error:
        raise PlanError(f"{path}: {error}; rename the file and the name inside") from None
    return content


def _checked_assignment(
    path: Path, lines: Mapping[str, Any], components: tuple[Component, ...]
) -> dict[str, str]:
    by_name = {c.name: c for c in components}
    aliases = {alias: c for c in components for alias in c.tied_with}
    assignment: dict[str, str] = {}
    for name, spelling in lines.items():
        component = by_name.get(name) or aliases.get(name)
        if component is None:
            raise PlanError(
                f"{path}: the model has no component {name!r}{_hint(name, [*by_name, *aliases])}"
            )
        if not isinstance(spelling, str):
            raise PlanError(
                f"{path}: {name}: expected the name of a format, got {spelling!r}"
            )
        try:
            recipe = Recipe.parse(spelling)
        except FormatError as error:
            raise PlanError(f"{path}: {name}: {error}") from None
        if not component.quantizable:
            if recipe != FP16:
                raise PlanError(
                    f"{path}: {name} cannot be {recipe}: {component.reason}; remove the line"
                )
            continue
        if reason := recipe.grid.fits(component.shape):
            raise PlanError(
                f"{path}: {name} cannot be {recipe}: {reason}; choose another format"
            )
        if assignment.setdefault(component.name, recipe) != recipe:
            raise PlanError(
                f"{path}: {name} is the same weight as {component.name}, which has {assignment[component.name]}, "
                f"not {recipe}; give both the same format"
            )
    return assignment


def _hint(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names))
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return "; `kl-lens inspect` lists the known names"


def _fingerprint(
    assignment: Mapping[str, str], statistics: str | None, target: str | None
) -> str:
    """Of everything the numbers depend on: recipes, statistics, target."""
    basis = [fact for fact in (statistics, target) if fact is not None]
    text = json.dumps([*sorted(assignment.items()), *basis])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice!r} appears twice; keep one of the two lines")
    return result
