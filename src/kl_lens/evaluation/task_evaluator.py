"""Scores many subjects on tasks. Every example is stored, for paired drops and for resuming."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kl_lens.base.errors import one_line
from kl_lens.evaluation.evaluator import Outcome
from kl_lens.evaluation.journal import ANSWERS, EXAMPLES, RUNTIME, ScoreJournal
from kl_lens.evaluation.judged import RUNTIME_ERRORS, Judged, JudgedModel
from kl_lens.evaluation.task_data import LocalTask
from kl_lens.evaluation.tasks import TaskExamples, protocol_of, require_lm_eval, run_task, task_values
from kl_lens.evaluation.texts import protocol_digest
from kl_lens.measuring.sweep import Progress
from kl_lens.run.records import ORIGINAL, Score


class TaskEvaluator:
    """Accuracy of subjects on tasks, stored in a journal.

    Args:
        journal: stores answers, a few at a time, and scores.
        tokenizer: of the checkpoint or the artifact.
        max_length: tokens of context and continuation together.
        limit: only the first examples of each task.
        few_shot: examples in each prompt (default: the task's own number).
    """

    def __init__(
        self,
        journal: ScoreJournal,
        tokenizer: Any,
        *,
        max_length: int = 2048,
        limit: int | None = None,
        few_shot: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        require_lm_eval()
        self.journal = journal
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.limit = limit
        self.few_shot = few_shot
        self.progress = progress or Progress()

    def judge_task(self, subjects: Sequence[Judged], task: LocalTask | str) -> Outcome:
        """Scores of all subjects on one task; the original, if included, goes first."""
        outcome = Outcome()
        protocol = protocol_of(task, self.limit, self.few_shot) | {"max_length": self.max_length}
        order = sorted(subjects, key=lambda judged: judged.subject.what != ORIGINAL)
        original: dict[str, TaskExamples] = {}
        begun = False
        for position, judged in enumerate(order):

            def announce(requests: int, position: int = position) -> None:
                nonlocal begun
                if not begun:
                    self.progress.started(float(requests * len(order)), float(requests * position))
                    begun = True

            begin = time.perf_counter()
            try:
                answered = self._examples(judged, task, protocol, announce)
            except RUNTIME_ERRORS as error:
                if isinstance(judged, JudgedModel):
                    raise
                outcome.failures[judged.label] = one_line(error)
                continue
            if judged.subject.what == ORIGINAL:
                original = answered
            for examples in answered.values():
                seconds = time.perf_counter() - begin
                score = self._score(judged, examples, original.get(examples.task), protocol, seconds)
                self.journal.store_score(score)
                outcome.scores.append(score)
        return outcome

    def _examples(
        self, judged: Judged, task: LocalTask | str, protocol: dict[str, Any], announce: Any
    ) -> dict[str, TaskExamples]:
        digest = protocol_digest(protocol)
        known = self.journal.load(EXAMPLES, judged, digest)
        if known is None:
            from kl_lens.evaluation.language_model import SessionLM

            judged.check()
            session = judged.open()
            try:
                self.journal.store(RUNTIME, judged, "", session.description)
                model = SessionLM(
                    session,
                    self.tokenizer,
                    max_length=self.max_length,
                    answers=_Kept(self.journal, judged),
                    advanced=lambda count: self.progress.advanced(float(count), judged.label),
                )
                examples = run_task(model, task, limit=self.limit, few_shot=self.few_shot, requests=announce)
                judged.check()
            finally:
                session.close()
            known = [one.to_json() for one in examples]
            self.journal.store(EXAMPLES, judged, digest, known)
        return {one["task"]: TaskExamples.from_json(one) for one in known}

    def _score(
        self,
        judged: Judged,
        examples: TaskExamples,
        original: TaskExamples | None,
        protocol: Mapping[str, Any],
        seconds: float,
    ) -> Score:
        base = None if judged.subject.what == ORIGINAL else original
        return Score(
            subject=judged.subject,
            kind="task",
            what=examples.task,
            values=task_values(examples, base),
            tokens=len(next(iter(examples.metrics.values()))),
            protocol={
                **protocol,
                "few_shot": examples.few_shot,
                "version": examples.version,
                "chance": examples.chance,
            },
            runtime=self.journal.runtime(judged),
            seconds=seconds,
        )


class _Kept:
    """One subject's answers in the journal."""

    def __init__(self, journal: ScoreJournal, judged: Judged) -> None:
        self._journal = journal
        self._judged = judged

    def load(self, key: str) -> Any | None:
        return self._journal.load(ANSWERS, self._judged, key)

    def store(self, key: str, value: Any) -> None:
        self._judged.check()
        self._journal.store(ANSWERS, self._judged, key, value)
