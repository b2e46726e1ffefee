"""The sections of the report, in order. Each reads a RunView and gives its part of the page."""

from __future__ import annotations

from dataclasses import dataclass

from kl_lens.reporting.markup import Html


@dataclass(frozen=True)
class Section:
    """A part of the page; without a body, one line that says which command fills it."""

    identifier: str
    title: str
    body: Html | None
    command: str | None = None
    reason: str = ""
