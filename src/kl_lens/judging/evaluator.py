"""Scores many subjects on a text, several files at once; continues if one of them fails.

Every window is stored in the run as soon as it is done, so that an interrupted command can resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import torch

from kl_lens.base.errors import KLLensError, UnlearntError, one_line
from kl_lens.base.progress import Progress
from kl_lens.base.system import DEFAULT_MEMORY
from kl_lens.judging import scoring
from kl_lens.judging.ahead import Arrived, computed, lanes_for, side_by_side
from kl_lens.judging.judged import RUNTIME_ERRORS, Judged, JudgedArtifact, JudgedModel
from kl_lens.judging.scoring import Agreement, position_values, score_logits
from kl_lens.judging.texts import EvaluationText, Window, protocol_digest
from kl_lens.model import LoadedModel
from kl_lens.model.tasks import TEXT
from kl_lens.run.folder import Run, provenance
from kl_lens.run.readings import KL, Reading, divergence_values, likelihood_values
from kl_lens.run.records import Estimate, Score, Subject
from kl_lens.run.subjects import current_results, stored_record
from kl_lens.targets.session import Session

READING = "reading"
RUNTIME = "score_runtime"
ANSWERS = "task_answers"
EXAMPLES = "task_examples"
PERPLEXITY = "perplexity"
DIVERGENCE = "divergence"
POSITIONS = "positions"  # kinds of scores
_MANY_COLUMNS = 160_000  # assumed vocabulary if no model is given
_FLOAT_BYTES = 4
_CHECKED = 512  # ids of a window: transformers' own scans are slow


class ScoreJournal:
    """Reads and writes a run's scores. Intermediate results are stored by identity, scores by subject.

    With `again`, intermediate results from earlier commands are ignored.
    """

    def __init__(self, run: Run, *, again: bool = False) -> None:
        self.run = run
        self._again = again
        self._fresh: set[tuple[str, str]] = set()

    def forget(self) -> None:
        """Ignores all intermediate results so far."""
        self._again = True
        self._fresh.clear()

    def load(self, kind: str, judged: Judged, name: str) -> Any | None:
        key = f"{judged.identity}|{name}"
        if self._again and (kind, key) not in self._fresh:
            return None
        return self.run.load(kind, key)

    def store(self, kind: str, judged: Judged, name: str, value: Any) -> None:
        key = f"{judged.identity}|{name}"
        self.run.store(kind, key, value)
        self._fresh.add((kind, key))

    def kept(
        self, kind: str, judged: Judged, name: str, compute: Callable[[], Any]
    ) -> Any:
        """What is stored, or else is computed and stored now."""
        if (value := self.load(kind, judged, name)) is None:
            value = compute()
            judged.check()
            self.store(kind, judged, name, value)
        return value

    def readings(
        self, judged: Judged, windows: Sequence[Window], *, divergence: bool
    ) -> dict[int, Reading]:
        """The windows that are stored with everything needed."""
        stored = (self.load(READING, judged, window.key) for window in windows)
        return {
            index: Reading.from_json(index, value)
            for index, value in enumerate(stored)
            if value is not None and (KL in value["arrays"] or not divergence)
        }

    def score(
        self,
        judged: Judged,
        kind: str,
        what: str,
        values: dict[str, Estimate],
        tokens: int,
        protocol: dict[str, Any],
        seconds: float,
    ) -> Score:
        """Stores a score, with the runtime that computed its windows."""
        runtime = dict(self.run.load(RUNTIME, f"{judged.identity}|") or {})
        score = Score(
            judged.subject, kind, what, values, tokens, protocol, runtime, seconds
        )
        name = f"{kind}|{what}|{protocol_digest(protocol)}"
        self.run.store_result(
            "score", judged.subject, name, score.to_json() | {"provenance": provenance()}
        )
        return score


def read_scores(run: Run, kind: str | None = None) -> list[Score]:
    """The scores of a run in the order they were stored, without outdated ones."""
    stored = current_results(run, "score")
    scores = [
        stored_record(run, "score", result.name, result.value, Score) for result in stored
    ]
    return [score for score in scores if kind in (None, score.kind)]


@dataclass
class Outcome:
    """Scores, comparisons and failures."""

    # Besides the original; PyTorch for files it stands in for.
    judged: list[Judged] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # label → why it failed

    def add(self, outcome: Outcome) -> None:
        self.judged += outcome.judged
        self.scores += outcome.scores
        self.agreements += outcome.agreements
        self.failures |= outcome.failures

    def failed(self, judged: Judged, error: Exception) -> None:
        """The others go on, unless it is PyTorch that fails."""
        if isinstance(judged, JudgedModel):
            raise error
        self.failures[judged.label] = one_line(error)


class Evaluator:
    """Perplexity and KL of subjects on one text, stored in a journal. `original`: teacher of every KL and base of every
    change; without it there are only perplexities.

    Example:
        >>> outcome = Evaluator(ScoreJournal(run), text, JudgedModel(model)).judge(subjects)
    """

    def __init__(
        self,
        journal: ScoreJournal,
        text: EvaluationText,
        original: JudgedModel | None = None,
        kinds: Collection[str] = (PERPLEXITY, DIVERGENCE),
        progress: Progress | None = None,
        memory_budget: int = DEFAULT_MEMORY,
        ahead: Callable[
            [JudgedArtifact, EvaluationText], Sequence[Arrived]
        ] = lambda file, text: (),
    ) -> None:
        """`kinds`: of scores; without any, files are only compared with PyTorch. `ahead`: logits of a file that were
        computed before."""
        self._divergence = set(kinds) != {PERPLEXITY}
        if self._divergence and original is None:
            flag = POSITIONS if POSITIONS in kinds else DIVERGENCE
            raise KLLensError(f"--{flag} needs the original model: give --run or --model")
        self.journal = journal
        self.text = text
        self.original = original
        self.progress = progress or Progress()
        self._kinds = kinds
        self._memory_budget = memory_budget
        self._ahead = ahead

    def judge(
        self,
        subjects: Sequence[Judged],
        others: Sequence[JudgedArtifact] = (),
        deciding: Callable[[], Collection[str]] = tuple,
    ) -> Outcome:
        """Scores of all subjects, and a comparison of each artifact with its PyTorch counterpart. Subjects with damaged
        or missing files are named in `failures`.

        `others`: files that PyTorch stands in for, if it agrees with their runtime on all files of it among the
        subjects. With its scores stored, `deciding` gives the keys of those that their runtime has to judge after all.
        """
        order: list[Judged] = [] if self.original is None else [self.original]
        order += [subject for subject in subjects if subject is not self.original]
        compared = [] if self.original is None else _files(order)
        self.progress = self.progress.as_one(
            _work([*order, *others], self.text.items) + _work(compared, self._first)
        )
        outcome = self._judged(order)
        verdicts = [agreement.verdict for agreement in outcome.agreements]
        if scoring.DISAGREES in verdicts and not self._kernels_hold():
            self.close()
            self.journal.forget()
            return self.judge(subjects, others, deciding)
        if others:
            substitutes = [self._in_place_of(file, outcome.agreements) for file in others]
            stand_ins = self._judged(substitutes)
            keys = set(deciding())
            stand_ins.judged = [j for j in substitutes if j.subject.file_key not in keys]
            stand_ins.scores = [
                score for score in stand_ins.scores if score.subject.file_key not in keys
            ]
            outcome.add(self._judged([f for f in others if f.subject.key in keys]))
            outcome.add(stand_ins)
        for agreement in outcome.agreements:
            name = f"{self.text.label}|{self.text.digest}"
            self.journal.run.store_result(
                "agreement", agreement.subject, name, agreement.to_json()
            )
        return outcome

    def _judged(self, order: Sequence[Judged]) -> Outcome:
        outcome = Outcome([judged for judged in order if judged is not self.original])
        files = _files(order)
        self._say_how_much(order, self.text.items)
        # All others are compared with it.
        base = None if self.original is None else self._readings(self.original)
        self._read_at_once(files)
        readings: dict[str, list[Reading]] = {}  # by identity
        for judged in order:
            try:
                windows = self._readings(judged)
            except RUNTIME_ERRORS as error:
                outcome.failed(judged, error)
                continue
            readings[judged.identity] = windows
            beside = None if judged is self.original else base
            outcome.scores += self._scores(judged, windows, beside)
        subjects = {judged.identity: judged.subject for judged in order}
        for file in files:
            if self.original is not None and file.identity in readings:
                windows = readings[file.identity]
                self._compare(file, self.original.model, windows, subjects, outcome)
        return outcome

    def _in_place_of(
        self, file: JudgedArtifact, agreements: Sequence[Agreement]
    ) -> Judged:
        """PyTorch that computes as the file's runtime was seen to compute; the file itself if that is not known, or if
        every window would read the weights from disk."""
        target = file.target.name
        verdicts = {a.verdict for a in agreements if a.subject.target == target}
        model = None if self.original is None else self.original.model
        if model is None or model.residency is not None or len(verdicts) != 1:
            return file
        with suppress(*RUNTIME_ERRORS):  # reported when the file is compared
            if (plain := file.counterpart(model)) is not None:
                for verdict, side in _sides(file, plain):
                    if verdict in verdicts and isinstance(side, JudgedModel):
                        return side
        return file

    def _kernels_hold(self) -> bool:
        """Whether PyTorch's side is right: our kernels beside transformers' own code, on this text. If they are wrong,
        they are not used again."""
        assert self.original is not None
        chain = self.original.model.chain
        if chain.fast:
            ids = torch.tensor([self.text.items[0].ids[:_CHECKED]])
            chain.distrust(chain.compared_kernels(ids))
            return chain.fast
        return True

    def close(self) -> None:
        if "_teacher" in self.__dict__:
            self.__dict__.pop("_teacher").close()

    # -- windows -------------------------------------------------------------------------------------------

    @property
    def _first(self) -> Sequence[Window]:
        """The windows on which files are compared with PyTorch."""
        return self.text.items[: scoring.COMPARED_WINDOWS]

    @cached_property
    def _teacher(self) -> Session:
        assert self.original is not None
        return self.original.open()

    def _stored(self, judged: Judged, windows: Sequence[Window]) -> dict[int, Reading]:
        divergence = self._divergence and judged is not self.original
        return self.journal.readings(judged, windows, divergence=divergence)

    def _missing(self, judged: Judged, windows: Sequence[Window]) -> dict[int, Window]:
        stored = self._stored(judged, windows)
        return {i: window for i, window in enumerate(windows) if i not in stored}

    def _say_how_much(
        self, subjects: Sequence[Judged], windows: Sequence[Window]
    ) -> None:
        """Tells the progress display what comes now, and how much of it the journal has."""
        tokens = sum(
            reading.targets
            for judged in {judged.identity: judged for judged in subjects}.values()
            for reading in self._stored(judged, windows).values()
        )
        self.progress.started(_work(subjects, windows), tokens)

    def _read_at_once(self, files: Sequence[JudgedArtifact]) -> None:
        """Runs several files at once and stores their scores; `_readings` computes what is still missing."""
        windows = self.text.items
        waiting = {}
        for judged in {file.identity: file for file in files}.values():
            missing = self._missing(judged, windows)
            for item in self._ahead(judged, self.text) if missing else ():
                if missing.pop(item.window, None):
                    self._keep(item)
            if missing:
                waiting[judged] = missing
        longest = max(len(window.ids) for window in windows)
        columns = _MANY_COLUMNS if self.original is None else self._teacher.vocabulary
        logits_bytes = longest * columns * _FLOAT_BYTES
        lanes, suitable = lanes_for([*waiting], logits_bytes, self._memory_budget)
        for item in side_by_side({judged: waiting[judged] for judged in suitable}, lanes):
            with suppress(*RUNTIME_ERRORS):  # it fails again on its own, and is reported
                self._keep(item)

    def _readings(
        self, judged: Judged, windows: Sequence[Window] | None = None
    ) -> list[Reading]:
        """All windows (or these, the first): from the journal, or computed now."""
        windows = self.text.items if windows is None else windows
        readings = self._stored(judged, windows)
        if missing := self._missing(judged, windows):
            judged.check()
            with (
                nullcontext(self._teacher)
                if judged is self.original
                else closing(judged.open())
            ) as session:
                for item in computed(judged, session, missing):
                    readings[item.window] = self._keep(item)
        return [readings[index] for index in range(len(windows))]

    def _keep(self, item: Arrived) -> Reading:
        """Scores a window and stores it."""
        window = self.text.items[item.window]
        compared = self._divergence and item.judged is not self.original
        begin = perf_counter()
        teacher = self._teacher.logits(window.ids) if compared else None
        reading = score_logits(item.logits, window, teacher, item.window)
        reading = replace(reading, seconds=item.seconds + perf_counter() - begin)
        self.journal.store(RUNTIME, item.judged, "", item.runtime)
        self.journal.store(READING, item.judged, window.key, reading.to_json())
        self.progress.advanced(
            window.targets, f"{item.judged.label}, window {item.window + 1}"
        )
        return reading

    def _scores(
        self,
        judged: Judged,
        readings: Sequence[Reading],
        base: Sequence[Reading] | None,
    ) -> Iterator[Score]:
        """`base`: the original's windows; None for the original itself, or without one."""
        text = self.text
        values = {}
        if POSITIONS in self._kinds:
            values[POSITIONS] = position_values(readings, divergence=base is not None)
        if PERPLEXITY in self._kinds:
            images = text.task != TEXT
            values[PERPLEXITY] = likelihood_values(readings, base, images=images)
        if DIVERGENCE in self._kinds and base is not None:
            values[DIVERGENCE] = divergence_values(readings)
        seconds = sum(reading.seconds for reading in readings)
        for kind, estimates in values.items():
            yield self.journal.score(
                judged,
                kind,
                text.label,
                estimates,
                text.targets,
                {**text.protocol},
                seconds,
            )

    # -- agreement -----------------------------------------------------------------------------------------

    def _compare(
        self,
        judged: JudgedArtifact,
        model: LoadedModel,
        readings: Sequence[Reading],
        subjects: Mapping[str, Subject],
        outcome: Outcome,
    ) -> None:
        """A file with the same weights in PyTorch. `readings`: its own; `subjects`: what was scored besides, by
        identity."""
        actual = readings[: len(self._first)]
        expected: Sequence[Reading] = ()
        verdict = scoring.DISAGREES
        try:
            if (plain := judged.counterpart(model)) is None:
                return
            same_weights = subjects.get(plain.identity, plain.subject)
            for meaning, side in _sides(judged, plain):
                self._say_how_much([side], self._first)
                windows = self._readings(side, self._first)
                if isinstance(side, JudgedArtifact):
                    actual = windows
                else:
                    expected = windows
                differences = scoring.differences(actual, expected)
                decided_by = same_weights if side is plain else side.subject
                if scoring.within(differences):
                    verdict = meaning
                    break
        except UnlearntError:  # its weights cannot be made here; `Selection` has said so
            return
        except RUNTIME_ERRORS as error:
            reason = f"not compared with PyTorch: {one_line(error)}"
            outcome.failures[judged.label] = reason
            return
        changes = {name: change for name, (change, _) in differences.items()}
        outcome.agreements.append(
            Agreement(
                judged.subject,
                same_weights,
                decided_by,
                self.text.label,
                verdict,
                changes,
            )
        )


def _sides(judged: JudgedArtifact, plain: JudgedModel) -> Iterator[tuple[str, Judged]]:
    """What a file is compared with until one agrees, and what that then means: PyTorch with the runtime's activations,
    PyTorch; last, the same file in float32 in place of the file."""
    if (emulated := judged.emulated(plain)) is not None:
        yield scoring.AS_DEPLOYED, emulated
    yield scoring.AGREES, plain
    if (exact := judged.in_float32()) is not None:
        yield scoring.IN_FLOAT32, exact


def _files(subjects: Sequence[Judged]) -> list[JudgedArtifact]:
    return [judged for judged in subjects if isinstance(judged, JudgedArtifact)]


def _work(subjects: Sequence[Judged], windows: Sequence[Window]) -> float:
    tokens = sum(window.targets for window in windows)
    return float(tokens * len({judged.identity for judged in subjects}))
