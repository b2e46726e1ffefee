"""Who a result is about, and whether that still is what it was.

A result stays in the run under its subject's digest. What a plan or an artifact is now is read from the run folder
alone, without the model; results with another digest are of an earlier state and are not shown.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kl_lens.errors import KLLensError
from kl_lens.recipes import FP16, parsed
from kl_lens.records import ORIGINAL, Artifact, Subject, checked_plan_name
from kl_lens.runs import Result, Run
from kl_lens.writing import DERIVED, RECORD_FILE, settle, write_text

LARGE = 1 << 26  # bytes; what is smaller is read in no time


# -- digests -------------------------------------------------------------------------------------------------


def plan_digest(assignment: Mapping[str, str], fingerprint: str | None, statistics: str | None = None) -> str:
    """Of a plan: what it gives to which component of which model, however spelled. FP16 may be named or not.

    `statistics`: what recipes that learn are made from; without such recipes it does not matter.
    """
    recipes = parsed(assignment)
    chosen = sorted((name, recipe) for name, recipe in recipes.items() if recipe != FP16)
    learnt = [statistics] if any(recipe.quantizer.learns for recipe in recipes.values()) else []
    return content_digest([fingerprint, chosen, *learnt])


def artifact_digest(artifact: Artifact) -> str:
    """Of an artifact: its tensors with the digests of their bytes, its settings, its model."""
    tensors = [
        [t.component, t.runtime_name, t.realised, t.bytes, t.digest, t.weights] for t in artifact.tensors
    ]
    # How long the export took is no part of what it made.
    settings = {name: value for name, value in artifact.settings.items() if not name.startswith("export_")}
    return content_digest([artifact.target, artifact.model_fingerprint, tensors, settings])


def file_digest(path: Path) -> str:
    """Of a file's content. In exported folders that of a large file is remembered, until anything writes to it."""
    status = path.stat()
    # ctime too: a tool can put the old mtime back, but not that.
    stamp = [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    memory = path.parent / DERIVED / f"{path.name}.digest"
    remembers = status.st_size >= LARGE and (path.parent / RECORD_FILE).is_file()
    if remembers:
        with suppress(OSError, ValueError, TypeError, KeyError):  # not there, or damaged
            known = json.loads(memory.read_text(encoding="utf-8"))
            if known["stamp"] == stamp:
                return str(known["digest"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    if remembers:
        with suppress(OSError):  # a folder that only may be read: computed again next time
            write_text(memory, json.dumps({"stamp": stamp, "digest": digest}))
    return digest


def content_digest(content: Any, size: int = 12) -> str:
    """Of anything that JSON can say."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=size).hexdigest()


# -- what is there now ---------------------------------------------------------------------------------------


def outside_path(path: Path) -> str:
    """How a file from outside the run is called: never like the run's own `TARGET/PLAN`, or `original`."""
    return os.path.abspath(path)


def is_current(run: Run, subject: Subject) -> bool:
    """Whether a result is about what its subject's name stands for now."""
    return subject.digest == current_digest(run, subject)


def current_results(run: Run, kind: str) -> list[Result]:
    """The run's results of a kind that are about what is there now, in the order in which they were stored."""
    now: dict[str, str | None] = {}
    results = []
    for result in run.results(kind):
        key = result.subject.key
        if key not in now:
            now[key] = current_digest(run, result.subject)
        if now[key] == result.subject.digest:
            results.append(result)
    return results


def current_digest(run: Run, subject: Subject) -> str | None:
    """The digest of what a subject's name stands for now; None where that is gone, or not of the run's plan any more.

    A file from outside the run that is no longer there keeps its digest: nothing else has taken its name.
    """
    if subject.what == ORIGINAL:
        known = run.identity.get("model_fingerprint")
        return subject.digest if known is None else plan_digest({}, known)
    if "path" in subject.settings:
        path = Path(subject.settings["path"])
        if path.is_file():
            return file_digest(path)
        there = _read_artifact(path)
        return subject.digest if there is None else artifact_digest(there)
    plan = _plan_now(run, subject.plan or "")
    if subject.target is None:
        return plan
    name = f"{subject.target}/{subject.plan}"
    record = run.load("artifact", name) or {}
    if plan is not None and record.get("of_plan", plan) != plan:  # the plan was changed since the export
        return None
    artifact = _read_artifact(run.artifact_folder(name))
    return None if artifact is None else artifact_digest(artifact)


def _plan_now(run: Run, name: str) -> str | None:
    """The digest of the run's plan of this name as its file says it; None without such a plan."""
    identity = run.identity
    aliases = {alias: c["name"] for c in identity.get("components", []) for alias in c.get("tied_with", ())}
    try:
        path = run.folder / "plans" / f"{checked_plan_name(name)}.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        lines = content["assignment"].items()
        assignment = {aliases.get(component, component): recipe for component, recipe in lines}
        statistics = content.get("statistics") or run.statistics
        return plan_digest(assignment, identity.get("model_fingerprint"), statistics)
    except (KLLensError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_artifact(folder: Path) -> Artifact | None:
    settle(folder)
    try:
        return Artifact.from_json(json.loads((folder / RECORD_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None
