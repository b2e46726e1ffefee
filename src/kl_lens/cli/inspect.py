"""`kl-lens inspect`: a model's parts, and what each weighs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from kl_lens.base.units import human_bytes
from kl_lens.cli.console import console, new_table
from kl_lens.model import Anatomy, LoadedModel
from kl_lens.run.records import Component
from kl_lens.study.inspect import PRECISIONS, InspectResult, stored_bytes


def show(result: InspectResult) -> None:
    model, anatomy, out = result.model, result.model.anatomy, console()
    out.print(f"[bold]{model.name}[/]  {_headline(model)}")
    out.print(_component_table(anatomy) if result.by_component else _block_table(anatomy))
    out.print(_left_alone_table(anatomy))
    for note in anatomy.notes:
        out.print(f"Note: {note}")


def _headline(model: LoadedModel) -> str:
    anatomy = model.anatomy
    tied = "head tied to the embedding" if anatomy.head == anatomy.embedding else "own head"
    return (
        f"{anatomy.model_type}, {anatomy.blocks} blocks, {anatomy.parameters:,} parameters, "
        f"{len(anatomy.candidates)} quantizable components, {tied}"
    )


def _place(component: Component) -> str:
    if component.block is None:
        return component.family
    return f"{component.block}" + (
        f" (shared by {len(component.blocks)})" if len(component.blocks) > 1 else ""
    )


def _add_size_columns(table: Table) -> None:
    table.add_column("parameters", justify="right")
    for precision in PRECISIONS:
        table.add_column(precision.upper(), justify="right")


def _sizes(components: Sequence[Component]) -> list[str]:
    cells = [f"{sum(c.parameters for c in components):,}"]
    return cells + [human_bytes(sum(stored_bytes(c, p) for c in components)) for p in PRECISIONS]


def _block_table(anatomy: Anatomy) -> Table:
    """One row per block and family; equal neighbours would only repeat, but a user may want to see each."""
    table = new_table("Quantizable components", ("block", "family"), fold=("components (rows × columns)",))
    _add_size_columns(table)
    groups: dict[tuple[str, str], list[Component]] = defaultdict(list)
    for component in anatomy.candidates:
        groups[_place(component), component.family].append(component)
    for (place, family), members in groups.items():
        listed = ", ".join(f"{c.kind} {_shape(c)}" for c in members)
        table.add_row(place, family, listed, *_sizes(members))
    table.add_section()
    table.add_row("", "", "quantizable", *_sizes(anatomy.candidates))
    table.add_row("", "", "left alone", *_sizes([c for c in anatomy.components if not c.quantizable]))
    table.add_row("", "", "[bold]all[/]", *_sizes(anatomy.components))
    return table


def _component_table(anatomy: Anatomy) -> Table:
    words = ("component", "kind", "family", "shape", "tied with, or fused by runtimes with")
    table = new_table("Quantizable components", fold=words)
    _add_size_columns(table)
    for component in anatomy.candidates:
        relations = [f"= {name}" for name in component.tied_with]
        relations += [f"~ {name.rpartition('.')[2]}" for name in component.fused_with]
        table.add_row(
            component.name,
            component.kind,
            component.family,
            _shape(component),
            ", ".join(relations),
            *_sizes([component]),
        )
    table.add_section()
    table.add_row(
        "[bold]all components, and what is left alone[/]", "", "", "", "", *_sizes(anatomy.components)
    )
    return table


def _left_alone_table(anatomy: Anatomy) -> Table:
    table = new_table("Left alone", ("kind",), ("tensors", "parameters"), ("why",))
    groups: dict[tuple[str, str], list[Component]] = defaultdict(list)
    for component in anatomy.components:
        if not component.quantizable:
            groups[component.kind, component.reason or ""].append(component)
    for (kind, reason), members in groups.items():
        table.add_row(kind, str(len(members)), f"{sum(c.parameters for c in members):,}", reason)
    return table


def _shape(component: Component) -> str:
    return "×".join(str(size) for size in component.shape)


def as_json(result: InspectResult) -> dict[str, Any]:
    model = result.model
    anatomy = model.anatomy
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
        "notes": list(anatomy.notes),
        "components": [
            c.to_json() | {"bytes": {p: stored_bytes(c, p) for p in PRECISIONS}} for c in anatomy.components
        ],
    }
