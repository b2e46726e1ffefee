"""`kl-lens inspect`: a model's parts, and what each weighs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kl_lens.base.units import human_bytes
from kl_lens.cli.console import Row, console, table
from kl_lens.model import Anatomy
from kl_lens.run.records import Component
from kl_lens.study.inspect import PRECISIONS, InspectResult, stored_bytes


def show(result: InspectResult) -> None:
    model, anatomy, out = result.model, result.model.anatomy, console()
    tied = "head tied to the embedding" if anatomy.head == anatomy.embedding else "own head"
    out.print(
        f"[bold]{model.name}[/]  {anatomy.model_type}, {anatomy.blocks} blocks, {anatomy.parameters:,} parameters, "
        f"{len(anatomy.candidates)} quantizable components, {tied}"
    )
    rows = _by_component(anatomy) if result.by_component else _by_block(anatomy)
    out.print(table("Quantizable components", rows))
    groups: dict[tuple[str, str], list[Component]] = defaultdict(list)
    for component in anatomy.components:
        if not component.quantizable:
            groups[component.kind, component.reason or ""].append(component)
    out.print(
        table(
            "Left alone",
            [
                {
                    "kind": kind,
                    "tensors": str(len(members)),
                    "parameters": _parameters(members),
                    "why": reason,
                }
                for (kind, reason), members in groups.items()
            ],
        )
    )
    for note in anatomy.notes:
        out.print(f"Note: {note}")


def _by_block(anatomy: Anatomy) -> list[Row | None]:
    """One row per block and family; equal neighbours would only repeat, but a user may want to see each."""
    groups: dict[tuple[str, str], list[Component]] = defaultdict(list)
    for component in anatomy.candidates:
        shared = f" (shared by {len(component.blocks)})" if len(component.blocks) > 1 else ""
        place = component.family if component.block is None else f"{component.block}{shared}"
        groups[place, component.family].append(component)
    rows: list[Row | None] = [
        {
            "block": place,
            "family": family,
            "components (rows × columns)": ", ".join(f"{c.kind} {_shape(c)}" for c in members),
        }
        | _sizes(members)
        for (place, family), members in groups.items()
    ]
    left_alone = [c for c in anatomy.components if not c.quantizable]
    sums = {"quantizable": anatomy.candidates, "left alone": left_alone, "[bold]all[/]": anatomy.components}
    return [
        *rows,
        None,
        *({"components (rows × columns)": name} | _sizes(members) for name, members in sums.items()),
    ]


def _by_component(anatomy: Anatomy) -> list[Row | None]:
    rows: list[Row | None] = []
    for component in anatomy.candidates:
        relations = [f"= {name}" for name in component.tied_with]
        relations += [f"~ {name.rpartition('.')[2]}" for name in component.fused_with]
        row = {
            "component": component.name,
            "kind": component.kind,
            "family": component.family,
            "shape": _shape(component),
            "tied with, or fused by runtimes with": ", ".join(relations),
        }
        rows.append(row | _sizes([component]))
    total = {"component": "[bold]all components, and what is left alone[/]"}
    return [*rows, None, total | _sizes(anatomy.components)]


def _sizes(components: Sequence[Component]) -> dict[str, str]:
    sizes = {p.upper(): human_bytes(sum(stored_bytes(c, p) for c in components)) for p in PRECISIONS}
    return {"parameters": _parameters(components)} | sizes


def _parameters(components: Sequence[Component]) -> str:
    return f"{sum(c.parameters for c in components):,}"


def _shape(component: Component) -> str:
    return "×".join(str(size) for size in component.shape)


def as_json(result: InspectResult) -> dict[str, Any]:
    model, anatomy = result.model, result.model.anatomy
    return {
        "name": model.name,
        "model_type": anatomy.model_type,
        "layout": model.layout,
        "fingerprint": model.fingerprint,
        "blocks": anatomy.blocks,
        "embedding": anatomy.embedding,
        "head": anatomy.head,
        "parameters": anatomy.parameters,
        "bytes": {p: sum(stored_bytes(c, p) for c in anatomy.components) for p in PRECISIONS},
        "notes": anatomy.notes,
        "components": [
            c.to_json() | {"bytes": {p: stored_bytes(c, p) for p in PRECISIONS}} for c in anatomy.components
        ],
    }
