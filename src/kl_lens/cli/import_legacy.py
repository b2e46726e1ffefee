"""`kl-lens import-legacy`: what was read."""

from __future__ import annotations

from kl_lens.study.import_legacy import ImportLegacyResult


def show(result: ImportLegacyResult) -> None:
    print(f"imported {result.measurements} published measurements of {result.model} into {result.folder}")
