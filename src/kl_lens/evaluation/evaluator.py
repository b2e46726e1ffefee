"""Scores many subjects on a text; continues if one of them fails."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kl_lens.base.errors import KLLensError, TargetError, UnlearntError, one_line
from kl_lens.evaluation import agreement as rule
from kl_lens.evaluation.agreement import Agreement
from kl_lens.evaluation.journal import RUNTIME, WINDOW, ScoreJournal
from kl_lens.evaluation.judged import RUNTIME_ERRORS, Judged, JudgedArtifact, JudgedModel
from kl_lens.evaluation.scoring import (
    LIKELIHOOD_VALUES,
    WindowScore,
    divergence_values,
    position_values,
    score_logits,
)
from kl_lens.evaluation.side_by_side import SideBySide, lanes_for
from kl_lens.evaluation.texts import EvaluationText
from kl_lens.measuring.sweep import Progress
from kl_lens.model import LoadedModel
from kl_lens.run.folder import Run
from kl_lens.run.records import Score, Subject
from kl_lens.targets.session import Logits, Session

_MANY_COLUMNS, _FLOAT_BYTES = 160_000, 4  # assumed vocabulary if no model is given
_CHECKED = 512  # ids of a window: transformers' own scans are slow
_IN_TORCH = 0.5  # of the time that a runtime takes for a window, roughly
_NOT_COMPARED = "not compared with PyTorch: {}"


@dataclass
class Outcome:
    """Scores, comparisons and failures."""

    scores: list[Score] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # label → why it failed

    def add(self, other: Outcome) -> None:
        self.scores += other.scores
        self.agreements += other.agreements
        self.failures |= other.failures


class Evaluator:
    """Perplexity and KL of subjects, stored in a journal.

    Args:
        journal: stores every window as soon as it is done.
        original: the original model: teacher of every KL and base of every change. Without it there are only
            perplexities.

    Example:
        >>> outcome = Evaluator(ScoreJournal(run), JudgedModel(model)).judge_text(subjects, text)
    """

    def __init__(
        self, journal: ScoreJournal, original: JudgedModel | None = None, progress: Progress | None = None
    ) -> None:
        self.journal = journal
        self.original = original
        self.progress = progress or Progress()
        self._teacher: Session | None = None
        self._exact: dict[str, JudgedArtifact | None] = {}  # by identity, because a file's digest takes time

    @property
    def model(self) -> LoadedModel | None:
        return None if self.original is None else self.original.model

    def judge_text(
        self,
        subjects: Sequence[Judged],
        text: EvaluationText,
        *,
        perplexity: bool = True,
        divergence: bool = True,
        positions: bool = False,
    ) -> Outcome:
        """Scores of all subjects on one text, and a comparison of each artifact with its PyTorch counterpart.

        `positions`: cross-entropy and KL by position, in place of the other scores.
        Subjects with damaged or missing files are named in `failures`; the others are still scored.
        """
        if divergence and self.original is None:
            flag = "--positions" if positions else "--divergence"
            raise KLLensError(f"{flag} needs the original model: give --run or --model")
        outcome = Outcome()
        order = ([] if self.original is None else [self.original]) + [
            s for s in subjects if s is not self.original
        ]
        files = [judged for judged in order if isinstance(judged, JudgedArtifact)]
        compared = 0 if self.model is None else len(dict.fromkeys(file.identity for file in files))
        work = _IN_TORCH * compared * text.first(rule.WINDOWS).targets
        self.progress = self.progress.as_one(work + _work(order, text))
        self._say_how_much(order, text, divergence)
        if self.original is not None:  # all others are compared with it
            self._windows(self.original, text, divergence=False)
        self._side_by_side(files, text, divergence)
        windows: dict[str, list[WindowScore]] = {}  # by identity
        for judged in order:
            try:
                scores = self._windows(judged, text, divergence and judged is not self.original)
            except RUNTIME_ERRORS as error:
                if isinstance(judged, JudgedModel):
                    raise
                outcome.failures[judged.label] = one_line(error)
                continue
            windows[judged.identity] = scores
            outcome.scores += self._scores(judged, text, scores, windows, perplexity, divergence, positions)
        files = [judged for judged in files if judged.identity in windows]
        self._compare(files, text, windows, {j.identity: j.subject for j in order}, divergence, outcome)
        if any(a.verdict == rule.DISAGREES for a in outcome.agreements) and not self._kernels_hold(text):
            self.close()
            self.journal.forget()
            return self.judge_text(
                subjects, text, perplexity=perplexity, divergence=divergence, positions=positions
            )
        return outcome

    def _kernels_hold(self, text: EvaluationText) -> bool:
        """Whether PyTorch's side is right: our kernels beside transformers' own code, on this text. If they are wrong,
        they are not used again."""
        assert self.model is not None
        chain = self.model.chain
        if not chain.fast:
            return True
        chain.distrust(chain.compared_kernels(torch.tensor([text.items[0].ids[:_CHECKED]])))
        return chain.fast

    def close(self) -> None:
        if self._teacher is not None:
            self._teacher.close()
            self._teacher = None

    def _known(self, judged: Judged, text: EvaluationText, divergence: bool) -> dict[int, WindowScore]:
        scores = {}
        for index, item in enumerate(text.items):
            score = self.journal.window(judged, item, divergence=divergence)
            if score is not None:
                scores[index] = score
        return scores

    def _say_how_much(self, every: Sequence[Judged], text: EvaluationText, divergence: bool) -> None:
        """Tells the progress display what comes now, and how much of it the journal has."""
        single = {judged.identity: judged for judged in every}.values()
        known = [(j, self._known(j, text, divergence and j is not self.original).values()) for j in single]
        done = sum(_weight(judged) * window.targets for judged, windows in known for window in windows)
        self.progress.started(_work(every, text), done)

    def _side_by_side(self, files: Sequence[JudgedArtifact], text: EvaluationText, divergence: bool) -> None:
        """Runs several files at once and stores their scores; `_windows` computes what is still missing."""
        every, missing, turns = range(len(text.items)), {}, Counter[str]()

        def turn(judged: JudgedArtifact) -> int:
            """Runtimes take turns: one is slower than another, and the forecast goes by what has passed."""
            turns[judged.target.name] += 1
            return turns[judged.target.name]

        single = {judged.identity: judged for judged in files}.values()  # two may be the same file
        for judged in sorted(single, key=turn):
            known = self._known(judged, text, divergence)
            if len(known) < len(every):
                missing[judged] = [index for index in every if index not in known]
        if len(missing) < 2:
            return
        longest = max(len(item.ids) for item in text.items)
        columns = _MANY_COLUMNS if self.original is None else self._teacher_session().vocabulary
        lanes, suitable = lanes_for(list(missing), longest * columns * _FLOAT_BYTES)
        lane = SideBySide({judged: missing[judged] for judged in suitable}, text, lanes)
        for item in lane:
            try:
                score = self.score_window(item.logits, text, item.window, divergence, item.seconds)
            except RUNTIME_ERRORS:
                lane.drop(item.judged)  # it fails again on its own, and is reported then
                continue
            self.journal.store(RUNTIME, item.judged, "", item.runtime)
            self._keep(item.judged, score, text, item.window)

    def _windows(self, judged: Judged, text: EvaluationText, divergence: bool) -> list[WindowScore]:
        """The scores of all windows: from the journal, or computed now."""
        scores = self._known(judged, text, divergence)
        missing = [index for index in range(len(text.items)) if index not in scores]
        if missing:
            judged.check()
            session = self._teacher_session() if judged is self.original else judged.open()
            try:
                self.journal.store(RUNTIME, judged, "", session.description)
                for index in missing:
                    begin = time.perf_counter()
                    logits = session.logits(text.items[index].ids)
                    seconds = time.perf_counter() - begin
                    # A file that was deleted or changed may still be mapped in part: discard its numbers.
                    judged.check()
                    scores[index] = self.score_window(logits, text, index, divergence, seconds)
                    self._keep(judged, scores[index], text, index)
            finally:
                if session is not self._teacher:
                    session.close()
        return [scores[index] for index in range(len(text.items))]

    def score_window(
        self, logits: Logits, text: EvaluationText, index: int, divergence: bool, seconds: float
    ) -> WindowScore:
        """`seconds`: time for the logits."""
        item, begin = text.items[index], time.perf_counter()
        teacher = self._teacher_session().logits(item.ids) if divergence else None
        score = score_logits(logits, item, teacher)
        return replace(score, seconds=seconds + time.perf_counter() - begin)

    def _keep(self, judged: Judged, score: WindowScore, text: EvaluationText, index: int) -> None:
        item = text.items[index]
        self.journal.store(WINDOW, judged, item.key, score.to_json())
        self.progress.advanced(_weight(judged) * item.targets, f"{judged.label}, window {index + 1}")

    def _teacher_session(self) -> Session:
        assert self.original is not None
        if self._teacher is None:
            self._teacher = self.original.open()
        return self._teacher

    def _scores(
        self,
        judged: Judged,
        text: EvaluationText,
        scores: Sequence[WindowScore],
        windows: dict[str, list[WindowScore]],
        perplexity: bool,
        divergence: bool,
        positions: bool,
    ) -> list[Score]:
        runtime = self.journal.runtime(judged)
        made: list[Score] = []

        def add(kind: str, values: dict[str, Any]) -> None:
            score = Score(
                subject=judged.subject,
                kind=kind,
                what=text.label,
                values=values,
                tokens=text.targets,
                protocol=dict(text.protocol),
                runtime=runtime,
                seconds=sum(s.seconds for s in scores),
            )
            self.journal.store_score(score)
            made.append(score)

        if positions:
            add("positions", position_values(scores, divergence=judged is not self.original))
            return made
        if perplexity:
            others = self.original is not None and judged is not self.original
            base = windows[self.original.identity] if others and self.original is not None else None
            add("perplexity", LIKELIHOOD_VALUES[text.task](scores, base))
        if divergence and judged is not self.original:
            add("divergence", divergence_values(scores))
        return made

    def _compare(
        self,
        files: Sequence[JudgedArtifact],
        text: EvaluationText,
        windows: Mapping[str, list[WindowScore]],
        subjects: Mapping[str, Subject],
        divergence: bool,
        outcome: Outcome,
    ) -> None:
        """Files with the same weights in PyTorch, on the first windows. `windows` and `subjects`: of everything scored,
        by identity."""
        few = text.first(rule.WINDOWS)
        plain: dict[JudgedArtifact, JudgedModel] = {}
        # With the runtime's activations, where they are modelled.
        nearest: dict[JudgedArtifact, JudgedModel] = {}
        for judged in files:
            try:
                counterpart = None if self.model is None else judged.counterpart(self.model)
            except UnlearntError:  # its weights cannot be made here; `Selection` has said so
                continue
            except RUNTIME_ERRORS as error:
                outcome.failures[judged.label] = _NOT_COMPARED.format(one_line(error))
                continue
            if counterpart is not None and self.model is not None:
                plain[judged], nearest[judged] = counterpart, judged.emulated(self.model) or counterpart
        if not plain:
            return
        self._say_how_much([*nearest.values()], few, divergence)
        found = {judged: self._windows(other, few, divergence) for judged, other in nearest.items()}
        ours = {judged: windows[judged.identity][: len(few.items)] for judged in found}
        doubtful = []  # in float32, so that they can run at the same time
        for judged, theirs in found.items():
            if nearest[judged] is plain[judged] and not rule.within(rule.differences(ours[judged], theirs)):
                with suppress(*RUNTIME_ERRORS):  # `_agreement` reports it
                    doubtful.append(self._in_float32(judged))
        if doubtful := [exact for exact in doubtful if exact is not None]:
            self._say_how_much(doubtful, few, divergence)
            self._side_by_side(doubtful, few, divergence)
        for judged, theirs in found.items():
            same_weights = subjects.get(plain[judged].identity, plain[judged].subject)
            others = plain[judged], nearest[judged]
            scores = ours[judged], theirs
            try:
                agreement = self._agreement(judged, few, scores, others, same_weights, divergence)
            except RUNTIME_ERRORS as error:
                outcome.failures[judged.label] = _NOT_COMPARED.format(one_line(error))
                continue
            outcome.agreements.append(agreement)
            self.journal.store_agreement(agreement, f"{text.label}|{text.digest}")

    def _agreement(
        self,
        judged: JudgedArtifact,
        text: EvaluationText,
        scores: tuple[Sequence[WindowScore], Sequence[WindowScore]],
        others: tuple[JudgedModel, JudgedModel],
        same_weights: Subject,
        divergence: bool,
    ) -> Agreement:
        """`others`: plain PyTorch, and what is nearest to the runtime. `scores`: the file's, and the latter's."""
        (ours, theirs), (plain, nearest) = scores, others
        differences = rule.differences(ours, theirs)
        verdict = rule.AGREES if nearest is plain else rule.AS_DEPLOYED
        decided_by = same_weights if nearest is plain else nearest.subject
        if not rule.within(differences) and nearest is not plain:
            theirs = self._compared_anew(judged, nearest.subject, plain, text, divergence)
            differences, decided_by, verdict = rule.differences(ours, theirs), same_weights, rule.AGREES
        if not rule.within(differences):
            verdict, exact = rule.DISAGREES, self._in_float32(judged)
            if exact is not None:
                again = self._compared_anew(judged, same_weights, exact, text, divergence)
                differences, decided_by = rule.differences(again, theirs), exact.subject
                verdict = rule.IN_FLOAT32 if rule.within(differences) else verdict
        changes = {name: change for name, (change, _) in differences.items()}
        return Agreement(judged.subject, same_weights, decided_by, text.label, verdict, changes)

    def _in_float32(self, judged: JudgedArtifact) -> JudgedArtifact | None:
        if judged.identity not in self._exact:
            self._exact[judged.identity] = judged.in_float32()
        return self._exact[judged.identity]

    def _compared_anew(
        self, judged: Judged, unlike: Subject, other: Judged, text: EvaluationText, divergence: bool
    ) -> list[WindowScore]:
        """Scores of a replacement for one side of a comparison that failed."""
        self.progress.message(f"{judged.label} differs from {unlike.label}: comparing with {other.label}")
        self._say_how_much([other], text, divergence)
        return self._windows(other, text, divergence)


def _work(every: Sequence[Judged], text: EvaluationText) -> float:
    return text.targets * sum(_weight(j) for j in {judged.identity: judged for judged in every}.values())


def _weight(judged: Judged) -> float:
    return _IN_TORCH if isinstance(judged, JudgedModel) else 1.0


def evaluate_text(judged: Judged, text: EvaluationText, original: LoadedModel | None = None) -> Score:
    """Scores one model on one text, without a run; with the original also the change and the KL."""
    with tempfile.TemporaryDirectory() as folder, Run.create(Path(folder)) as run:
        evaluator = Evaluator(ScoreJournal(run), None if original is None else JudgedModel(original))
        try:
            outcome = evaluator.judge_text([judged], text, divergence=original is not None)
        finally:
            evaluator.close()
    if outcome.failures:
        raise TargetError(f"{judged.label}: {outcome.failures[judged.label]}")
    scores = [score for score in outcome.scores if score.subject == judged.subject]
    return replace(scores[0], values={name: v for score in scores for name, v in score.values.items()})
