"""The stages of `run`: each is a verb with its settings, and one that is done is not done again."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kl_lens.errors import KLLensError
from kl_lens.pipeline.events import Events
from kl_lens.pipeline.settings import Settings, command_of
from kl_lens.pipeline.verbs import perform
from kl_lens.pipeline.workbench import Workbench
from kl_lens.runs import Run


class Stages:
    """Runs verbs on one run folder and remembers in its journal what was done with which inputs.

    `failures` collects stages that ended badly but whose results the later ones do not need.
    """

    def __init__(self, folder: Path, bench: Workbench, events: Events, *, again: bool = False) -> None:
        self.folder, self.again = folder, again
        self._bench, self._events = bench, events
        self.seconds: dict[str, float] = {}
        self.failures: list[str] = []

    def do(
        self,
        settings: Settings,
        *,
        key: str | None = None,
        inputs: str = "",
        optional: bool = False,
        lost: bool = False,
        outputs: Sequence[str] = (),
    ) -> None:
        """Performs a verb, unless it was done with the same settings and inputs.

        Args:
            key: the name under which it is remembered; without one it always runs.
            inputs: a digest of what the stage reads; another digest means that it has to be done anew.
            optional: the others go on when it fails.
            lost: what it made is no longer there.
            outputs: patterns of the files that it writes, in the run folder.
        """
        words = command_of(settings)
        # A run folder may be moved; what was done in it stays done.
        done = {"words": ["RUN" if word == str(self.folder) else word for word in words], "inputs": inputs}
        with self._events.stage(settings):
            if key and not self.again and not lost and self._remembered(key) == self._with(done, outputs):
                self._events.result(None)
                return
            if not self._performed(settings, optional):
                self.failures.append(shlex.join(words))
            elif key:
                with Run.open(self.folder) as run:
                    run.store("stage", key, self._with(done, outputs))

    def _performed(self, settings: Settings, optional: bool) -> bool:
        begin = time.perf_counter()
        try:
            result = perform(settings, self._bench, self._events)
            self._events.result(result)
            return getattr(result, "exit_code", 0) == 0
        except KLLensError as error:
            if not optional:
                raise
            self._events.fail(str(error))
            return False
        finally:
            spent = time.perf_counter() - begin
            self.seconds[settings.verb] = self.seconds.get(settings.verb, 0.0) + spent

    def _with(self, done: dict[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
        """With what a stage wrote: deleted or overwritten by another, it has to be made again."""
        return done | {"outputs": self.files(*outputs)}

    def _remembered(self, key: str) -> object:
        with Run.open(self.folder) as run:
            return run.load("stage", key)

    # -- what stages depend on -------------------------------------------------------------------------

    def measurements(self, target: str | None = None) -> str:
        """A digest of all that was measured on the calibration text, as a target computes."""
        with Run.open(self.folder) as run:
            rows = [
                (m.component, m.format, m.windows, m.metrics["kl_teacher_to_student"].value)
                for m in run.measurements(run.measured_role(target))
            ]
        return _digest(json.dumps(sorted(rows)).encode())

    def files(self, *patterns: str) -> str:
        """A digest of the run's files that match."""
        paths = sorted(path for pattern in patterns for path in self.folder.glob(pattern))
        return _digest(*(str(path.relative_to(self.folder)).encode() + path.read_bytes() for path in paths))


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:16]
