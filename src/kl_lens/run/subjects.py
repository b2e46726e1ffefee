"""Which subject a result is about, and whether that has changed since.

A result is stored with its subject's digest. The current digest of a plan or artifact is read from the run folder,
without the model. Results with another digest are outdated and not shown.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kl_lens.base.errors import KLLensError, RunError
from kl_lens.base.files import DIGESTS, RECORD_FILE, bytes_digest, settle, write_text
from kl_lens.run.folder import Result, Run
from kl_lens.run.records import (
    ARTIFACT,
    ORIGINAL,
    Artifact,
    Profile,
    Record,
    Subject,
    checked_plan_name,
)
from kl_lens.weights.recipes import FP16, parsed

AnyRecord = TypeVar("AnyRecord", bound=Record)
LARGE = 1 << 26  # bytes; the digest of smaller files is not cached


# -- digests -------------------------------------------------------------------------------------------------


def plan_digest(
    assignment: Mapping[str, str], fingerprint: str | None, statistics: str | None = None
) -> str:
    """Digest of a plan: recipe of each component and the model. FP16 may be named or left out.

    `statistics` counts only if a recipe learns from them.
    """
    recipes = parsed(assignment)
    chosen = sorted((name, recipe) for name, recipe in recipes.items() if recipe != FP16)
    learnt = (
        [statistics]
        if any(recipe.quantizer.learns for recipe in recipes.values())
        else []
    )
    return content_digest([fingerprint, chosen, *learnt])


def artifact_digest(artifact: Artifact) -> str:
    """Digest of an artifact: its tensors with the digests of their bytes, its settings, its model."""
    tensors = [
        [t.component, t.runtime_name, t.realised, t.bytes, t.digest, t.weights]
        for t in artifact.tensors
    ]
    return content_digest(
        [artifact.target, artifact.model_fingerprint, tensors, artifact.settings]
    )


def file_digest(path: Path) -> str:
    """Digest of a file's content. For large files in exported folders it is cached until the file changes."""
    status = path.stat()
    # ctime too: a tool can restore mtime, but not ctime.
    stamp = [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    memory = path.parent / DIGESTS / f"{path.name}.digest"
    remembers = status.st_size >= LARGE and (path.parent / RECORD_FILE).is_file()
    if remembers:
        with suppress(OSError, ValueError, TypeError, KeyError):  # missing or damaged
            stored = json.loads(memory.read_text(encoding="utf-8"))
            if stored["stamp"] == stamp:
                return str(stored["digest"])
    digest = (
        bytes_digest(np.memmap(path, np.uint8, "r")) if status.st_size else bytes_digest()
    )
    if remembers:
        with suppress(OSError):  # read-only folder: computed again next time
            write_text(memory, json.dumps({"stamp": stamp, "digest": digest}))
    return digest


def content_digest(content: Any, size: int = 12) -> str:
    """Digest of a JSON value."""
    return hashlib.blake2b(
        json.dumps(content, sort_keys=True).encode(), digest_size=size
    ).hexdigest()


# -- what is there now ---------------------------------------------------------------------------------------


def outside_path(path: Path) -> str:
    """Name of a file outside the run; never equal to `TARGET/PLAN` or `original`."""
    return os.path.abspath(path)


def artifact_subject(
    path: Path,
    artifact: Artifact | None,
    target: str,
    plan: str | None,
    settings: Mapping[str, Any] | None = None,
) -> Subject:
    """An exported folder or a file without a record, as `locate` finds it. `plan`: its plan in the run; without one it
    is named by its path."""
    apart = dict(settings or {}) | (
        {} if plan is not None else {"path": outside_path(path)}
    )
    digest = file_digest(path) if artifact is None else artifact_digest(artifact)
    return Subject(
        ARTIFACT, plan or (artifact.plan if artifact else None), target, apart, digest
    )


def is_current(run: Run, subject: Subject) -> bool:
    """Whether the subject is still what the result is about."""
    return subject.digest == current_digest(run, subject)


def current_results(run: Run, kind: str) -> list[Result]:
    """The results of a kind that are not outdated, in the order they were stored."""
    digests: dict[str, str | None] = {}
    results = []
    for result in run.results(kind):
        key = result.subject.key
        if key not in digests:
            digests[key] = current_digest(run, result.subject)
        if digests[key] == result.subject.digest:
            results.append(result)
    return results


def stored_record(
    run: Run,
    kind: str,
    name: str,
    value: Mapping[str, Any],
    record: type[AnyRecord],
    **more: Any,
) -> AnyRecord:
    """A record from a stored value, which may hold more; RunError if it is damaged."""
    names = {f.name for f in fields(record)}  # type: ignore[arg-type]
    try:
        return record.from_json(
            {k: v for k, v in {**more, **value}.items() if k in names}
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{run.folder}: {kind} {name!r} cannot be read ({error}); repeat what made it"
        ) from error


def current_profiles(run: Run) -> tuple[Profile, ...]:
    """One for each subject and device: a whole one before a quick one."""
    best: dict[tuple[Subject, str], tuple[bool, Profile]] = {}
    for _, name, value in current_results(run, "profile"):
        profile = stored_record(run, "profile", name, value, Profile)
        key = (profile.subject, profile.device)
        rank = bool(profile.settings.get("quick"))
        # Earlier versions stored timings of another program, too.
        if profile.protocol == "use" and (key not in best or rank <= best[key][0]):
            best[key] = (rank, profile)
    return tuple(profile for _, profile in best.values())


def current_digest(run: Run, subject: Subject) -> str | None:
    """The current digest of a subject; None if it is gone or no longer belongs to the run's plan.

    A file outside the run that is gone keeps its digest.
    """
    if subject.what == ORIGINAL:
        fingerprint = run.identity.get("model_fingerprint")
        return subject.digest if fingerprint is None else plan_digest({}, fingerprint)
    if "path" in subject.settings:
        path = Path(subject.settings["path"])
        if path.is_file():
            return file_digest(path)
        artifact = recorded_artifact(path)
        return subject.digest if artifact is None else artifact_digest(artifact)
    plan = _plan_now(run, subject.plan or "")
    if subject.target is None:
        return plan
    name = f"{subject.target}/{subject.plan}"
    record = run.load("artifact", name) or {}
    if plan is not None and record.get("of_plan", plan) != plan:
        # The plan has changed since the export.
        return None
    artifact = recorded_artifact(run.artifact_folder(name))
    return None if artifact is None else artifact_digest(artifact)


def _plan_now(run: Run, name: str) -> str | None:
    """The digest of the plan in its file; None if there is none."""
    identity = run.identity
    aliases = {
        alias: c["name"]
        for c in identity.get("components", [])
        for alias in c.get("tied_with", ())
    }
    try:
        path = run.folder / "plans" / f"{checked_plan_name(name)}.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        lines = content["assignment"].items()
        assignment = {
            aliases.get(component, component): recipe for component, recipe in lines
        }
        statistics = content.get("statistics") or run.statistics
        return plan_digest(assignment, identity.get("model_fingerprint"), statistics)
    except (KLLensError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def recorded_artifact(folder: Path) -> Artifact | None:
    """The record of an exported folder, whether or not its files are still there; None if there is none."""
    settle(folder)
    try:
        return Artifact.from_json(
            json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
