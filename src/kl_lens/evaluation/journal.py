"""Stores scores and intermediate results in the run, so that an interrupted command can resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kl_lens.evaluation.agreement import Agreement
from kl_lens.evaluation.judged import Judged
from kl_lens.evaluation.scoring import WindowScore
from kl_lens.evaluation.texts import Window, protocol_digest
from kl_lens.run.folder import Run, provenance
from kl_lens.run.records import Score
from kl_lens.run.subjects import current_results

SCORE, AGREEMENT = "score", "agreement"
WINDOW, RUNTIME, ANSWERS, EXAMPLES = "window_score", "score_runtime", "task_answers", "task_examples"


class ScoreJournal:
    """Reads and writes a run's scores. Intermediate results are stored by identity, scores by subject.

    With `again`, intermediate results from earlier commands are ignored.
    """

    def __init__(self, run: Run, *, again: bool = False) -> None:
        self.run = run
        self._again = again
        self._fresh: set[tuple[str, str, str]] = set()

    def forget(self) -> None:
        """Ignores all intermediate results so far."""
        self._again, self._fresh = True, set()

    def load(self, kind: str, judged: Judged, name: str) -> Any | None:
        if self._again and (kind, judged.identity, name) not in self._fresh:
            return None
        return self.run.load_piece(kind, judged.identity, name)

    def store(self, kind: str, judged: Judged, name: str, value: Any) -> None:
        self.run.store_piece(kind, judged.identity, name, value)
        self._fresh.add((kind, judged.identity, name))

    def kept(self, kind: str, judged: Judged, name: str, compute: Callable[[], Any]) -> Any:
        """What is stored, or else is computed and stored now."""
        if (value := self.load(kind, judged, name)) is None:
            value = compute()
            judged.check()
            self.store(kind, judged, name, value)
        return value

    def window(self, judged: Judged, window: Window, *, divergence: bool) -> WindowScore | None:
        """A window's score, if stored with everything needed."""
        stored = self.load(WINDOW, judged, window.key)
        if stored is None or (divergence and stored["token_kl"] is None):
            return None
        return WindowScore.from_json(stored)

    def runtime(self, judged: Judged) -> dict[str, Any]:
        """The runtime that computed its windows."""
        return dict(self.run.load_piece(RUNTIME, judged.identity, "") or {})

    def store_score(self, score: Score) -> None:
        name = f"{score.kind}|{score.what}|{protocol_digest(score.protocol)}"
        self.run.store_result(SCORE, score.subject, name, score.to_json() | {"provenance": provenance()})

    def store_agreement(self, agreement: Agreement, text: str) -> None:
        self.run.store_result(AGREEMENT, agreement.subject, text, agreement.to_json())


def read_scores(run: Run, kind: str | None = None) -> list[Score]:
    """The scores of a run in the order they were stored, without outdated ones."""
    scores = [
        Score.from_json({name: result.value[name] for name in Score.__dataclass_fields__})
        for result in current_results(run, SCORE)
    ]
    return [score for score in scores if kind in (None, score.kind)]
