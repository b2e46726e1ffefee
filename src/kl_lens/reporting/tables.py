"""Tables: plain HTML that the script makes sortable and filterable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kl_lens.records import Component, Measurement
from kl_lens.reporting.data import KL
from kl_lens.reporting.markup import Html, join, tag
from kl_lens.reporting.numbers import number
from kl_lens.reporting.plans import PlanView

# About 200 bytes a row; more than these would not fit into a page that opens at once.
MOST_ROWS = 5000


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


_LAYER_COLUMNS = (
    text_column("component"),
    text_column("kind"),
    Column("block"),
    Column("weights"),
    text_column("format"),
    Column("KL", hint="KL(original ‖ quantized), nats per token"),
    Column("± KL", hint="standard error over windows"),
    Column("reverse KL", hint="KL(quantized ‖ original), nats per token"),
    Column("MSE", hint="mean squared error of the logits"),
    Column("SQNR dB", hint="signal to quantization noise ratio of the logits; larger is better"),
    Column("ΔCE", hint="change in cross-entropy against the true next token, nats per token"),
    Column("± ΔCE", hint="standard error over windows"),
    Column("same top %", hint="tokens whose most likely next token stays the same"),
    Column("KL p99", hint="99th percentile over tokens"),
    Column("in the plan", number=False, hint="format of this component in the recommended plan"),
)


def layer_table(
    components: Sequence[Component], measurements: Sequence[Measurement], recommended: PlanView | None
) -> Html:
    """One row for each component and format, with every metric, and the controls that filter them."""
    by_name = {c.name: c for c in components}
    shown = list(measurements)
    note = None
    if len(shown) > MOST_ROWS:
        shown = sorted(shown, key=lambda m: -m.metrics[KL].value if KL in m.metrics else 0.0)[:MOST_ROWS]
        note = tag("p", f"The {MOST_ROWS:,} most sensitive of {len(measurements):,}.", class_="note")
    rows = [_layer_row(by_name[m.component], m, recommended) for m in shown]
    kinds = sorted({by_name[m.component].kind for m in shown})
    formats = list(dict.fromkeys(m.format for m in shown))
    controls = tag(
        "div",
        tag(
            "label", "component ", tag("input", type="search", data_filter="0", placeholder="part of a name")
        ),
        tag("label", "kind ", _select(1, kinds)),
        tag("label", "format ", _select(4, formats)),
        tag("output", f"{len(rows)} rows"),
        class_="controls",
        data_for="layers",
        hidden=True,
    )
    whole = table(
        _LAYER_COLUMNS, rows, identifier="layers", caption="Every component in every format measured"
    )
    return join([note, controls, Html(whole.replace('class="scroll"', 'class="scroll tall"', 1))])


def _select(column: int, choices: Sequence[str]) -> Html:
    return tag(
        "select", tag("option", "all", value=""), *(tag("option", c) for c in choices), data_filter=column
    )


def _layer_row(component: Component, m: Measurement, recommended: PlanView | None) -> list[object]:
    def value(name: str, digits: int = 3, factor: float = 1.0) -> str:
        return number(m.metrics[name].value * factor, digits).replace(",", "") if name in m.metrics else "–"

    def error(name: str) -> str:
        return number(m.metrics[name].standard_error, 2) if name in m.metrics else "–"

    return [
        component.name,
        component.kind,
        "–" if component.block is None else component.block,
        component.parameters,
        m.format,
        value(KL),
        error(KL),
        value("kl_student_to_teacher"),
        value("mse"),
        value("sqnr_db"),
        value("delta_cross_entropy"),
        error("delta_cross_entropy"),
        value("same_top", 4, 100.0),
        value("kl_p99"),
        "–" if recommended is None else recommended.stored.get(component.name, "fp16"),
    ]
