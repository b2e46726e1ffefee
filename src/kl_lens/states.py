"""What a result was about: scores and profiles carry names, and what has that name may have changed since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kl_lens.runs import Run
from kl_lens.subjects import Subject
from kl_lens.targets import TARGETS

STATE = "state"


def state_of(run: Run, subject: str) -> str | None:
    """A digest of the plan, and of the exported file, that a subject's name stands for now; None for other subjects."""
    target, slash, rest = subject.partition("/")
    if not slash or target not in ("torch", *TARGETS):
        return None
    plan = rest.split(" as ")[0].split(" (")[0]
    parts: list[Any] = [_assignment(run, plan)]
    if target != "torch":
        record = run.load("artifact", f"{target}/{plan}") or {}
        parts.append([record.get("tensors"), record.get("model_fingerprint")])
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def is_current(run: Run, record: Mapping[str, Any]) -> bool:
    """Whether a stored record is about what its subject's name stands for now."""
    known = record.get(STATE)
    subject = record.get("subject")
    name = Subject.from_json(subject).label if isinstance(subject, Mapping) else str(subject)
    return known is None or known == state_of(run, name)


def _assignment(run: Run, plan: str) -> Any:
    try:
        return json.loads((run.folder / "plans" / f"{plan}.json").read_text(encoding="utf-8")).get(
            "assignment"
        )
    except (OSError, ValueError):
        return None
