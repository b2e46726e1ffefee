"""`import-legacy`: turns published measurements into a run to plan with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kl_lens.base.errors import RunError
from kl_lens.measuring.sweep import model_identity
from kl_lens.paper import read_legacy
from kl_lens.run.folder import Run
from kl_lens.study.events import Events
from kl_lens.study.settings import VERB_MODEL, Loading, command_of, new_run_folder, option
from kl_lens.study.workbench import Workbench


@dataclass(frozen=True, kw_only=True)
class ImportLegacySettings(Loading):
    verb: ClassVar[str] = "import-legacy"

    model: str = option(help=VERB_MODEL, metavar="MODEL")
    bits: tuple[tuple[str, str], ...] = option(
        help="bit width and file; may be repeated", nargs=2, repeated=True, metavar=("BITS", "FILE")
    )
    run: str | None = option(None, "the run folder (default: runs/<model>)", metavar="DIR")

    def check(self) -> None:
        super().check()
        for bits, _ in self.bits:
            if bits not in map(str, range(1, 17)):
                raise RunError(f"--bits {bits[:20]}: expected 1 to 16, then a file")


@dataclass(frozen=True)
class ImportLegacyResult:
    folder: Path
    model: str
    measurements: int


def import_legacy(settings: ImportLegacySettings, bench: Workbench, events: Events) -> ImportLegacyResult:
    model = bench.model(settings)
    measurements = []
    for bits, path in settings.bits:
        measurements += read_legacy(Path(path), int(bits), model.anatomy)
    with Run.create(new_run_folder(settings.run, model.name)) as run:
        if run.roles():
            raise RunError(f"{run.folder} already holds measurements; import into another --run")
        run.identify(model_identity(model))
        run.store("imported", "measurements", [m.to_json() for m in measurements])
        run.note_command(["kl-lens", *command_of(settings)])
    return ImportLegacyResult(run.folder, model.name, len(measurements))
