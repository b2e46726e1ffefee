"""Reads a page back the way a browser would: which elements, which attributes, which text."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "input", "col"}


@dataclass
class Element:
    name: str
    attributes: dict[str, str]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def all(self, name: str) -> list[Element]:
        elements = [self] if self.name == name else []
        return elements + [e for child in self.children for e in child.all(name)]

    def with_id(self, identifier: str) -> Element | None:
        if self.attributes.get("id") == identifier:
            return self
        return next(
            (
                element
                for child in self.children
                if (element := child.with_id(identifier))
            ),
            None,
        )

    @property
    def words(self) -> str:
        """All text in it, in order of elements."""
        return self.text + "".join(child.words for child in self.children)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("root", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {key: value or "" for key, value in attrs})
        self.open[-1].children.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> closes <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        # A child of its own, so that the text before, between and after elements keeps its order.
        self.open[-1].children.append(Element("#text", {}, data))


def read(page: str) -> Element:
    """The page as a tree; fails where tags do not nest."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].name}> is never closed"
    return reader.root
