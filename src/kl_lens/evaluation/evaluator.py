"""Scores many subjects on a text; continues if one of them fails."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from kl_lens.base.errors import KLLensError, UnlearntError, one_line
from kl_lens.evaluation import agreement as rule
from kl_lens.evaluation.agreement import Agreement
from kl_lens.evaluation.journal import RUNTIME, WINDOW, ScoreJournal
from kl_lens.evaluation.judged import RUNTIME_ERRORS, Judged, JudgedArtifact, JudgedModel
from kl_lens.evaluation.scoring import (
    WindowScore,
    divergence_values,
    likelihood_values,
    position_values,
    score_logits,
)
from kl_lens.evaluation.side_by_side import Arrived, computed, lanes_for, side_by_side
from kl_lens.evaluation.texts import EvaluationText
from kl_lens.measuring.sweep import Progress
from kl_lens.model import LoadedModel
from kl_lens.run.records import Estimate, Score, Subject
from kl_lens.targets.session import Session

PERPLEXITY, DIVERGENCE, POSITIONS = "perplexity", "divergence", "positions"  # kinds of scores
_MANY_COLUMNS, _FLOAT_BYTES = 160_000, 4  # assumed vocabulary if no model is given
_CHECKED = 512  # ids of a window: transformers' own scans are slow


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

    @property
    def model(self) -> LoadedModel | None:
        return None if self.original is None else self.original.model

    def judge_text(
        self,
        subjects: Sequence[Judged],
        text: EvaluationText,
        kinds: Collection[str] = (PERPLEXITY, DIVERGENCE),
    ) -> Outcome:
        """Scores of all subjects on one text, and a comparison of each artifact with its PyTorch counterpart.

        Subjects with damaged or missing files are named in `failures`; the others are still scored.
        """
        divergence = DIVERGENCE in kinds or POSITIONS in kinds
        if divergence and self.original is None:
            flag = POSITIONS if POSITIONS in kinds else DIVERGENCE
            raise KLLensError(f"--{flag} needs the original model: give --run or --model")
        outcome = Outcome()
        order: list[Judged] = [self.original] if self.original is not None else []
        order += [subject for subject in subjects if subject is not self.original]
        files = [judged for judged in order if isinstance(judged, JudgedArtifact)]
        compared = 0 if self.model is None else len({file.identity for file in files})
        work = _work(order, text) + compared * text.first(rule.WINDOWS).targets
        self.progress = self.progress.as_one(work)
        self._say_how_much(order, text, divergence)
        if self.original is not None:  # all others are compared with it
            self._windows(self.original, text, divergence=False)
        self._at_once(files, text, divergence)
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
            outcome.scores += self._scores(judged, text, scores, windows, kinds)
        known = {judged.identity: judged.subject for judged in order}
        for file in files:
            if self.model is not None and (scores := windows.get(file.identity, [])):
                self._compare(file, self.model, text.first(rule.WINDOWS), scores, known, divergence, outcome)
        if any(a.verdict == rule.DISAGREES for a in outcome.agreements) and not self._kernels_hold(text):
            self.close()
            self.journal.forget()
            return self.judge_text(subjects, text, kinds)
        for agreement in outcome.agreements:
            self.journal.store_agreement(agreement, f"{text.label}|{text.digest}")
        return outcome

    def _kernels_hold(self, text: EvaluationText) -> bool:
        """Whether PyTorch's side is right: our kernels beside transformers' own code, on this text. If they are wrong,
        they are not used again."""
        assert self.model is not None
        chain = self.model.chain
        if chain.fast:
            chain.distrust(chain.compared_kernels(torch.tensor([text.items[0].ids[:_CHECKED]])))
            return chain.fast
        return True

    def close(self) -> None:
        if self._teacher is not None:
            self._teacher.close()
            self._teacher = None

    # -- windows -------------------------------------------------------------------------------------------

    def _known(self, judged: Judged, text: EvaluationText, divergence: bool) -> dict[int, WindowScore]:
        found = (self.journal.window(judged, item, divergence=divergence) for item in text.items)
        return {index: score for index, score in enumerate(found) if score is not None}

    def _say_how_much(self, every: Sequence[Judged], text: EvaluationText, divergence: bool) -> None:
        """Tells the progress display what comes now, and how much of it the journal has."""
        single = {judged.identity: judged for judged in every}.values()
        known = [self._known(j, text, divergence and j is not self.original).values() for j in single]
        self.progress.started(_work(every, text), sum(w.targets for windows in known for w in windows))

    def _at_once(self, files: Sequence[JudgedArtifact], text: EvaluationText, divergence: bool) -> None:
        """Runs several files at once and stores their scores; `_windows` computes what is still missing."""
        missing = {}
        for judged in {judged.identity: judged for judged in files}.values():  # two may be the same file
            known = self._known(judged, text, divergence)
            if left := [index for index in range(len(text.items)) if index not in known]:
                missing[judged] = left
        longest = max(len(item.ids) for item in text.items)
        columns = _MANY_COLUMNS if self.original is None else self._teacher_session().vocabulary
        lanes, suitable = lanes_for(list(missing), longest * columns * _FLOAT_BYTES)
        failed: set[Judged] = set()  # they fail again on their own, and are reported then
        for item in side_by_side({judged: missing[judged] for judged in suitable}, text, lanes):
            if item.judged not in failed:
                try:
                    self._keep(item, text, divergence)
                except RUNTIME_ERRORS:
                    failed.add(item.judged)

    def _windows(self, judged: Judged, text: EvaluationText, divergence: bool) -> list[WindowScore]:
        """The scores of all windows: from the journal, or computed now."""
        scores = self._known(judged, text, divergence)
        if missing := [index for index in range(len(text.items)) if index not in scores]:
            judged.check()
            is_teacher = judged is self.original
            with nullcontext(self._teacher_session()) if is_teacher else closing(judged.open()) as session:
                for item in computed(judged, session, text, missing):
                    scores[item.window] = self._keep(item, text, divergence)
        return [scores[index] for index in range(len(text.items))]

    def _keep(self, item: Arrived, text: EvaluationText, divergence: bool) -> WindowScore:
        """Scores a window and stores it."""
        window, begin = text.items[item.window], perf_counter()
        score = score_logits(
            item.logits, window, self._teacher_session().logits(window.ids) if divergence else None
        )
        score = replace(score, seconds=item.seconds + perf_counter() - begin)
        self.journal.store(RUNTIME, item.judged, "", item.runtime)
        self.journal.store(WINDOW, item.judged, window.key, score.to_json())
        self.progress.advanced(window.targets, f"{item.judged.label}, window {item.window + 1}")
        return score

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
        windows: Mapping[str, list[WindowScore]],
        kinds: Collection[str],
    ) -> Iterator[Score]:
        values: dict[str, dict[str, Estimate]] = {}
        base = None
        if self.original is not None and judged is not self.original:
            base = windows[self.original.identity]
        if POSITIONS in kinds:
            values[POSITIONS] = position_values(scores, divergence=base is not None)
        if PERPLEXITY in kinds:
            values[PERPLEXITY] = likelihood_values(scores, base, text.task)
        if DIVERGENCE in kinds and base is not None:
            values[DIVERGENCE] = divergence_values(scores)
        for kind, found in values.items():
            score = Score(
                subject=judged.subject,
                kind=kind,
                what=text.label,
                values=found,
                tokens=text.targets,
                protocol=dict(text.protocol),
                runtime=self.journal.runtime(judged),
                seconds=sum(s.seconds for s in scores),
            )
            self.journal.store_score(score)
            yield score

    # -- agreement -----------------------------------------------------------------------------------------

    def _compare(
        self,
        judged: JudgedArtifact,
        model: LoadedModel,
        text: EvaluationText,
        scores: Sequence[WindowScore],
        known: Mapping[str, Subject],
        divergence: bool,
        outcome: Outcome,
    ) -> None:
        """A file with the same weights in PyTorch. `scores`: its own; `known`: what was scored besides, by identity."""
        ours, theirs = scores[: len(text.items)], scores
        try:
            if (plain := judged.counterpart(model)) is None:
                return
            verdict, same_weights = rule.DISAGREES, known.get(plain.identity, plain.subject)
            for meaning, other in _sides(judged, plain):
                self._say_how_much([other], text, divergence)
                found = self._windows(other, text, divergence)
                ours, theirs = (found, theirs) if isinstance(other, JudgedArtifact) else (ours, found)
                differences = rule.differences(ours, theirs)
                decided_by = same_weights if other is plain else other.subject
                if rule.within(differences):
                    verdict = meaning
                    break
        except UnlearntError:  # its weights cannot be made here; `Selection` has said so
            return
        except RUNTIME_ERRORS as error:
            outcome.failures[judged.label] = f"not compared with PyTorch: {one_line(error)}"
            return
        changes = {name: change for name, (change, _) in differences.items()}
        outcome.agreements.append(
            Agreement(judged.subject, same_weights, decided_by, text.label, verdict, changes)
        )


def _sides(judged: JudgedArtifact, plain: JudgedModel) -> Iterator[tuple[str, Judged]]:
    """What a file is compared with until one agrees, and what that then means: PyTorch with the runtime's activations,
    PyTorch; last, the same file in float32 in place of the file."""
    if (emulated := judged.emulated(plain)) is not None:
        yield rule.AS_DEPLOYED, emulated
    yield rule.AGREES, plain
    if (exact := judged.in_float32()) is not None:
        yield rule.IN_FLOAT32, exact


def _work(every: Sequence[Judged], text: EvaluationText) -> float:
    return float(text.targets * len({judged.identity for judged in every}))
