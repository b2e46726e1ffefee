"""The latency table that `kl-lens plan --max-latency` reads: {component: {format: seconds}}.

The seconds of all components add up to the time of one generated token. How they are found is each target's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.formats import get_format
from kl_lens.records import Artifact, SensitivityTable

if TYPE_CHECKING:
    from kl_lens.targets.base import RuntimeSettings, Target

FP16 = "fp16"


@dataclass(frozen=True)
class TimedArtifact:
    """A whole artifact, and how long it takes for a token."""

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
    """What a table is to be about, and what is known already."""

    table: SensitivityTable
    recipes: Sequence[str]
    measured: Sequence[TimedArtifact]
    settings: RuntimeSettings
    repeats: int = 5
    cache_bytes: int | None = None  # this machine's last-level cache
    advanced: Callable[[str], None] = lambda what: None


@dataclass
class LatencyProfile:
    """Seconds per component and format, and how they were found."""

    name: str
    seconds: dict[str, dict[str, float]]
    protocol: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)  # artifacts: predicted and measured seconds

    def predicted(self, formats: Mapping[str, str]) -> float:
        """Seconds per token of a model with these formats; components not named are FP16."""
        return math.fsum(
            row.get(formats.get(name, FP16), row.get(FP16, 0.0)) for name, row in self.seconds.items()
        )

    def check(self, measured: Sequence[TimedArtifact]) -> None:
        """Adds what the table says of artifacts whose times are known."""
        for whole in measured:
            self.checks.append(
                {
                    "subject": whole.name,
                    "predicted": self.predicted(whole.realised),
                    "measured": whole.seconds_per_token,
                }
            )
        self.protocol["checks"] = self.checks


def format_of(recipe: str) -> str:
    """The grid of a recipe as it is spelled: how values were put on it does not change how fast it is read."""
    return recipe.partition("+")[0]


def storable(target: Target, table: SensitivityTable, recipes: Sequence[str]) -> list[str]:
    """FP16, and those of the recipes' formats that a target can hold for some component."""
    formats = dict.fromkeys([FP16, *(get_format(format_of(name)).name for name in recipes)])
    shapes = {component.shape for component in table.candidates}
    return [
        name
        for name in formats
        if name == FP16 or any(target.holds(get_format(name), s) is None for s in shapes)
    ]
