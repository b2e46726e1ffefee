"""What sections are made of: prose, figures, folds, and tables that the script makes sortable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kl_lens.reporting.charts import Chart
from kl_lens.reporting.markup import Html, join, tag

_NUMBER = re.compile(r"[-−+≈∞–]? ?\d|[-−∞–]$|not measurable")


@dataclass(frozen=True)
class Section:
    """A part of the page. What the run has nothing for has no section."""

    identifier: str
    title: str
    body: Html


def paragraph(*parts: object) -> Html:
    return tag("p", *parts)


def note(*parts: object) -> Html:
    return tag("p", *parts, class_="note")


def heading(words: str) -> Html:
    return tag("h3", words)


def figure(title: str, chart: Chart, caption: str = "") -> Html:
    words = [tag("b", title), *([" ", tag("span", caption)] if caption else [])]
    picture = tag("div", chart.svg(), class_="scroll", role="img", aria_label=title)
    return tag("figure", tag("figcaption", *words), picture)


def grid(figures: Iterable[Html | None]) -> Html:
    return tag("div", *[f for f in figures if f is not None], class_="grid")


def command(line: str) -> Html:
    return tag("code", line)


def details(summary: str, *body: object) -> Html:
    return tag("details", tag("summary", summary), join(body))


def chosen(name: str, legend: str, panels: Sequence[tuple[str, Html]]) -> Html:
    """One of several panels at a time, chosen by its title; without a script."""
    if len(panels) == 1:
        return panels[0][1]
    parts: list[Html] = [tag("span", legend, class_="what")]
    for index, (title, _) in enumerate(panels):
        button = f"{name}-{index}"
        parts.append(tag("input", type="radio", name_=name, id=button, class_="sr", checked=index == 0))
        parts.append(tag("label", title, for_=button))
    return tag("div", *parts, *(tag("div", body, class_="panel") for _, body in panels), class_="choice")


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
