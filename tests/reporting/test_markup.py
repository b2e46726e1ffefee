"""Nothing from outside can become markup."""

from __future__ import annotations

import html
import json

from hypothesis import given, settings, strategies as st

from kl_lens.reporting.markup import Html, escape, json_block, tag
from tests.reporting.document import read


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("td", "a < b & c") == "<td>a &lt; b &amp; c</td>"
    assert tag("p", tag("b", "x"), "<i>") == "<p><b>x</b>&lt;i&gt;</p>"
    assert isinstance(tag("p", Html("<b>x</b>")), Html)
    made = tag("a", aria_label='"><script>', class_="x", hidden=True, id=None)
    assert made == '<a aria-label="&quot;&gt;&lt;script&gt;" class="x" hidden></a>'
    assert escape("a\x00b\x1b[31m\ud800") == "a\ufffdb\ufffd[31m\ufffd"  # HTML forbids these
    assert "\u202e" not in escape("model\u202egpj.exe")  # turns the direction of text


@settings(max_examples=40, deadline=None)
@given(st.text())
def test_any_text_comes_back_as_text(text: str) -> None:
    shown = escape(text)
    [element] = read(tag("p", text, title=text)).all("p")
    assert [child.name for child in element.children] in (["#text"], [])
    assert element.words == element.attributes["title"] == html.unescape(shown)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text()))
def test_data_for_the_script_cannot_end_its_block(texts: list[str]) -> None:
    block = json_block("data", [*texts, "</script><script>alert(1)</script>", "<!--"])
    inside = block.removeprefix('<script type="application/json" id="data">').removesuffix("</script>")
    assert "<" not in inside
    assert json.loads(inside)[: len(texts)] == texts
