"""HTML as text in which nothing from outside can become markup.

Every piece of a page is an `Html`; whatever is a plain `str` is escaped on its way into a tag. A model's name, a prompt
or a file name can therefore only ever be read, never run, and there is no call that one could forget.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from typing import Any

_VOID = {"meta", "link", "br", "input", "col"}
# Characters that HTML does not allow, whatever their escape; a reader should see that something was there.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
# These turn the direction of what follows them, so that a name can read as another one.
_DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069]")


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
