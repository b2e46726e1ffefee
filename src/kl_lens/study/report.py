"""`report`: a run as one HTML file."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from kl_lens.reporting import write_report
from kl_lens.run.folder import Run
from kl_lens.study import settings as of
from kl_lens.study.session import Session
from kl_lens.study.settings import Settings, option, with_options


@with_options
class ReportSettings(Settings):
    run: of.Folder | None = of.of_run()
    out: of.Report | None = option(None, "where to write (default: RUN/report.html)")
    open: bool = option(False, "open it in the browser")


def report(settings: ReportSettings, session: Session) -> Path:
    with Run.open(Path(settings.run or of.DEFAULT_RUN)) as run:
        path = write_report(run, settings.out)
    if settings.open and not webbrowser.open(path.resolve().as_uri()):
        session.events.warn(f"no browser found; open {path} yourself")
    return path
