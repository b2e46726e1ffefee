"""What the stages of a job should take."""

from __future__ import annotations

from dataclasses import dataclass

IN_RUNTIME, IN_MODEL = "runtime", "model"  # kinds of stages; how far they are off differs


@dataclass(frozen=True)
class StageCost:
    verb: str
    target: str | None
    seconds: float
    disk: int = 0

    @property
    def kind(self) -> str:
        return IN_RUNTIME if self.verb in ("export", "evaluate", "generate", "benchmark") else IN_MODEL


@dataclass(frozen=True)
class JobEstimate:
    stages: tuple[StageCost, ...]  # as they come
    memory: int
    windows: int
    load: float  # how many times longer the machine takes than if it were idle

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def disk(self) -> int:
        return sum(stage.disk for stage in self.stages)
