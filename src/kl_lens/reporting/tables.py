"""Tables: plain HTML that the script makes sortable and filterable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kl_lens.reporting.markup import Html, tag


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
    tall: bool = False,
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
    return tag(
        "div",
        whole,
        class_="scroll tall" if tall else "scroll",
        tabindex="0",
        role="region",
        aria_label=caption or "table",
    )


def _cell(value: object, column: Column) -> Html:
    style = "n" if column.number else None
    if isinstance(value, Cell):
        sort = None if value.value is None else f"{value.value:.9g}"
        return tag("td", value.text, class_=style, data_v=sort)
    return tag("td", value, class_=style)
