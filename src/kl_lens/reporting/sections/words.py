"""Small pieces of prose and layout that several sections use."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from kl_lens.reporting.data import RunView
from kl_lens.reporting.markup import Html, join, tag


def paragraph(*parts: object) -> Html:
    return tag("p", *parts)


def note(*parts: object) -> Html:
    return tag("p", *parts, class_="note")


def heading(words: str) -> Html:
    return tag("h3", words)


def grid(figures: Iterable[Html | None]) -> Html:
    return tag("div", *[f for f in figures if f is not None], class_="grid")


def command(line: str) -> Html:
    return tag("code", line)


def on_run(view: RunView, verb: str, *words: str) -> str:
    """A command on this run, as one would type it."""
    return shlex.join(["kl-lens", verb, "--run", view.folder, *words])


def fills(what: str, line: str) -> Html:
    """The line that stands where something is missing."""
    return tag("p", f"{what}: not in this run. ", command(line), " adds it.", class_="missing")


def details(summary: str, *body: object) -> Html:
    return tag("details", tag("summary", summary), join(body))
