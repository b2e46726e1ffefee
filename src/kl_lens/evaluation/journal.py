"""What evaluation keeps in the run: scores, and the pieces they are made of, so that a stopped command goes on."""

from __future__ import annotations

from typing import Any

from kl_lens.evaluation.scoring import WindowScore
from kl_lens.evaluation.subjects import Subject
from kl_lens.evaluation.texts import TextWindow, protocol_digest
from kl_lens.records import Score
from kl_lens.runs import Run, provenance
from kl_lens.states import STATE, is_current, state_of

SCORE, WINDOW, RUNTIME, ANSWERS, EXAMPLES, AGREEMENT = (
    "score", "score_window", "score_runtime", "task_answers", "task_examples", "agreement",
)  # fmt: skip


class Journal:
    """Reads and writes a run's scores. Pieces are filed under a subject's identity, scores under its name.

    With `again`, pieces that were there before this command are not used; those it makes itself are.
    """

    def __init__(self, run: Run, *, again: bool = False) -> None:
        self.run = run
        self._again = again
        self._fresh: set[tuple[str, str]] = set()

    def load(self, kind: str, subject: Subject, name: str) -> Any | None:
        key = f"{subject.identity}|{name}"
        if self._again and (kind, key) not in self._fresh:
            return None
        return self.run.load(kind, key)

    def store(self, kind: str, subject: Subject, name: str, value: Any) -> None:
        key = f"{subject.identity}|{name}"
        self.run.store(kind, key, value)
        self._fresh.add((kind, key))

    def window(self, subject: Subject, window: TextWindow, *, divergence: bool) -> WindowScore | None:
        """A window's score, when the run holds one with all that is asked for."""
        found = self.load(WINDOW, subject, window.key)
        if found is None or (divergence and found["token_kl"] is None):
            return None
        return WindowScore.from_json(found)

    def store_score(self, subject: Subject, score: Score) -> None:
        name = f"{score.subject}|{score.kind}|{score.what}|{protocol_digest(score.protocol)}"
        about = {"identity": subject.identity, STATE: state_of(self.run, score.subject)}
        self.run.store(SCORE, name, score.to_json() | about | {"provenance": provenance()})


def read_scores(run: Run, kind: str | None = None) -> list[Score]:
    """The scores of a run, in the order in which they were stored; of one kind only when given.

    Those of a plan or a file that has changed since are left out.
    """
    found = []
    for value in run.load_all(SCORE).values():
        if not is_current(run, value):
            continue
        fields = {name: value[name] for name in Score.__dataclass_fields__}
        if kind is None or fields["kind"] == kind:
            found.append(Score.from_json(fields))
    return found
