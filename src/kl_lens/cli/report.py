"""`kl-lens report`: where the page is."""

from __future__ import annotations

from typing import Any

from kl_lens.study.report import ReportResult


def as_json(result: ReportResult) -> dict[str, Any]:
    return {"path": str(result.path), "bytes": result.path.stat().st_size}


def show(result: ReportResult) -> None:
    print(result.path)
