"""`kl-lens report`: where the page is."""

from __future__ import annotations

from kl_lens.study.report import ReportResult


def show(result: ReportResult) -> None:
    print(result.path)
