"""The record beside an artifact's files, and where the artifacts of a run are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kl_lens.errors import TargetError
from kl_lens.records import Artifact
from kl_lens.writing import write_text

if TYPE_CHECKING:
    from kl_lens.runs import Run

RECORD_FILE = "artifact.json"


def write_record(folder: Path, artifact: Artifact) -> None:
    """Behind the files: a folder that has a record is complete."""
    write_text(folder / RECORD_FILE, json.dumps(artifact.to_json(), indent=1) + "\n")


def read_artifact(folder: Path) -> Artifact:
    """The record of an exported folder."""
    path = folder / RECORD_FILE
    if not path.is_file():
        raise TargetError(f"{folder} is no exported model: it has no {RECORD_FILE}; run `kl-lens export`")
    try:
        artifact = Artifact.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError) as error:
        raise TargetError(f"{path} cannot be read ({error}); export the model again") from error
    missing = [name for name in artifact.files if not (folder / name).exists()]
    if missing:
        raise TargetError(f"{folder}: {missing[0]} is missing; export the model again")
    return artifact


def artifact_digest(artifact: Artifact) -> str:
    """Of what was exported: another plan, model or format gives another one, the same export the same."""
    content = [artifact.target, artifact.model_fingerprint, [tensor.to_json() for tensor in artifact.tensors]]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()


def exported_places(run: Run) -> dict[tuple[str, str], Path]:
    """(target, plan) → folder of what was exported for a run: by its journal, and by what lies in its folder."""
    inside = run.folder / "artifacts"
    places = {}
    for name, record in run.load_all("artifact").items():
        target, _, plan = name.partition("/")
        here = inside / target / plan  # a run may have been moved with all that is in it
        places[target, plan] = here if here.is_dir() else Path(record["folder"])
    for record_file in sorted(inside.glob(f"*/*/{RECORD_FILE}")):
        folder = record_file.parent
        places.setdefault((folder.parent.name, folder.name), folder)
    return places
