"""The stages of `kl-lens run`: each is a verb with its words, and one that is done is not done again."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kl_lens.errors import KLLensError
from kl_lens.runs import CALIBRATION, Run


class Stages:
    """Runs verbs on one run folder and remembers in its journal what was done with which inputs.

    `failures` collects stages that ended badly but whose results the later ones do not need.
    """

    def __init__(self, folder: Path, *, again: bool = False) -> None:
        self.folder = folder
        self.again = again
        self.seconds: dict[str, float] = {}
        self.failures: list[str] = []

    def do(
        self,
        verb: str,
        *words: str,
        key: str | None = None,
        inputs: str = "",
        optional: bool = False,
        lost: bool = False,
        outputs: Sequence[str] = (),
    ) -> bool:
        """Runs a verb, unless it was done with the same words and inputs. False when an optional one failed.

        Args:
            key: the name under which it is remembered; without one it always runs.
            inputs: a digest of what the stage reads; another digest means that it has to be done anew.
            optional: the others go on when it fails.
            lost: what it made is no longer there.
            outputs: patterns of the files that it writes, in the run folder.
        """
        print(f"\n== kl-lens {shlex.join([verb, *words])}", flush=True)
        # A run folder may be moved; what was done in it stays done.
        done = {
            "words": [verb, *("RUN" if word == str(self.folder) else word for word in words)],
            "inputs": inputs,
        }
        if key and not self.again and not lost and self._remembered(key) == done | self._made(outputs):
            print("done already")
            return True
        begin = time.perf_counter()
        try:
            code = self._execute(verb, words)
        except KLLensError as error:
            if not optional:
                raise
            print(f"kl-lens {verb}: {error}", file=sys.stderr)
            code = error.exit_code
        self.seconds[verb] = self.seconds.get(verb, 0.0) + time.perf_counter() - begin
        if code == 130:
            raise KeyboardInterrupt
        if code and not optional:
            raise SystemExit(code)
        if code:
            self.failures.append(shlex.join([verb, *words]))
            return False
        if key:
            with Run.open(self.folder) as run:
                run.store("stage", key, done | self._made(outputs))
        return True

    def _made(self, outputs: Sequence[str]) -> dict[str, str]:
        """What a stage wrote: deleted or overwritten by another, it has to be made again."""
        return {"outputs": self.files(*outputs)}

    def _remembered(self, key: str) -> object:
        with Run.open(self.folder) as run:
            return run.load("stage", key)

    def _execute(self, verb: str, words: Sequence[str]) -> int:
        from kl_lens.cli.main import parse

        typed = sys.argv
        # The journal keeps each stage's own command, so that each can be repeated alone.
        sys.argv = ["kl-lens", verb, *words]
        try:
            arguments = parse([verb, *words])
            return int(arguments.execute(arguments) or 0)
        finally:
            sys.argv = typed

    # -- what stages depend on -------------------------------------------------------------------------

    def measurements(self) -> str:
        """A digest of all that was measured on the calibration text."""
        with Run.open(self.folder) as run:
            rows = [
                (m.component, m.format, m.windows, m.metrics["kl_teacher_to_student"].value)
                for m in run.measurements(CALIBRATION)
            ]
        return _digest(json.dumps(sorted(rows)).encode())

    def files(self, *patterns: str) -> str:
        """A digest of the run's files that match."""
        found = sorted(path for pattern in patterns for path in self.folder.glob(pattern))
        return _digest(*(str(path.relative_to(self.folder)).encode() + path.read_bytes() for path in found))


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:16]
