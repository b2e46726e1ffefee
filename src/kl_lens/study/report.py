"""`report`: a run as one HTML file."""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass
from pathlib import Path

from kl_lens.reporting import write_report
from kl_lens.run.folder import Run
from kl_lens.study.session import Session
from kl_lens.study.settings import DEFAULT_RUN, Folder, Settings, of_run, option


@dataclass(frozen=True, kw_only=True)
class ReportSettings(Settings):
    run: Folder | None = of_run()
    out: Path | None = option(
        None, "where to write (default: RUN/report.html)", metavar="FILE"
    )
    open: bool = option(False, "open it in the browser")


def report(settings: ReportSettings, session: Session) -> Path:
    with Run.open(Path(settings.run or DEFAULT_RUN)) as run:
        path = write_report(run, settings.out)
    if settings.open and not webbrowser.open(path.resolve().as_uri()):
        session.events.warn(f"no browser found; open {path} yourself")
    return path
