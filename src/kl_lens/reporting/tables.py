"""Tables: plain HTML that the script makes sortable and filterable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kl_lens.reporting.data import KL
from kl_lens.reporting.markup import Html, tag
from kl_lens.reporting.numbers import with_error
from kl_lens.reporting.plans import PlanView
from kl_lens.run.records import Component, Estimate, SensitivityTable
from kl_lens.weights.recipes import FP16


@dataclass(frozen=True)
class Column:
    label: str
    number: bool = True
    hint: str | None = None


def text_column(label: str) -> Column:
    return Column(label, number=False)


@dataclass(frozen=True)
class Cell:
    """A cell whose text does not sort as what it means: sizes, percentages, times."""

    text: object
    value: float | None


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[object]],
    *,
    identifier: str | None = None,
    sortable: bool = True,
    highlight: Sequence[int] = (),
    caption: str | None = None,
) -> Html:
    head = tag(
        "tr",
        *(tag("th", c.label, scope="col", class_="n" if c.number else None, title=c.hint) for c in columns),
    )
    body = []
    for index, row in enumerate(rows):
        cells = [_cell(value, column) for value, column in zip(row, columns, strict=True)]
        body.append(tag("tr", *cells, class_="loud" if index in highlight else None))
    whole = tag(
        "table",
        *([tag("caption", caption)] if caption else []),
        tag("thead", head),
        tag("tbody", *body),
        id=identifier,
        class_="sortable" if sortable else None,
    )
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption or "table")


def _cell(value: object, column: Column) -> Html:
    style = "n" if column.number else None
    if isinstance(value, Cell):
        sort = None if value.value is None else f"{value.value:.9g}"
        return tag("td", value.text, class_=style, data_v=sort)
    return tag("td", value, class_=style)


def layer_table(measured: SensitivityTable, plan: PlanView | None, index: int) -> Html:
    """One row for each component, KL in one column for each recipe; the other metrics are in the component's page."""
    by_component: dict[str, dict[str, Estimate]] = {}
    for m in measured.measurements:
        if KL in m.metrics:
            by_component.setdefault(m.component, {})[m.format] = m.metrics[KL]
    shown = [c for c in measured.components if c.name in by_component]
    formats = list(dict.fromkeys(name for row in by_component.values() for name in row))
    columns = [text_column("component"), text_column("kind"), Column("block"), Column("weights"),
               *(Column(name, hint=f"KL at {name}, nats per token, ± standard error") for name in formats),
               Column("in the plan", number=False, hint="its recipe in the recommended plan")]  # fmt: skip
    rows = [_layer_row(c, by_component[c.name], formats, plan) for c in shown]
    identifier = f"layers-{index}" if index else "layers"
    search = tag("input", type="search", data_filter="0", placeholder="part of a name")
    kinds = [tag("option", kind) for kind in sorted({c.kind for c in shown})]
    select = tag("select", tag("option", "all", value=""), *kinds, data_filter=1)
    controls = tag(
        "div",
        tag("label", "component ", search),
        tag("label", "kind ", select),
        tag("output", f"{len(rows)} rows"),
        class_="controls",
        data_for=identifier,
        hidden=True,
    )
    whole = table(
        columns, rows, identifier=identifier, caption="KL of every component in every recipe, nats per token"
    )
    return tag(
        "div", controls, Html(whole.replace('class="scroll"', 'class="scroll tall"', 1)), class_="layers"
    )


def _layer_row(
    component: Component, kls: dict[str, Estimate], formats: Sequence[str], plan: PlanView | None
) -> list[object]:
    return [
        component.name,
        component.kind,
        "–" if component.block is None else component.block,
        component.parameters,
        *(with_error(kls.get(f)) for f in formats),
        "–" if plan is None else plan.stored.get(component.name, FP16),
    ]
