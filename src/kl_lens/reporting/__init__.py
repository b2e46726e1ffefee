"""The report: a run as one HTML file that any browser opens without a network."""

from __future__ import annotations

from pathlib import Path

from kl_lens.base.errors import RunError
from kl_lens.base.files import write_text
from kl_lens.reporting.data import collect
from kl_lens.reporting.page import report_page
from kl_lens.run.folder import Run

__all__ = ["write_report"]


def write_report(run: Run, path: Path | None = None) -> Path:
    """Writes the report of a run, to `RUN/report.html` unless told otherwise; gives the path back.

    Example:
        >>> with Run.open(Path("runs/mamba")) as run:
        ...     print(write_report(run))
    """
    path = path or run.folder / "report.html"
    if path.is_dir():
        raise RunError(f"{path} is a folder; --out wants a file")
    content = report_page(collect(run))
    try:
        write_text(path, content)
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror}); use another --out") from error
    return path
