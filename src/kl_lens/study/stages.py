"""The stages of `run`, each done once for the same settings and inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

from kl_lens.base.errors import KLLensError
from kl_lens.run.folder import SCREENED, Run
from kl_lens.study.events import Events


class Stages:
    """Does stages and records in the run's journal with what; `failed`: those that others did not depend on."""

    def __init__(self, run: Run, events: Events, *, again: bool = False) -> None:
        self._run, self._events, self._again = run, events, again
        self.failed: list[str] = []

    def do(
        self,
        verb: str,
        work: Callable[[], object],
        *,
        target: str | None = None,
        key: str = "",
        given: object = (),
        inputs: str = "",
        outputs: Sequence[str] = (),
        lost: bool = False,
        optional: bool = False,
    ) -> None:
        """Does the work of a verb, unless it was done with the same settings and inputs.

        Args:
            work: returns the verb's result, or None.
            key: the name under which it is recorded; without one it is always done.
            given: the settings that it depends on.
            inputs: a digest of what it reads.
            outputs: patterns of the files it writes in the run folder: if they change, it is done again.
            lost: its output is gone.
            optional: if it fails, the run goes on.
        """
        done = {"given": str(given), "inputs": inputs}
        known = None if lost or self._again or not key else self._run.load("stage", key)
        if known == done | {"outputs": self.files(*outputs)}:
            self._events.skipped(verb, target)
            return
        with self._events.stage(verb, target):
            try:
                result = work()
            except (KLLensError, RuntimeError, OSError) as error:  # runtimes raise their own
                if not optional:
                    raise
                self._events.tell(str(error))
                self.failed.append(verb)
                return
            self._events.result(result)
            if getattr(result, "exit_code", 0):
                self.failed.append(verb)
            elif key:
                self._run.store("stage", key, done | {"outputs": self.files(*outputs)})

    def measurements(self, target: str | None = None) -> str:
        """A digest of the measurements for a target; of a staged search, of what it chose: what searches for other
        limits measured besides is no reason to plan again."""
        role = self._run.measured_role(target)
        chosen = (self._run.load(SCREENED, role) or {}).get("chosen")
        rows = [
            (m.component, m.format, m.windows, m.metrics["kl_teacher_to_student"].value)
            for m in self._run.measurements(role)
            if chosen is None or [m.component, m.format] in chosen
        ]
        return _digest(json.dumps(sorted(rows)).encode())

    def files(self, *patterns: str) -> str:
        """A digest of the matching files of the run."""
        folder = self._run.folder
        paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
        return _digest(*(str(path.relative_to(folder)).encode() + path.read_bytes() for path in paths))


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:16]
