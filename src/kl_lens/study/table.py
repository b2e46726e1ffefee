"""`table`: a run's sensitivities, one row per component and recipe; or as a file from which others plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_lens.base.errors import RunError
from kl_lens.run.folder import Run
from kl_lens.run.sharing import write_shared
from kl_lens.study import settings as of
from kl_lens.study.session import Session
from kl_lens.study.settings import ForTargets, option, with_options


@with_options
class TableSettings(ForTargets):
    run: of.Folder | None = of.of_run()
    csv: bool = option(False, "print CSV, with every metric and its error")
    out: of.Shared | None = option(
        None,
        "write one file with every measurement, for all targets: kl-lens run MODEL --table FILE plans from it",
    )


@dataclass(frozen=True)
class TableResult:
    rows: list[dict[str, Any]]
    csv: bool
    out: Path | None


def table(settings: TableSettings, session: Session) -> TableResult:
    folder = Path(settings.run or of.DEFAULT_RUN)
    with Run.open(folder) as run:
        rows = run.table(target=settings.runtime, predicted=True).rows()
        if not rows:
            raise RunError(
                f"{folder} has no sensitivities; measure some with: kl-lens measure MODEL --run {folder}"
            )
        if settings.out:
            write_shared(run, settings.out)
    return TableResult(rows, settings.csv, settings.out)
