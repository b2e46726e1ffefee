"""A quantity by position in the window, one line per model or plan."""

from __future__ import annotations

from collections.abc import Mapping

from kl_lens.reporting.markup import Html
from kl_lens.reporting.numbers import with_error
from kl_lens.reporting.palette import series_class
from kl_lens.reporting.scales import by_span, linear
from kl_lens.reporting.svg import SHAPES, Mark, Plot, ends, figure, legend
from kl_lens.run.positions import PositionCurve


def position_plot(title: str, axis: str, curves: Mapping[str, PositionCurve]) -> Html:
    """Error bars: one standard error over windows."""
    first = next(iter(curves.values()))
    width = first.starts[1] if len(first.starts) > 1 else 1
    reach = [v for curve in curves.values() for mean in curve.means for v in (ends(mean) or (mean.value,))]
    y = by_span(reach)
    log = " (log)" if y.kind == "log" else ""
    plot = Plot(title, linear([0, first.starts[-1] + width]), y, "position in the window, tokens", axis + log)
    entries = []
    for index, (name, curve) in enumerate(curves.items()):
        colour, shape = series_class(index), SHAPES[index % len(SHAPES)]
        entries.append((name, shape, colour))
        places = [start + width / 2 for start in curve.starts]
        plot.curve([(x, mean.value) for x, mean in zip(places, curve.means, strict=True)], colour)
        for x, start, mean in zip(places, curve.starts, curve.means, strict=True):
            words = f"{name}\npositions {start:,} to {start + width:,}: {with_error(mean)} nats per token"
            plot.marks.append(Mark(x, mean.value, words, colour, shape, 3.4, y_error=ends(mean)))
    return figure(title, plot.render(), None, legend(entries))
