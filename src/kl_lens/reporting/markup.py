"""HTML as text in which nothing from outside can become markup.

Every piece of a page is an `Html`; whatever is a plain `str` is escaped on its way into a tag. A model's name, a prompt
or a file name can therefore only ever be read, never run, and there is no call that one could forget.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_VOID = {"meta", "link", "br", "input", "col"}
# Characters that HTML does not allow, whatever their escape; a reader should see that something was there.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
# These turn the direction of what follows them, so that a name can read as another one.
_DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069]")
_NUMBER = re.compile(r"[-−+≈∞–]? ?\d|[-−∞–]$|not measurable")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def escape(value: object) -> Html:
    """What a reader sees as `value`, in text and in quoted attributes."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(clean(value), quote=True))


def clean(value: object) -> str:
    """Text without characters that a page cannot hold, or that make a name read as another one."""
    return _DIRECTION.sub("\ufffd", _CONTROL.sub("\ufffd", str(value)))


def join(parts: Iterable[object]) -> Html:
    return Html("".join(escape(part) for part in parts if part is not None))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """One element. `class_` is class, other underscores become hyphens; None and False leave an attribute out.

    Example:
        >>> tag("td", "a < b", class_="name")
        '<td class="name">a &lt; b</td>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.removesuffix("_").replace("_", "-")
        words.append(label if value is True else f'{label}="{escape(value)}"')
    opening = " ".join(words)
    if name in _VOID and not children:
        return Html(f"<{opening}>")
    return Html(f"<{opening}>{join(children)}</{name}>")


def json_block(identifier: str, data: Any) -> Html:
    """Data for the script. `<` is written as an escape of JSON, so that no `</script>` can end the block."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return tag("script", Html(safe), type="application/json", id=identifier)


# -- what sections are made of: prose, figures, folds, tables ----------------------------------------------------


@dataclass(frozen=True)
class Section:
    """A part of the page. What the run has nothing for has no section."""

    identifier: str
    title: str
    body: Html


def note(*parts: object) -> Html:
    return tag("p", *parts, class_="note")


def figure(title: str, picture: Html, caption: str = "") -> Html:
    words = [tag("b", title), *([" ", tag("span", caption)] if caption else [])]
    shown = tag("div", picture, class_="scroll", role="img", aria_label=title)
    return tag("figure", tag("figcaption", *words), shown)


def details(summary: str, *body: object) -> Html:
    return tag("details", tag("summary", summary), join(body))


def chosen(name: str, panels: Sequence[tuple[str, Html]]) -> Html:
    """One of several panels at a time, unfolded by its title; without a script."""
    if len(panels) == 1:
        return panels[0][1]
    return join(
        tag(
            "details",
            tag("summary", title),
            body,
            name_=name,
            open=index == 0,
            class_="panel",
        )
        for index, (title, body) in enumerate(panels)
    )


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
    styles = [
        "n" if column and all(map(_is_number, column)) else None for column in columns
    ]
    head = [
        tag("th", words, scope="col", class_=style)
        for words, style in zip(heads, styles, strict=True)
    ]
    body = [
        tag("tr", *map(_cell, row, styles), class_="loud" if index in highlight else None)
        for index, row in enumerate(rows)
    ]
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
        id=identifier,
        class_="sortable" if sortable else None,
    )
    scroll = "scroll tall" if tall else "scroll"
    return tag(
        "div", whole, class_=scroll, tabindex="0", role="region", aria_label=caption
    )


def _is_number(value: object) -> bool:
    return isinstance(value, Cell | int | float) or bool(_NUMBER.match(str(value)))


def _cell(value: object, style: str | None) -> Html:
    if not isinstance(value, Cell):
        return tag("td", value, class_=style)
    return tag(
        "td",
        value.text,
        class_=style,
        data_v=None if value.value is None else f"{value.value:.9g}",
    )
