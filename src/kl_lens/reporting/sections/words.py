"""Small pieces of prose and layout that several sections use."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kl_lens.reporting.charts import Chart
from kl_lens.reporting.data import RunView
from kl_lens.reporting.markup import Html, join, tag


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


def on_run(view: RunView, verb: str, *words: str) -> str:
    """A command on this run, as one would type it."""
    return shlex.join(["kl-lens", verb, "--run", view.folder, *words])


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
