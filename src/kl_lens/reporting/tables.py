"""Tables: plain HTML that the script makes sortable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kl_lens.reporting.markup import Html, tag

_NUMBER = re.compile(r"[-−+≈∞–]? ?\d|[-−∞–]$|not measurable")


@dataclass(frozen=True)
class Cell:
    """A cell whose text does not sort as what it means: sizes, percentages, times."""

    text: object
    value: float | None


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    identifier: str | None = None,
    sortable: bool = True,
    highlight: Sequence[int] = (),
    tall: bool = False,
) -> Html:
    """Columns of numbers are aligned to the right. `highlight`: rows that stand out; `tall`: scrolls by itself."""
    rows = list(rows)
    columns = list(zip(*rows, strict=True)) or [()] * len(heads)
    styles = ["n" if column and all(map(_is_number, column)) else None for column in columns]
    head = [tag("th", words, scope="col", class_=style) for words, style in zip(heads, styles, strict=True)]
    body = [
        tag("tr", *map(_cell, row, styles), class_="loud" if index in highlight else None)
        for index, row in enumerate(rows)
    ]
    whole = tag(
        "table", tag("caption", caption), tag("thead", tag("tr", *head)), tag("tbody", *body), id=identifier,
        class_="sortable" if sortable else None,
    )  # fmt: skip
    scroll = "scroll tall" if tall else "scroll"
    return tag("div", whole, class_=scroll, tabindex="0", role="region", aria_label=caption)


def _is_number(value: object) -> bool:
    return isinstance(value, Cell | int | float) or bool(_NUMBER.match(str(value)))


def _cell(value: object, style: str | None) -> Html:
    if not isinstance(value, Cell):
        return tag("td", value, class_=style)
    return tag("td", value.text, class_=style, data_v=None if value.value is None else f"{value.value:.9g}")
