"""The latency table that `kl-lens plan --max-latency` reads: {component: {format: seconds}}.

The seconds of all components add up to the time of one generated token. Each target measures them in its own way.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_lens.recipes import FP16
from kl_lens.records import Artifact, SensitivityTable
from kl_lens.targets.session import SessionSettings

KIND, PROTOCOL_KIND = "latency", "latency_protocol"  # of a run's records


@dataclass(frozen=True)
class TimedArtifact:
    """A whole artifact and its seconds per token."""

    name: str
    place: Path
    artifact: Artifact
    seconds_per_token: float
    threads: int

    @property
    def realised(self) -> dict[str, str]:
        """Component → the format that it has in the artifact."""
        return {t.component: format_of(t.realised) for t in self.artifact.tensors}


@dataclass(frozen=True)
class LatencyRequest:
    """What to measure for a table, and what is known already."""

    table: SensitivityTable
    recipes: Sequence[str]
    measured: Sequence[TimedArtifact]
    settings: SessionSettings
    repeats: int = 5
    prompt_tokens: int = 32  # before the timed tokens, where that matters
    cache_bytes: int | None = None  # this machine's last-level cache
    advanced: Callable[[str], None] = lambda what: None


@dataclass
class LatencyProfile:
    """Seconds per component and format, and how they were found."""

    name: str
    seconds: dict[str, dict[str, float]]
    protocol: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)  # artifacts: predicted and measured seconds

    def predicted(self, formats: Mapping[str, str]) -> float | None:
        """Seconds per token of a model with these formats, FP16 where none is named; None where a time is missing."""
        times = [
            row[FP16]
            if row.keys() == {FP16}
            else row.get(formats.get(name, FP16))  # only one format: take it, whatever its name
            for name, row in self.seconds.items()
        ]
        return None if None in times else math.fsum(t for t in times if t is not None)

    def settle_rest(self, over: Sequence[float], table: SensitivityTable, what: str) -> float:
        """`over`: time of whole models beyond their weights. The median of it is time that no plan can change.

        It is shared equally among the components that plans do not decide about.
        """
        rest = max(0.0, statistics.median(over))
        self.protocol["rest"] = f"median of {len(over)} {what}, measured minus predicted"
        self.protocol["rest_seconds"] = rest
        fixed = [c.name for c in table.components if not c.quantizable]
        self.seconds.update({name: {FP16: rest / len(fixed)} for name in fixed})
        return rest

    def check(self, measured: Sequence[TimedArtifact]) -> None:
        """Adds the table's predictions for artifacts with known times."""
        self.checks += [
            {
                "subject": whole.name,
                "predicted": self.predicted(whole.realised),
                "measured": whole.seconds_per_token,
            }
            for whole in measured
        ]
        self.protocol["checks"] = self.checks


def other_conditions(known: Mapping[str, Any] | None, here: Mapping[str, Any]) -> str | None:
    """The conditions of a table that differ from the current ones; None if they are the same."""
    if known is None:
        return "unknown conditions (an earlier version made it)"
    parts = [
        f"{name} {known.get(name)} (here: {value})"
        for name, value in here.items()
        if known.get(name) != value
    ]
    return ", ".join(parts) or None


def format_of(recipe: str) -> str:
    """The format in a recipe's name: the method does not change the speed."""
    return recipe.partition("+")[0]
