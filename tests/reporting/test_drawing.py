"""Scales, numbers and labels of figures."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, strategies as st

from kl_lens.reporting import palette
from kl_lens.reporting.numbers import number, power_of_ten, with_error
from kl_lens.reporting.scales import Scale, by_span, linear, logarithmic, twosided
from kl_lens.reporting.svg import Mark, Plot
from kl_lens.run.records import Estimate
from kl_lens.weights.formats import known_formats

_VALUES = st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=20)


@given(_VALUES)
def test_a_log_scale_holds_its_values_in_order(values: list[float]) -> None:
    scale = logarithmic(values).placed(0, 100)
    places = [scale(v) for v in sorted(values)]
    assert places == sorted(places)
    assert all(-1e-6 <= place <= 100 + 1e-6 for place in places)
    assert 1 <= len(scale.ticks()) <= 10


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20))
def test_a_linear_scale_holds_its_values_and_has_readable_ticks(values: list[float]) -> None:
    scale = linear(values).placed(0, 100)
    assert all(scale.holds(v) for v in values)
    labels = [label for _, label in scale.ticks()]
    assert 2 <= len(labels) <= 12


@pytest.mark.parametrize("values", [[5e-324], [5e-324, 1e-323], [0.0], [1e300], [1e9, 1e9 + 1e-7]])
def test_a_linear_scale_has_ticks_however_small_its_span(values: list[float]) -> None:
    scale = linear(values).placed(0, 100)
    assert all(scale.holds(v) for v in values)
    assert 2 <= len(scale.ticks()) <= 12


def test_a_scale_turns_logarithmic_where_values_span_decades() -> None:
    assert by_span([20.0, 25.0]).kind == "linear"
    assert by_span([20.0, 4589.0]).kind == "log"


def test_changes_of_both_signs_over_decades_keep_their_sign_and_order() -> None:
    scale = twosided([-0.5, 0.0, 0.001, 3.0, 4000.0], [0.01] * 5).placed(0, 100)
    assert scale.kind == "twosided"
    places = [scale(v) for v in (-0.5, 0.0, 0.001, 3.0, 4000.0)]
    assert places == sorted(places)
    ticks = [value for value, _ in scale.ticks()]
    assert 0.0 in ticks
    assert min(ticks) < 0 < 100 <= max(ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123, "0.0123"),
        (1.234e-7, "1.23e-7"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (0.0, "0"),
        (1234567.0, "1.23e6"),
    ],
)
def test_numbers_read_as_people_write_them(value: float, text: str) -> None:
    assert number(value) == text


def test_an_error_is_shown_where_there_is_one() -> None:
    assert with_error(Estimate(0.5, 0.01)) == "0.50 ± 0.01"
    assert with_error(Estimate(0.00913, 4.6e-4)) == "0.0091 ± 0.0005"
    assert with_error(Estimate(1.234e-9, 3e-11)) == "1.23e-9 ± 3e-11"
    assert with_error(Estimate(0.5)) == "0.5"
    assert power_of_ten(-5) == "10⁻⁵"


def _labels(plot: Plot) -> dict[str, tuple[float, float, float, float]]:
    """Each label that was drawn → its box, at the width of a narrow font."""
    found = re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)" class="t label[ a-z]*" text-anchor="(\w+)">([^<]*)<', plot.render()
    )
    boxes = {}
    for x, y, anchor, words in found:
        width = 5.5 * len(words)
        left = float(x) - {"start": 0, "middle": width / 2, "end": width}[anchor]
        boxes[words] = (left, float(y) - 9, left + width, float(y) + 1)
    return boxes


def _overlap(one: tuple[float, ...], two: tuple[float, ...]) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]


def test_labels_do_not_cover_each_other() -> None:
    plot = Plot("t", Scale("linear", 0, 1), Scale("linear", 0, 1), "x", "y")
    plot.marks = [Mark(0.5 + i / 1000, 0.5, "m", "s0", label=f"plan number {i}") for i in range(30)]
    boxes = list(_labels(plot).values())
    assert 1 <= len(boxes) < 30
    assert not [1 for i, one in enumerate(boxes) for two in boxes[:i] if _overlap(one, two)]


def test_every_label_is_shown_where_a_recommendation_stands_beside_twins() -> None:
    plot = Plot("t", Scale("linear", 3.4, 6.6), Scale("linear", 0, 0.05), "x", "y")
    plot.marks = [
        Mark(4.51, 0.0128, "m", "s0", "plus", label="Q5_K_M"),
        Mark(4.51, 0.0122, "m", "s0", "plus", label="Q5_K_M imatrix"),
        Mark(4.54, 0.0091, "m", "s1", "star", label="recommended", emphasis=True),
    ]
    boxes = _labels(plot)
    assert set(boxes) == {"Q5_K_M", "Q5_K_M imatrix", "recommended"}
    every = list(boxes.values())
    assert not [1 for i, one in enumerate(every) for two in every[:i] if _overlap(one, two)]
    x, y = plot.x(4.54), plot.y(0.0091)  # the star, and the slider's ring around it
    assert not [one for one in every if _overlap(one, (x - 9, y - 9, x + 9, y + 9))]


def test_every_format_has_a_colour_of_its_own_that_is_the_same_everywhere() -> None:
    classes = [palette.format_class(name) for name in known_formats()]
    assert "f-other" not in classes
    assert len(set(classes)) == len(classes)
    style = palette.stylesheet()
    for name in classes:
        assert f"--{name}:" in style
        assert f".{name}{{" in style


def test_an_unknown_format_cannot_write_into_the_stylesheet() -> None:
    assert palette.format_class('x" onload="alert(1)') == "f-other"


def _lightness(colour: str) -> float:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2


def test_the_ramp_goes_one_way_in_lightness_on_paper_and_on_screen() -> None:
    light, dark = re.findall(r":root[^{]*\{([^}]*)\}", palette.stylesheet())[:2]
    for block, falls in ((light, True), (dark, False)):
        ramp = [_lightness(c) for c in re.findall(r"--h\d+:(#\w{6})", block)]
        assert len(ramp) == palette.RAMP_STEPS
        assert ramp == sorted(ramp, reverse=falls)
