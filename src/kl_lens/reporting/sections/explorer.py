"""Any other size: a slider over the best known plan or file of each, the frontier, and the map of all components."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

from kl_lens.base.units import human_speed
from kl_lens.planning.predict import stored_recipe
from kl_lens.reporting import charts
from kl_lens.reporting.answer import recommended_names, unmeasurable
from kl_lens.reporting.data import FAMILIES, KL, Position, RunView, Space, frontier
from kl_lens.reporting.markup import (
    Html,
    Section,
    chosen,
    figure,
    join,
    json_block,
    note,
    tag,
)
from kl_lens.reporting.names import (
    count,
    number,
    percent,
    plan_title,
    short_title,
    size,
    with_error,
)
from kl_lens.run.records import PREDICTED, Component, Estimate, Measurement, Plan, Score
from kl_lens.weights.recipes import FP16, Recipe

_ELSEWHERE = "files from elsewhere"
_NOTHING = 1e-8  # a KL below this is rounding, and would stretch a logarithmic axis over decades of it


def section(view: RunView) -> Section | None:
    parts = [note(line) for line in view.without_slider]
    explorers = (
        [Explorer(view, space) for space in view.spaces.values()] if view.table else []
    )
    if explorers:
        panels = [(e.space.title, e.panel(index)) for index, e in enumerate(explorers)]
        data = {
            "components": [c.name for c in explorers[0].components],
            "spaces": [e.data() for e in explorers],
        }
        parts = [chosen("for", panels), *parts, json_block("explorer-data", data)]
    return Section("sizes", "Any other size", join(parts)) if parts else None


@dataclass(frozen=True)
class Explorer:
    """What is shown for one target."""

    view: RunView
    space: Space

    @cached_property
    def components(self) -> list[Component]:
        return [c for c in self.view.components if c.quantizable]

    @cached_property
    def files(self) -> list[Position]:
        """Plans whose KL was measured as a whole."""
        measured = []
        for plan in self.view.plans_of(self.space.target):
            kl = self.view.judged(plan, self.space.target).kl
            stored = self.view.cost(plan).stored
            if kl is not None and set(stored.values()) != {FP16}:
                size_ = self.view.bytes_of(plan, self.space.target)
                measured.append(Position(size_, kl.value, stored, None, plan, kl))
        return measured

    @cached_property
    def positions(self) -> list[Position]:
        return frontier(self.space, self.files)

    @cached_property
    def known(self) -> dict[tuple[str, Recipe], Measurement]:
        """What each component loses in each recipe, measured or predicted."""
        by_name = {c.name: c for c in self.components}
        shown = [
            m
            for m in self.space.table.measurements
            if KL in m.metrics and m.component in by_name
        ]
        shown.sort(key=lambda m: m.compute_dtype == PREDICTED)
        rows: dict[tuple[str, Recipe], Measurement] = {}
        for m in shown:
            rows.setdefault(
                (m.component, stored_recipe(by_name[m.component], m.format)[0]), m
            )
        return rows

    def predicted(self, position: Position) -> int:
        """Components whose loss was not measured; of a file, the whole was."""
        if position.file:
            return 0
        rows = (self.known.get(pair) for pair in position.stored.items())
        return sum(row is not None and row.compute_dtype == PREDICTED for row in rows)

    @cached_property
    def recipes(self) -> list[Recipe]:
        """Every recipe that has a number or is in a plan, fewest bits first."""
        named = {recipe for _, recipe in self.known} | {
            r for p in self.positions for r in p.stored.values()
        }
        return sorted({*named, FP16}, key=lambda r: (r.grid.bits, r))

    # -- the frontier -------------------------------------------------------------------------------------------------

    @cached_property
    def others(self) -> list[tuple[Score, int]]:
        """Files from elsewhere that were evaluated in this run, with their sizes."""
        return [
            (score, size_)
            for score in self.view.scores
            if "path" in score.subject.settings
            and score.subject.target == self.space.target
            and "kl_mean" in score.values
            and (size_ := self.view.subject_bytes(score.subject))
        ]

    @cached_property
    def _axes(self) -> tuple[charts.Axis, charts.Axis, float]:
        divisor, unit = charts.unit_of(self.positions[-1].bytes)
        sizes = [p.bytes for p in self.positions] + [size_ for _, size_ in self.others]
        kls = [p.kl for p in (*self.files, *self.positions)]
        kls += [score.values["kl_mean"].value for score, _ in self.others]
        seen = [kl for kl in kls if kl > _NOTHING]
        x = charts.axis(f"size, {unit}", [size_ / divisor for size_ in sizes], log=False)
        y = charts.axis(
            f"KL from the original, {self.view.nats}", seen or [0.1], log=True
        )
        return x, y, divisor

    def chart(self, name: str | None = None) -> charts.Chart:
        """`name`: of the plan to show as `this file`; else recommended plans have a star."""
        x, y, divisor = self._axes
        stars = {name} if name else recommended_names(self.view)
        dots = []
        for p in self.files:
            assert p.file is not None
            assert p.measured is not None
            star = p.file.name in stars
            label = "this file" if name and star else short_title(p.file)
            series = charts.RECOMMENDED if star else FAMILIES[p.file.family]
            dots.append((p.bytes, p.measured, plan_title(p.file.name), series, label))
        dots.sort(key=lambda dot: dot[3] != charts.RECOMMENDED)
        for score, size_ in self.others:
            title = PurePath(score.subject.settings["path"]).name
            dots.append((size_, score.values["kl_mean"], title, _ELSEWHERE, title))
        shown = [self._dot(divisor, *dot) for dot in dots if dot[1].value > _NOTHING]
        return charts.scatter(x, y, shown, self._lines(divisor, y.low))

    def _dot(
        self,
        divisor: float,
        bytes_: int,
        kl: Estimate,
        title: str,
        series: str,
        label: str,
    ) -> charts.Dot:
        error = kl.standard_error if math.isfinite(kl.standard_error) else 0.0
        words = f"{title}\n{size(bytes_)}\nKL {with_error(kl)} {self.view.nats}, measured"
        low = kl.value - error
        high = kl.value + error
        return charts.Dot(bytes_ / divisor, kl.value, words, series, low, high, label)

    def _lines(self, divisor: float, lowest: float) -> list[charts.Line]:
        """Dashed where a plan has predicted parts."""
        lines: list[charts.Line] = []
        for before, after in zip(self.positions, self.positions[1:], strict=False):
            dashed = self.predicted(after) + self.predicted(before) > 0
            ends = [(p.bytes / divisor, max(p.kl, lowest)) for p in (before, after)]
            if lines and lines[-1].dashed == dashed:
                lines[-1] = charts.Line([*lines[-1].points, ends[1]], dashed=dashed)
            else:
                lines.append(charts.Line(ends, dashed=dashed))
        return lines

    # -- words --------------------------------------------------------------------------------------------------------

    def words(self, position: Position) -> tuple[str, str, str]:
        """Size; KL; the rest."""
        share = percent(position.bytes / self.view.fp16_of(self.space.target))
        if position.file:
            title = plan_title(position.file.name)
            sentence = f"Measured file {title} ({share} of FP16). No smaller loss is known at this size."
            return size(position.bytes), f"KL {with_error(position.measured)}", sentence
        weights = {c.name: c.parameters for c in self.components}
        formats = Counter[Recipe]()
        for name, recipe in position.stored.items():
            formats[recipe] += weights.get(name, 0)
        parts = [f"{share} of FP16"]
        if predicted := self.predicted(position):
            parts.append(
                f"{predicted} of {count(len(self.components), 'component')} predicted, not measured"
            )
        if position.seconds and not self._busy:
            parts.append(f"about {human_speed(position.seconds)}")
        whole = sum(formats.values())
        shares = ", ".join(
            f"{recipe} {percent(n / whole)}"
            for recipe, n in formats.most_common()
            if n / whole >= 0.005
        )
        kl = (
            "the original"
            if position.kl <= _NOTHING
            else f"predicted KL {number(position.kl)}"
        )
        return size(position.bytes), kl, f"{'; '.join(parts)}. Of the weights: {shares}."

    @cached_property
    def _busy(self) -> list[str]:
        """Where speeds could not be compared, none is predicted."""
        return unmeasurable(
            [p for p in self.view.profiles if p.subject.target == self.space.target]
        )

    # -- the map ------------------------------------------------------------------------------------------------------

    @cached_property
    def _levels(self) -> charts.Axis:
        return charts.axis(
            "", [m.metrics[KL].value for m in self.known.values()], log=True
        )

    @cached_property
    def cells(self) -> list[tuple[int, str, int | None]]:
        """Component, row and block of each cell."""
        rows = rows_of(self.components)
        return [
            (i, rows[c.name], b)
            for i, c in enumerate(self.components)
            for b in c.blocks or (c.block,)
        ]

    @cached_property
    def usual(self) -> Recipe:
        """The recipe that the map shows first: what most components have a number in; then fewer bits."""
        counts = Counter(recipe for _, recipe in self.known)
        return max(counts, key=lambda r: (counts[r], -r.grid.bits, r))

    def map(self) -> charts.Chart:
        shown = []
        for i, row, block in self.cells:
            m = self.known.get((self.components[i].name, self.usual))
            words = f"{self.components[i].name}\n{self.usual}: {self.told(m) if m else 'no number'}"
            level = "grid" if m is None else f"h{self._levels.level(m.metrics[KL].value)}"
            shown.append(
                charts.Cell(
                    row,
                    block,
                    level,
                    words,
                    m is not None and m.compute_dtype == PREDICTED,
                )
            )
        return charts.grid_map(shown)

    def told(self, m: Measurement) -> str:
        kl = m.metrics[KL]
        noise = self.space.noise
        if m.compute_dtype == PREDICTED:
            return f"KL about {number(kl.value, 2)}, predicted"
        buried = (
            ", within the noise of measuring"
            if noise is not None and kl.value <= noise
            else ""
        )
        return f"KL {with_error(kl)}{buried}"

    # -- the panel ----------------------------------------------------------------------------------------------------

    @cached_property
    def start(self) -> int:
        """Where the slider stands at first: at the recommended size."""
        wanted = [
            p.bytes
            for p in self.files
            if p.file and p.file.name in recommended_names(self.view)
        ]
        limit = wanted[0] if wanted else self.positions[len(self.positions) // 2].bytes
        return max(
            [i for i, p in enumerate(self.positions) if p.bytes <= limit], default=0
        )

    def panel(self, index: int) -> Html:
        words = self.words(self.positions[self.start])
        knobs = tag(
            "div",
            tag(
                "label",
                "Size at most ",
                _field("0", "3MB or 40%"),
            ),
            tag(
                "label",
                "or KL at most ",
                _field("1", "0.01"),
            ),
            tag("output", class_="said"),
            class_="knobs",
            hidden=True,
        )
        slider = tag(
            "input",
            type="range",
            min=0,
            max=len(self.positions) - 1,
            value=self.start,
            hidden=True,
            aria_label=f"Size of the file, {self.space.title}",
        )
        reading = tag(
            "p",
            tag("b", words[0]),
            " ",
            tag("b", words[1]),
            " ",
            tag("span", words[2]),
            class_="reading",
        )
        line = tag("pre", tag("code", class_="made"), hidden=True)
        texts = dict.fromkeys(
            self.view.judged(p.file, self.space.target).circumstances
            for p in self.files
            if p.file
        )
        texts |= dict.fromkeys(f"files, on {score.what}" for score, _ in self.others)
        dashed = (
            ", dashed where parts of a plan were predicted, not measured"
            if self._any_predicted
            else ""
        )
        caption = f"Line: the best known at each size{dashed}."
        caption += (
            f" Dots: measured ({'; '.join(texts)}) ± one standard error." if texts else ""
        )
        options = [tag("option", "the plan above", value="plan")] + [
            tag("option", recipe, value=str(i), selected=recipe == self.usual)
            for i, recipe in enumerate(self.recipes)
            if recipe != FP16
        ]
        switch = tag(
            "label", "Show ", tag("select", *options), class_="switch", hidden=True
        )
        low, high = (number(v, 2) for v in (self._levels.low, self._levels.high))
        ramp = [
            tag("i", style=f"background:{charts.colour(f'h{i}')}")
            for i in range(len(charts.RAMP))
        ]
        meaning = (
            ", for all formats. Grey: no number."
            + " Hatched: predicted." * self._any_predicted
        )
        scale = tag(
            "p",
            f"KL {low} ",
            *ramp,
            f" {high} {self.view.nats}{meaning}",
            class_="note ramp",
        )
        maps = tag(
            "div",
            switch,
            figure(f"What each component loses alone in {self.usual}", self.map().svg()),
            scale,
            tag("div", class_="component"),
            class_="map",
        )
        sizes = figure(
            f"Size against KL: {self.space.title}", self.chart().svg(), caption
        )
        columns = tag("div", tag("div", sizes, class_="line"), maps, class_="grid")
        return tag(
            "div",
            knobs,
            slider,
            reading,
            line,
            columns,
            class_="explorer",
            data_space=index,
        )

    @cached_property
    def _any_predicted(self) -> bool:
        return any(m.compute_dtype == PREDICTED for m in self.known.values())

    def data(self) -> dict[str, Any]:
        x, y, divisor = self._axes
        target = ["--target", self.space.target] if self.space.target else []
        code = {recipe: i for i, recipe in enumerate(self.recipes)}
        positions = [
            [
                p.bytes,
                p.kl,
                round(x.place(p.bytes / divisor, charts.WIDTH), 1),
                round(charts.HEIGHT - y.place(max(p.kl, y.low), charts.HEIGHT), 1),
                [code[p.stored.get(c.name, FP16)] for c in self.components],
                *self.words(p),
                self._place(p.file) if p.file else "",
            ]
            for p in self.positions
        ]
        return {
            "command": shlex.join(
                ["kl-lens", "plan", "--run", self.view.folder, *target]
            ),
            "whole": self.view.fp16_of(self.space.target),
            "recipes": self.recipes,
            "colours": [charts.bits_colour(recipe.grid.bits) for recipe in self.recipes],
            "cells": [i for i, _, _ in self.cells],
            "positions": positions,
            "ramp": [charts.colour(f"h{i}") for i in range(len(charts.RAMP))],
            "kls": [
                [self._coded(c, recipe) for c in self.components]
                for recipe in self.recipes
            ],
        }

    def _place(self, plan: Plan) -> str:
        """Where the file of a plan is, or the plan."""
        artifact = self.view.artifacts.get(f"{self.space.target}/{plan.name}")
        if artifact is None:
            return str(PurePath(self.view.folder, "plans", f"{plan.name}.json"))
        folder = PurePath(self.view.folder, "artifacts", artifact.target, plan.name)
        return str(folder / artifact.files[0] if len(artifact.files) == 1 else folder)

    def _coded(self, component: Component, recipe: Recipe) -> list[Any]:
        """Level, words, whether it was predicted."""
        m = self.known.get((component.name, recipe))
        if m is None:
            return []
        return [
            self._levels.level(m.metrics[KL].value),
            self.told(m),
            int(m.compute_dtype == PREDICTED),
        ]


def _field(quantity: str, example: str) -> Html:
    return tag(
        "input",
        type="text",
        class_="limit",
        data_by=quantity,
        size=14,
        placeholder=example,
    )


def rows_of(components: Sequence[Component]) -> Mapping[str, str]:
    """Component → the row it stands in: its kind, or its name within the block where a block has several of a kind."""
    counts = Counter(
        (c.kind, block) for c in components for block in c.blocks or (c.block,)
    )
    crowded = {kind for (kind, _), n in counts.items() if n > 1}
    return {
        c.name: re.sub(r"^.*?\.\d+\.", "", c.name) if c.kind in crowded else c.kind
        for c in components
    }
