"""`report`: a run as one HTML file, or several on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kl_lens.pipeline.events import Events
from kl_lens.pipeline.settings import OfRun, option
from kl_lens.reporting import write_comparison, write_report
from kl_lens.runs import Run


@dataclass(frozen=True, kw_only=True)
class ReportSettings(OfRun):
    verb: ClassVar[str] = "report"
    opens_models: ClassVar[bool] = False

    out: Path | None = option(
        None,
        "where to write (default: RUN/report.html, or RUN/comparison.html of the first run compared)",
        metavar="FILE",
    )
    compare: tuple[Path, ...] = option(
        (), "other runs to put beside it, on one page", nargs="+", metavar="RUN"
    )


@dataclass(frozen=True)
class ReportResult:
    path: Path


def report(settings: ReportSettings, events: Events) -> ReportResult:
    if settings.compare:
        first = [Path(settings.run)] if settings.run else []
        return ReportResult(write_comparison([*first, *settings.compare], settings.out))
    with Run.open(settings.run_folder) as run:
        return ReportResult(write_report(run, settings.out))
