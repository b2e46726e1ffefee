"""A stage of a run: a small object that says what it needs, makes and costs, and does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kl_lens.study.run.costs import Cost, Costs
from kl_lens.study.run.job import Job


@dataclass(frozen=True)
class Basis:
    """What a stage rests on. It is recorded under `key`; while all of it is the same, the stage is not repeated."""

    key: str
    given: object = ()  # settings
    inputs: str = ""  # a digest of what it needs
    outputs: Sequence[str] = ()  # patterns of the files that it makes
    lost: bool = False  # what it made is not there


@dataclass(frozen=True)
class Stage:
    """Does what the command `verb` does, for one target or for all."""

    verb: ClassVar[str]
    optional: ClassVar[bool] = False  # if it fails, the run goes on
    target: str | None = None

    def applies(self, job: Job) -> bool:
        """Asked when its turn comes."""
        return self.target is None or self.target in job.targets

    def obstacle(self, job: Job) -> str | None:
        """Why it cannot be done for this model."""
        return None

    def basis(self, job: Job) -> Basis | None:
        """None: nothing of it is recorded, so it is always done; it finds by itself what is missing."""
        return None

    def begin(self, job: Job, passed: Stage | None) -> None:
        """Begins in the background what of it needs no more than what there is: at the start (None), or after a stage
        before it passed."""

    def prepare(self, job: Job) -> None:
        """When its turn comes, whether it is repeated or not."""

    def work(self, job: Job) -> object:
        raise NotImplementedError

    def finish(self, job: Job) -> None:
        """After its turn, whether it was repeated or not."""

    def is_survived(self, job: Job, error: Exception) -> bool:
        """Whether the run goes on after this error; then it was reported."""
        return False

    def cost(self, costs: Costs) -> Cost | None:
        """None: it is not forecast."""
        return None


@dataclass(frozen=True)
class OfTarget(Stage):
    target: str
