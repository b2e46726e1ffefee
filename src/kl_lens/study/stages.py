"""The stages of `run`: each is a command with its settings. A finished stage is not repeated."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from kl_lens.base.errors import KLLensError
from kl_lens.run.folder import SCREENED, Run
from kl_lens.study.session import Session
from kl_lens.study.settings import Settings, command_of
from kl_lens.study.verbs import perform


class Stages:
    """Runs commands on one run folder and records in its journal what was done with which inputs.

    `failures` lists failed stages that later stages do not depend on.
    """

    def __init__(self, folder: Path, session: Session, *, again: bool = False) -> None:
        self.folder, self.again = folder, again
        self._session, self._events = session, session.events
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
        """Runs a command, unless it was done with the same settings and inputs.

        Args:
            key: the name under which it is recorded; without one it always runs.
            inputs: a digest of what the stage reads; if it changes, the stage runs again.
            optional: later stages run even if it fails.
            lost: its output is gone, so it has to run.
            outputs: patterns of the files it writes in the run folder.
        """
        words = command_of(settings)
        # A run folder may be moved; its stages still count as done.
        done = {"words": ["RUN" if word == str(self.folder) else word for word in words], "inputs": inputs}
        with self._events.stage(settings):
            if key and not self.again and not lost:
                with Run.open(self.folder) as run:
                    known = run.load("stage", key)
                if known == done | {"outputs": self.files(*outputs)}:
                    self._events.result(None)
                    return
            if not self._performed(settings, optional):
                self.failures.append(shlex.join(words))
            elif key:
                # With a digest of the outputs: if they are deleted or overwritten, the stage runs again.
                with Run.open(self.folder) as run:
                    run.store("stage", key, done | {"outputs": self.files(*outputs)})

    def _performed(self, settings: Settings, optional: bool) -> bool:
        try:
            result = perform(settings, self._session)
            self._events.result(result)
            return getattr(result, "exit_code", 0) == 0
        except KLLensError as error:
            if not optional:
                raise
            self._events.fail(str(error))
            return False

    # -- what stages depend on -------------------------------------------------------------------------

    def measurements(self, target: str | None = None) -> str:
        """A digest of the measurements for a target; of a staged search, of what it chose: what searches for other
        limits measured besides is no reason to plan again."""
        with Run.open(self.folder) as run:
            role = run.measured_role(target)
            chosen = (run.load(SCREENED, role) or {}).get("chosen")
            rows = [
                (m.component, m.format, m.windows, m.metrics["kl_teacher_to_student"].value)
                for m in run.measurements(role)
                if chosen is None or [m.component, m.format] in chosen
            ]
        return _digest(json.dumps(sorted(rows)).encode())

    def files(self, *patterns: str) -> str:
        """A digest of the matching files."""
        paths = sorted(path for pattern in patterns for path in self.folder.glob(pattern))
        return _digest(*(str(path.relative_to(self.folder)).encode() + path.read_bytes() for path in paths))


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:16]
