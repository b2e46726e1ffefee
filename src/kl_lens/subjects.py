"""Who a result is about: one record for evaluation, profiling and reporting, and whether it is still what it was."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kl_lens.errors import PlanError
from kl_lens.records import Record

ORIGINAL, PLAN, ARTIFACT = "original", "plan", "artifact"
_PLAN_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")


def checked_plan_name(name: str) -> str:
    """The name of a plan, or an error: it becomes part of file names, commands and records."""
    if not isinstance(name, str) or not _PLAN_NAME.fullmatch(name) or set(name) == {"."}:
        raise PlanError(
            f"{name!r} is no name for a plan: use letters, digits, dots, dashes and underscores, at most 80"
        )
    return name


@dataclass(frozen=True)
class Subject(Record):
    """What was judged or timed: the original, a plan computed in PyTorch, or an exported artifact.

    `settings` holds what sets it apart from the usual one of that plan and target: `{"exact": True}`,
    `{"device": "GPU"}`, `{"activations": "deployed"}`, and for a file from outside the run its `{"path": …}`.
    """

    what: str  # original, plan, artifact
    plan: str | None = None
    target: str | None = None  # of an artifact; of a plan: the target whose stored weights it computes with
    settings: dict[str, Any] = field(default_factory=dict)
    digest: str = ""  # of the recipes and weights, or of the files, that were judged

    @property
    def label(self) -> str:
        """For people: `original`, `torch/small`, `torch/small as gguf`, `gguf/small (exact)`, a path."""
        if self.what == ORIGINAL:
            return ORIGINAL
        settings = dict(self.settings)
        if self.what == PLAN:
            stored = f" as {self.target}" if self.target else ""
            return f"torch/{self.plan}{stored}" + (" deployed" if "activations" in settings else "")
        path = settings.pop("path", None)
        name = str(path) if path is not None else f"{self.target}/{self.plan}"
        return name + bracketed(settings)

    @property
    def key(self) -> str:
        """The same for the same subject in whatever state: all but the digest."""
        return json.dumps([self.what, self.plan, self.target, self.settings], sort_keys=True)

    def __hash__(self) -> int:
        return hash((self.key, self.digest))


def bracketed(settings: Mapping[str, Any]) -> str:
    """What sets a subject apart, behind its name: ` (on GPU, exact)`."""
    words = {"device": "on {}", "gpu_layers": "{} GPU layers", "exact": "exact"}
    parts = [words.get(name, name + " {}").format(value) for name, value in settings.items() if value]
    return f" ({', '.join(parts)})" if parts else ""
