"""The sections of the report, in order. Each reads a RunView and gives its part of the page."""

from __future__ import annotations

from dataclasses import dataclass

from kl_lens.reporting.markup import Html


@dataclass(frozen=True)
class Section:
    """A part of the page. What the run has nothing for has no section."""

    identifier: str
    title: str
    body: Html
