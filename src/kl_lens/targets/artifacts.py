"""The record beside an artifact's files, and where the artifacts of a run are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kl_lens.base.errors import TargetError
from kl_lens.base.files import RECORD_FILE, settle, write_text
from kl_lens.run.records import Artifact
from kl_lens.run.subjects import file_digest

if TYPE_CHECKING:
    from kl_lens.run.folder import Run


def write_record(folder: Path, artifact: Artifact) -> None:
    """Call it after the files are written: a folder with a record is complete."""
    write_text(folder / RECORD_FILE, json.dumps(artifact.to_json(), indent=1) + "\n")


def read_artifact(folder: Path) -> Artifact:
    """The record of an exported folder."""
    settle(folder)
    path = folder / RECORD_FILE
    if not path.is_file():
        raise TargetError(f"{folder} is not an exported model: it has no {RECORD_FILE}; run `kl-lens export`")
    try:
        artifact = Artifact.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TargetError(f"{path} cannot be read ({error}); export the model again") from error
    if outside := [name for name in artifact.files if Path(name).name != name]:
        raise TargetError(f"{path} names {outside[0]!r}, which is not a file of its folder; export again")
    missing = [name for name in artifact.files if not (folder / name).exists()]
    if missing:
        raise TargetError(f"{folder}: {missing[0]} is missing; export the model again")
    return artifact


def earlier_artifact(folder: Path) -> Artifact | None:
    """The record of what a folder holds, if it holds an exported model."""
    try:
        return read_artifact(folder)
    except TargetError:
        return None


def require_exported(folder: Path, artifact: Artifact) -> None:
    """Raises TargetError if a file differs from what was exported."""
    for name in artifact.files:
        if name in artifact.digests and file_digest(folder / name) != artifact.digests[name]:
            raise TargetError(f"{folder}: {name} was changed after the export; export the model again")


def exported_places(run: Run) -> dict[tuple[str, str], Path]:
    """(target, plan) → exported folder of a run, from its journal and from the run's folder."""
    inside = run.folder / "artifacts"
    places = {}
    for name in run.load_all("artifact"):
        target, _, plan = name.partition("/")
        places[target, plan] = run.artifact_folder(name)
    for record_file in sorted(inside.glob(f"*/*/{RECORD_FILE}")):
        folder = record_file.parent
        places.setdefault((folder.parent.name, folder.name), folder)
    return places
