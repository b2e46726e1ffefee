"""The report: a run, or several side by side, as one HTML file that any browser opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kl_lens.errors import RunError
from kl_lens.reporting.comparison import comparison_page
from kl_lens.reporting.data import collect
from kl_lens.reporting.page import report_page
from kl_lens.runs import Run
from kl_lens.writing import write_text

__all__ = ["write_comparison", "write_report"]


def write_report(run: Run, path: Path | None = None) -> Path:
    """Writes the report of a run, to `RUN/report.html` unless told otherwise; gives the path back.

    Example:
        >>> with Run.open(Path("runs/mamba")) as run:
        ...     print(write_report(run))
    """
    path = path or run.folder / "report.html"
    return _written(path, report_page(collect(run)))


def write_comparison(runs: Sequence[Path], path: Path | None = None) -> Path:
    """Writes several runs side by side, to `FIRST_RUN/comparison.html` unless told otherwise."""
    if len(runs) < 2:
        raise RunError("comparing takes at least two runs: --compare RUN RUN, or --run RUN --compare RUN")
    views = []
    for folder in runs:
        with Run.open(folder) as run:
            views.append(collect(run))
    return _written(path or Path(runs[0]) / "comparison.html", comparison_page(views))


def _written(path: Path, content: str) -> Path:
    if path.is_dir():
        raise RunError(f"{path} is a folder; --out wants a file")
    try:
        write_text(path, content)
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror}); use another --out") from error
    return path
