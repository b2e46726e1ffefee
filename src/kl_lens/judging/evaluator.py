"""Scores many subjects on a text, several files at once; continues if one of them fails.

Every window is stored in the run as soon as it is done, so that an interrupted command can resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import psutil
import torch

from kl_lens.base.errors import KLLensError, UnlearntError, one_line
from kl_lens.base.progress import Progress
from kl_lens.base.system import processors
from kl_lens.judging import scoring
from kl_lens.judging.judged import RUNTIME_ERRORS, Judged, JudgedArtifact, JudgedModel
from kl_lens.judging.scoring import Agreement, position_values, score_logits
from kl_lens.judging.texts import EvaluationText, protocol_digest
from kl_lens.model import LoadedModel
from kl_lens.model.tasks import TEXT
from kl_lens.run.folder import Run, provenance
from kl_lens.run.readings import KL, Reading, divergence_values, likelihood_values
from kl_lens.run.records import Estimate, Score, Subject
from kl_lens.run.subjects import current_results, stored_record
from kl_lens.targets.session import Logits, Session

READING = "reading"
RUNTIME = "score_runtime"
ANSWERS = "task_answers"
EXAMPLES = "task_examples"
PERPLEXITY = "perplexity"
DIVERGENCE = "divergence"
POSITIONS = "positions"  # kinds of scores
_MANY_COLUMNS = 160_000
_FLOAT_BYTES = 4  # assumed vocabulary if no model is given
_CHECKED = 512  # ids of a window: transformers' own scans are slow


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
        self._again = True
        self._fresh = set()

    def load(self, kind: str, judged: Judged, name: str) -> Any | None:
        if self._again and (kind, judged.identity, name) not in self._fresh:
            return None
        return self.run.load(kind, f"{judged.identity}|{name}")

    def store(self, kind: str, judged: Judged, name: str, value: Any) -> None:
        self.run.store(kind, f"{judged.identity}|{name}", value)
        self._fresh.add((kind, judged.identity, name))

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
        self, judged: Judged, text: EvaluationText, *, divergence: bool
    ) -> dict[int, Reading]:
        """The windows that are stored with everything needed."""
        stored = (self.load(READING, judged, item.key) for item in text.items)
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

    judged: list[Judged] = field(
        default_factory=list
    )  # besides the original; PyTorch for files it stands in for
    scores: list[Score] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # label → why it failed

    def add(self, other: Outcome) -> None:
        self.judged += other.judged
        self.scores += other.scores
        self.agreements += other.agreements
        self.failures |= other.failures


class Evaluator:
    """Perplexity and KL of subjects, stored in a journal. `original`: teacher of every KL and base of every change;
    without it there are only perplexities.

    Example:
        >>> outcome = Evaluator(ScoreJournal(run), JudgedModel(model)).judge_text(subjects, text)
    """

    def __init__(
        self,
        journal: ScoreJournal,
        original: JudgedModel | None = None,
        progress: Progress | None = None,
        ahead: Callable[
            [JudgedArtifact, EvaluationText], Sequence[Arrived]
        ] = lambda file, text: (),
    ) -> None:
        """`ahead`: logits of a file that were computed before."""
        self.journal = journal
        self._ahead = ahead
        self.original = original
        self.model = None if original is None else original.model
        self.progress = progress or Progress()
        self._teacher: Session | None = None

    def judge_text(
        self,
        subjects: Sequence[Judged],
        text: EvaluationText,
        kinds: Collection[str] = (PERPLEXITY, DIVERGENCE),
        others: Sequence[JudgedArtifact] = (),
        deciding: Callable[[], Collection[str]] = tuple,
    ) -> Outcome:
        """Scores of all subjects on one text, and a comparison of each artifact with its PyTorch counterpart; without
        `kinds` only the comparison. Subjects with damaged or missing files are named in `failures`.

        `others`: files that PyTorch stands in for, if it agrees with their runtime on all files of it among the
        subjects. With its scores stored, `deciding` gives the keys of those that their runtime has to judge after all.
        """
        divergence = set(kinds) != {PERPLEXITY}
        if divergence and self.original is None:
            flag = POSITIONS if POSITIONS in kinds else DIVERGENCE
            raise KLLensError(f"--{flag} needs the original model: give --run or --model")
        order: list[Judged] = [self.original] if self.original is not None else []
        order += [subject for subject in subjects if subject is not self.original]
        files = [judged for judged in order if isinstance(judged, JudgedArtifact)]
        compared = (
            0
            if self.model is None
            else _work(files, text.first(scoring.COMPARED_WINDOWS))
        )
        self.progress = self.progress.as_one(_work([*order, *others], text) + compared)
        outcome = self._judged(order, text, kinds, divergence)
        if any(
            a.verdict == scoring.DISAGREES for a in outcome.agreements
        ) and not self._kernels_hold(text):
            self.close()
            self.journal.forget()
            return self.judge_text(subjects, text, kinds, others, deciding)
        if others:
            rest = [self._in_place_of(file, outcome.agreements) for file in others]
            instead = self._judged(rest, text, kinds, divergence)
            chosen = set(deciding())
            instead.judged = [
                judged for judged in rest if judged.subject.file_key not in chosen
            ]
            instead.scores = [
                score for score in instead.scores if score.subject.file_key not in chosen
            ]
            files = [file for file in others if file.subject.key in chosen]
            outcome.add(self._judged(files, text, kinds, divergence))
            outcome.add(instead)
        for agreement in outcome.agreements:
            name = f"{text.label}|{text.digest}"
            self.journal.run.store_result(
                "agreement", agreement.subject, name, agreement.to_json()
            )
        return outcome

    def _judged(
        self,
        order: Sequence[Judged],
        text: EvaluationText,
        kinds: Collection[str],
        divergence: bool,
    ) -> Outcome:
        outcome = Outcome([judged for judged in order if judged is not self.original])
        files = [judged for judged in order if isinstance(judged, JudgedArtifact)]
        self._say_how_much(order, text, divergence)
        # All others are compared with it.
        base = (
            None
            if self.original is None
            else self._windows(self.original, text, divergence=False)
        )
        self._at_once(files, text, divergence)
        windows: dict[str, list[Reading]] = {}  # by identity
        for judged in order:
            try:
                scores = self._windows(
                    judged, text, divergence and judged is not self.original
                )
            except RUNTIME_ERRORS as error:
                if isinstance(judged, JudgedModel):
                    raise
                outcome.failures[judged.label] = one_line(error)
                continue
            windows[judged.identity] = scores
            beside = None if judged is self.original else base
            outcome.scores += self._scores(judged, text, scores, beside, kinds)
        known = {judged.identity: judged.subject for judged in order}
        few = text.first(scoring.COMPARED_WINDOWS)
        for file in files:
            if self.model is not None and (scores := windows.get(file.identity, [])):
                self._compare(file, self.model, few, scores, known, divergence, outcome)
        return outcome

    def _in_place_of(
        self, file: JudgedArtifact, agreements: Sequence[Agreement]
    ) -> Judged:
        """PyTorch that computes as the file's runtime was seen to compute; the file itself if that is not known, or if
        every window would read the weights from disk."""
        verdicts = {
            each.verdict for each in agreements if each.subject.target == file.target.name
        }
        if self.model is None or self.model.residency is not None or len(verdicts) != 1:
            return file
        with suppress(*RUNTIME_ERRORS):  # reported when the file is compared
            if (plain := file.counterpart(self.model)) is not None:
                for meaning, other in _sides(file, plain):
                    if meaning in verdicts and isinstance(other, JudgedModel):
                        return other
        return file

    def _kernels_hold(self, text: EvaluationText) -> bool:
        """Whether PyTorch's side is right: our kernels beside transformers' own code, on this text. If they are wrong,
        they are not used again."""
        assert self.model is not None
        if not (chain := self.model.chain).fast:
            return True
        chain.distrust(
            chain.compared_kernels(torch.tensor([text.items[0].ids[:_CHECKED]]))
        )
        return chain.fast

    def close(self) -> None:
        if self._teacher is not None:
            self._teacher.close()
            self._teacher = None

    # -- windows -------------------------------------------------------------------------------------------

    def _say_how_much(
        self, every: Sequence[Judged], text: EvaluationText, divergence: bool
    ) -> None:
        """Tells the progress display what comes now, and how much of it the journal has."""
        single = {judged.identity: judged for judged in every}.values()
        known = [
            self.journal.readings(
                j, text, divergence=divergence and j is not self.original
            ).values()
            for j in single
        ]
        self.progress.started(
            _work(every, text), sum(w.targets for windows in known for w in windows)
        )

    def _at_once(
        self, files: Sequence[JudgedArtifact], text: EvaluationText, divergence: bool
    ) -> None:
        """Runs several files at once and stores their scores; `_windows` computes what is still missing."""
        missing = {}
        for judged in {
            judged.identity: judged for judged in files
        }.values():  # two may be the same file
            known = {*self.journal.readings(judged, text, divergence=divergence)}
            for item in self._ahead(judged, text) if len(known) < len(text.items) else ():
                if item.window not in known:
                    self._keep(item, text, divergence)
                    known.add(item.window)
            if left := [index for index in range(len(text.items)) if index not in known]:
                missing[judged] = left
        longest = max(len(item.ids) for item in text.items)
        columns = (
            _MANY_COLUMNS if self.original is None else self._teacher_session().vocabulary
        )
        lanes, suitable = lanes_for(list(missing), longest * columns * _FLOAT_BYTES)
        failed: set[Judged] = set()  # they fail again on their own, and are reported then
        for item in side_by_side(
            {judged: missing[judged] for judged in suitable}, text, lanes
        ):
            if item.judged not in failed:
                try:
                    self._keep(item, text, divergence)
                except RUNTIME_ERRORS:
                    failed.add(item.judged)

    def _windows(
        self, judged: Judged, text: EvaluationText, divergence: bool
    ) -> list[Reading]:
        """The scores of all windows: from the journal, or computed now."""
        scores = self.journal.readings(judged, text, divergence=divergence)
        if missing := [index for index in range(len(text.items)) if index not in scores]:
            judged.check()
            is_teacher = judged is self.original
            with (
                nullcontext(self._teacher_session())
                if is_teacher
                else closing(judged.open()) as session
            ):
                for item in computed(judged, session, text, missing):
                    scores[item.window] = self._keep(item, text, divergence)
        return [scores[index] for index in range(len(text.items))]

    def _keep(self, item: Arrived, text: EvaluationText, divergence: bool) -> Reading:
        """Scores a window and stores it."""
        window = text.items[item.window]
        begin = perf_counter()
        teacher = self._teacher_session().logits(window.ids) if divergence else None
        score = score_logits(item.logits, window, teacher, item.window)
        score = replace(score, seconds=item.seconds + perf_counter() - begin)
        self.journal.store(RUNTIME, item.judged, "", item.runtime)
        self.journal.store(READING, item.judged, window.key, score.to_json())
        self.progress.advanced(
            window.targets, f"{item.judged.label}, window {item.window + 1}"
        )
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
        scores: Sequence[Reading],
        base: Sequence[Reading] | None,
        kinds: Collection[str],
    ) -> Iterator[Score]:
        """`base`: the original's windows; None for the original itself, or without one."""
        values: dict[str, Callable[[], dict[str, Estimate]]] = {
            POSITIONS: lambda: position_values(scores, divergence=base is not None),
            PERPLEXITY: lambda: likelihood_values(scores, base, images=text.task != TEXT),
            **({} if base is None else {DIVERGENCE: lambda: divergence_values(scores)}),
        }
        for kind in (kind for kind in values if kind in kinds):
            seconds = sum(s.seconds for s in scores)
            protocol = dict(text.protocol)
            yield self.journal.score(
                judged, kind, text.label, values[kind](), text.targets, protocol, seconds
            )

    # -- agreement -----------------------------------------------------------------------------------------

    def _compare(
        self,
        judged: JudgedArtifact,
        model: LoadedModel,
        text: EvaluationText,
        scores: Sequence[Reading],
        known: Mapping[str, Subject],
        divergence: bool,
        outcome: Outcome,
    ) -> None:
        """A file with the same weights in PyTorch. `scores`: its own; `known`: what was scored besides, by identity."""
        ours = scores[: len(text.items)]
        theirs = scores
        try:
            if (plain := judged.counterpart(model)) is None:
                return
            verdict = scoring.DISAGREES
            same_weights = known.get(plain.identity, plain.subject)
            for meaning, other in _sides(judged, plain):
                self._say_how_much([other], text, divergence)
                found = self._windows(other, text, divergence)
                ours, theirs = (
                    (found, theirs)
                    if isinstance(other, JudgedArtifact)
                    else (ours, found)
                )
                differences = scoring.differences(ours, theirs)
                decided_by = same_weights if other is plain else other.subject
                if scoring.within(differences):
                    verdict = meaning
                    break
        except UnlearntError:  # its weights cannot be made here; `Selection` has said so
            return
        except RUNTIME_ERRORS as error:
            outcome.failures[judged.label] = (
                f"not compared with PyTorch: {one_line(error)}"
            )
            return
        changes = {name: change for name, (change, _) in differences.items()}
        outcome.agreements.append(
            Agreement(
                judged.subject, same_weights, decided_by, text.label, verdict, changes
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


def _work(every: Sequence[Judged], text: EvaluationText) -> float:
    return float(text.targets * len({judged.identity for judged in every}))


# -- the logits of files: of one, or of several at once ------------------------------------------------------
#
# Several run each in its own thread with a share of the processors: a small model gains little from a second core, and
# nothing while its file is opened. The number of threads changes speed only, so the results are the same as one by one.
# The threads only compute logits.

MOST = 8  # files at once
_MEMORY_PER_FILE_BYTE = 2.5  # memory of a loaded file relative to its size
_FREE_SHARE = 0.5  # of free memory to use


@dataclass(frozen=True)
class Arrived:
    judged: Judged
    window: int
    logits: Logits
    seconds: float
    runtime: dict[str, Any]


def computed(
    judged: Judged, session: Session, text: EvaluationText, windows: Sequence[int]
) -> Iterator[Arrived]:
    """The logits of one subject's windows."""
    for window in windows:
        begin = perf_counter()
        logits = session.logits(text.items[window].ids)
        seconds = perf_counter() - begin
        judged.check()  # a file that was deleted or changed may still be mapped in part: discard its numbers
        yield Arrived(judged, window, logits, seconds, session.description)


def lanes_for(
    files: Sequence[JudgedArtifact], logits_bytes: int
) -> tuple[int, list[JudgedArtifact]]:
    """How many files to run at once, and which; none if the user set threads or devices, or memory is short.
    `logits_bytes`: of a window; each lane holds two of them, the caller one more."""
    free = [
        f
        for f in files
        if f.settings.device == "CPU"
        and not (f.settings.threads or f.settings.gpu_layers)
    ]
    fewest: dict[JudgedArtifact, int | None] = {}
    for judged in free if free[1:] else ():
        with suppress(*RUNTIME_ERRORS):  # reported when it is scored alone
            judged.target.prepare()  # load its libraries here, not in several threads at once
            fewest[judged] = judged.target.fewest_threads(judged.path)
    room = _FREE_SHARE * psutil.virtual_memory().available
    for lanes in range(min(len(fewest), processors(), MOST), 1, -1):
        suitable = [
            judged
            for judged, least in fewest.items()
            if least and least <= processors() // lanes
        ]
        sizes = sorted(
            sum(path.stat().st_size for path in f.files if path.is_file())
            for f in suitable
        )
        need = (
            sum(sizes[-lanes:]) * _MEMORY_PER_FILE_BYTE + (2 * lanes + 1) * logits_bytes
        )
        if len(suitable) >= lanes and need < room:
            return lanes, suitable
    return 1, []


def side_by_side(
    missing: Mapping[JudgedArtifact, Sequence[int]], text: EvaluationText, lanes: int
) -> Iterator[Arrived]:
    """The logits of the missing windows of each file as they arrive; a file that fails is left out from then on.

    Every file gets a new thread: llama.cpp's AMX tiles do not survive OpenVINO's in the same thread
    (docs/troubleshooting.md).
    """
    waiting = list(missing)
    threads = processors() // lanes
    running: dict[
        Future[Arrived | None], tuple[ThreadPoolExecutor, Generator[Arrived]]
    ] = {}

    def of_file(judged: JudgedArtifact) -> Generator[Arrived]:
        """Runs in the file's thread, one window at a time."""
        judged.check()
        with closing(judged.open(threads)) as session:
            yield from computed(judged, session, text, missing[judged])

    try:
        while waiting or running:
            while waiting and len(running) < lanes:
                thread = ThreadPoolExecutor(1)
                logits = of_file(waiting.pop(0))
                running[thread.submit(next, logits, None)] = thread, logits
            done = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
            try:
                arrived = done.result()
            except RUNTIME_ERRORS:
                arrived = None  # reported when it is scored alone
            thread, logits = running.pop(done)
            if arrived is None:
                thread.shutdown()
            else:
                running[thread.submit(next, logits, None)] = thread, logits
                yield arrived
    finally:
        for thread, logits in running.values():
            thread.submit(logits.close)  # after the window that it computes now
            thread.shutdown()
