"""Axes, labels and colours of charts, numbers as people write them, and markup."""

import html
import json
import re

from hypothesis import given, settings, strategies as st

from kl_lens.reporting import charts
from kl_lens.reporting.charts import Axis, Cell, Dot, axis, grid_map, scatter
from kl_lens.reporting.markup import Html, escape, json_block, tag
from tests.reporting.document import read


@given(
    st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=20),
    st.sampled_from([True, False, None]),
)
def test_an_axis_holds_its_values_in_order_and_a_log_axis_has_a_few_ticks(
    values: list[float], log: bool | None
) -> None:
    drawn = axis("", values, log=log)
    assert log is not None or drawn.log == (max(values) > 10 * min(values))
    distances = [drawn.place(v, 100) for v in sorted(values)]
    assert distances == sorted(distances)
    assert all(-1e-6 <= distance <= 100 + 1e-6 for distance in distances)
    if drawn.log:
        assert 1 <= len(charts.log_ticks(drawn.low, drawn.high)) <= 12


def test_hostile_words_stay_words_in_a_chart() -> None:
    words = '"></path><script>alert(1)</script>&\x00'
    unit = Axis(words, 0, 1)
    drawn = scatter(
        unit,
        unit,
        [Dot(0.5, 0.5, words, words, label="<b>"), Dot(0.1, 0.1, "other", "s")],
    ).svg()
    assert "<script" not in drawn
    assert "<b>" not in drawn
    assert "alert(1)" in drawn
    assert "<script" not in grid_map([Cell(words, 0, "h3", words)]).svg()


def test_numbers_in_words_are_whole_and_only_coordinates_are_shortened() -> None:
    cells = [Cell("in_proj", 0, "h3", "in_proj, KL about 0.01534, predicted", True)]
    drawn = grid_map(cells).svg()
    assert "KL about 0.01534, predicted" in drawn
    assert not re.search(r' d="[^"]*\d\.\d\d+[,)]', drawn)


# -- nothing from outside can become markup ------------------------------------------------------------------


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("td", "a < b & c") == "<td>a &lt; b &amp; c</td>"
    assert tag("p", tag("b", "x"), "<i>") == "<p><b>x</b>&lt;i&gt;</p>"
    assert isinstance(tag("p", Html("<b>x</b>")), Html)
    link = tag("a", aria_label='"><script>', class_="x", hidden=True, id=None)
    assert link == '<a aria-label="&quot;&gt;&lt;script&gt;" class="x" hidden></a>'
    assert (
        escape("a\x00b\x1b[31m\ud800") == "a\ufffdb\ufffd[31m\ufffd"
    )  # HTML forbids these
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
    inside = block.removeprefix(
        '<script type="application/json" id="data">'
    ).removesuffix("</script>")
    assert "<" not in inside
    assert json.loads(inside)[: len(texts)] == texts
