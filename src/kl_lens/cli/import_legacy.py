"""`kl-lens import-legacy`: what was read."""

from __future__ import annotations

from kl_lens.pipeline.importing import ImportLegacyResult


def show(result: ImportLegacyResult) -> None:
    print(f"imported {result.measurements} published measurements of {result.model} into {result.folder}")
