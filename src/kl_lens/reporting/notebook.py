"""What a notebook shows of a study: the page of a report, a frontier and a table of measurements as charts."""

from __future__ import annotations

import html
from pathlib import Path

from kl_lens.planning import FrontierPoint
from kl_lens.reporting.charts import (
    Cell,
    Chart,
    Line,
    axis,
    grid_map,
    scatter,
    unit_of,
)
from kl_lens.reporting.data import KL
from kl_lens.reporting.names import with_error
from kl_lens.reporting.sections.explorer import rows_of
from kl_lens.run.records import Row, SensitivityTable, Tabular


class ReportFile(type(Path())):  # type: ignore[misc]
    """The path of a report; in a notebook, the page."""

    def _repr_html_(self) -> str:
        page = html.escape(self.read_text(encoding="utf-8"))
        return (
            f'<iframe srcdoc="{page}" style="width:100%;height:900px;border:0"></iframe>'
        )


class PlottedFrontier(tuple[FrontierPoint, ...], Tabular):
    """A frontier with its picture."""

    def rows(self) -> list[Row]:
        return [vars(point) for point in self]

    def _repr_html_(self) -> None:
        """None: the picture is shown."""

    def plot(self) -> Chart:
        """Size against predicted KL."""
        divisor, unit = unit_of(float(self[-1].file_bytes))
        points = [
            (point.file_bytes / divisor, point.predicted_kl)
            for point in self
            if point.predicted_kl > 0
        ]
        x = axis(f"size, {unit}", [point[0] for point in points], log=False)
        y = axis("predicted KL, nats", [point[1] for point in points], log=True)
        return scatter(x, y, [], [Line(points, "s0")])

    def _repr_svg_(self) -> str:
        return self.plot()._repr_svg_()


class PlottedTable(SensitivityTable):
    """Measurements with their picture."""

    def _repr_html_(self) -> None:
        """None: the picture is shown."""

    def plot(self, recipe: str | None = None) -> Chart:
        """What each component loses alone in a recipe (default: the one that most were measured in)."""
        names = [m.format for m in self.measurements if KL in m.metrics]
        recipe = recipe or max(self.formats, key=names.count)
        kls = {
            m.component: m.metrics[KL]
            for m in self.measurements
            if m.format == recipe and KL in m.metrics
        }
        shown = [c for c in self.candidates if c.name in kls]
        rows = rows_of(shown)
        scale = axis("", [kl.value for kl in kls.values()], log=True)
        cells = [
            Cell(
                rows[c.name],
                block,
                f"h{scale.level(kls[c.name].value)}",
                f"{c.name}\n{recipe}: KL {with_error(kls[c.name])}",
            )
            for c in shown
            for block in c.blocks or (c.block,)
        ]
        return grid_map(cells)

    def _repr_svg_(self) -> str:
        return self.plot()._repr_svg_()
