"""Times what a user notices: loading, the wait for the first token, and the speed of generation.

Artifacts take turns of a prompt or a few tokens, in a new random order each time, so that noise affects all of them;
the first round is warm-up and not counted. Ratios are taken turn by turn (`machine.py`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kl_lens.base.errors import KLLensError, TargetError, last_line
from kl_lens.base.progress import Progress
from kl_lens.base.system import processors
from kl_lens.base.units import human_bytes
from kl_lens.profiling.machine import (
    LoadMeter,
    bound_of,
    compared,
    limits_hold,
    read_bandwidth,
    spread_of,
)
from kl_lens.profiling.memory import MemoryUse, fresh_process
from kl_lens.run.folder import ALL_PLANS, Run, named_plans, provenance
from kl_lens.run.records import Profile, Quartiles, Subject
from kl_lens.run.subjects import artifact_subject
from kl_lens.targets import (
    TARGETS,
    Session,
    SessionSettings,
    Target,
    exported_places,
    locate,
    target_of,
)
from kl_lens.targets.abilities import Contents

PROTOCOL = "use"
# Timed loads of each artifact, after one that fills the file cache; one in a run.
LOADS = 3
TURN_TOKENS = 4  # tokens that an artifact generates per turn
# Memory relative to the file: expanded or repacked weights come on top of mapped ones.
MEMORY_PER_FILE_BYTE = 2.5
FREE_SHARE = 0.7  # of free memory that all sessions may use
FEWEST_ROUNDS = 2  # before an interval is believed to be narrow

Clock = Callable[[], float]


@dataclass(frozen=True)
class UseSettings:
    prompt_lengths: tuple[int, ...] = (32, 128, 512)
    new_tokens: int = 64
    repeats: int = 5  # timed rounds, at most
    runtime: SessionSettings = field(default_factory=SessionSettings)
    quick: bool = False  # too short to publish; marked in the record
    # With the ends of every speed's interval no further apart, it is enough.
    narrow: float | None = None

    @property
    def context(self) -> float:
        """Mean context of a generated token: text is generated after the longest prompt."""
        return max(self.prompt_lengths) + (self.new_tokens - 1) / 2


@dataclass(frozen=True)
class Timed:
    """One artifact, checked."""

    subject: Subject
    path: Path  # what a session opens
    target: Target
    file_bytes: int
    is_fp16: bool  # nothing is quantized: the base of ratios
    generates: bool = True  # writes text: not with a static shape

    @property
    def name(self) -> str:
        return self.subject.label


@dataclass
class Report:
    """The results of one benchmark."""

    bandwidth: float = 0.0  # bytes per second that this machine reads from memory
    profiles: list[Profile] = field(default_factory=list)
    # Artifact → why it could not be benchmarked.
    failures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Player:
    """One artifact in one round: every prompt from scratch, then greedy text after the longest."""

    def __init__(self, session: Session, clock: Clock = time.perf_counter) -> None:
        self.session = session
        self._clock = clock
        self._token = 0
        self._prompts: dict[int, float] = {}  # tokens → seconds
        self._text: list[list[float]] = []  # seconds per token, by turn

    def read(self, length: int) -> None:
        """Times a random prompt, the same for all artifacts, up to the choice of the first token."""
        random = np.random.default_rng(0)
        prompt = random.integers(0, self.session.vocabulary, length).tolist()
        self.session.reset()
        started = self._clock()
        self._token = int(self.session.prefill(prompt).argmax())
        self._prompts[length] = self._clock() - started

    def write(self, tokens: int) -> None:
        """Times some tokens. The first is not counted if there are others: the caches still hold another artifact's
        weights."""
        times = []
        for _ in range(tokens):
            started = self._clock()
            self._token = int(self.session.step(self._token).argmax())
            times.append(self._clock() - started)
        self._text.append(times[1:] or times)

    @property
    def timings(self) -> dict[str, float]:
        """The timings of the round; text as the mean over all tokens."""
        token = float(np.mean(np.concatenate(self._text)))
        prompts = {
            f"first_token_seconds@{length}": seconds
            for length, seconds in self._prompts.items()
        }
        return prompts | {"seconds_per_token": token, "tokens_per_second": 1 / token}

    @property
    def turns(self) -> dict[str, list[float]]:
        """Seconds of every turn by the names of the timings, for ratios: of a prompt, or of the fastest token."""
        text = [min(turn) for turn in self._text]
        return {
            name: [seconds] if "@" in name else text
            for name, seconds in self.timings.items()
        }


Act = tuple[Callable[[Player, int], None], int]  # with how many tokens


def acts_of(settings: UseSettings) -> list[Act]:
    """The turns of every artifact in a round; artifacts alternate between turns."""
    acts: list[Act] = [(Player.read, n) for n in sorted(settings.prompt_lengths)]
    for start in range(0, settings.new_tokens, TURN_TOKENS):
        acts.append((Player.write, min(TURN_TOKENS, settings.new_tokens - start)))
    return acts


@dataclass
class _Record:
    """The measurements of one subject so far."""

    memory: MemoryUse
    contents: Contents | None
    loads: list[float] = field(default_factory=list)
    rounds: list[Player] = field(default_factory=list)

    def ratios_to(self, base: _Record) -> dict[str, Quartiles]:
        """Ratios by the names of the timings, if they have an interval; the base itself is 1."""
        if self is base:
            equal = Quartiles(1.0, 1.0, 1.0, len(self.rounds))
            return dict.fromkeys(self.rounds[0].timings, equal)
        ratios = {
            name: compared(self.turns(name), base.turns(name))
            for name in self.rounds[0].timings
        }
        return {name: ratio for name, ratio in ratios.items() if ratio is not None}

    def turns(self, timing: str) -> list[float]:
        return [seconds for player in self.rounds for seconds in player.turns[timing]]


class InUse:
    """Times loading, the first token and text generation of artifacts that take turns."""

    def __init__(
        self,
        settings: UseSettings,
        run: Run | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`run`: stores the profiles; None: they are not stored."""
        self._settings = settings
        self._run = run
        self._progress = progress or Progress()

    def measure(self, paths: Sequence[Path]) -> Report:
        """Benchmarks artifacts; those that fail are listed in the report. Raises TargetError if all fail."""
        return self.time(*opened(paths, self._run, self._settings.runtime))

    def time(self, subjects: Sequence[Timed], report: Report) -> Report:
        """Times those that can generate text. A subject that fails is left out from then on."""
        report.notes += [
            f"{subject.name} cannot generate text (static shape); time it with OpenVINO's benchmark_app"
            for subject in subjects
            if not subject.generates
        ]
        self._report = report
        self._alive = [subject for subject in subjects if subject.generates]
        self._progress.started(len(self._alive) * (2 + self._settings.repeats + 1), 0)
        self._records: dict[str, _Record] = {}
        need = int(sum(s.file_bytes for s in self._alive) * MEMORY_PER_FILE_BYTE)
        free = psutil.virtual_memory().available
        fits = need < FREE_SHARE * free
        during = "loading it in a fresh process"
        runtime = self._settings.runtime
        # Nothing is timed yet, so several at once.
        with ThreadPoolExecutor(processors() if fits else 1) as pool:
            memory = {
                s.name: pool.submit(fresh_process, s.path, s.target.name, runtime)
                for s in self._alive
            }
            for subject in [*self._alive]:
                with self._leaving_out(subject, during):
                    used = memory[subject.name].result()
                    contents = subject.target.contents(subject.path)
                    self._records[subject.name] = _Record(used, contents)
                self._progress.advanced(1, f"{subject.name}, {during}")
        self._interleaving = f"all loaded at once, taking turns of {TURN_TOKENS} tokens"
        groups = [[*self._alive]]
        if not fits:
            sizes = f"{human_bytes(need)}, {human_bytes(free)} are free"
            self._interleaving = f"one after the other: together they need {sizes}"
            groups = [[subject] for subject in self._alive]
        self._meter = LoadMeter()
        for group in groups:
            self._play(group)
        return report

    def _finished(self, profile: Profile) -> None:
        self._report.profiles.append(profile)
        if self._run is not None:
            quick = "|quick" if self._settings.quick else ""
            name = f"{profile.protocol}|{profile.device}{quick}"
            value = profile.to_json() | {"provenance": provenance()}
            self._run.store_result("profile", profile.subject, name, value)

    @contextmanager
    def _leaving_out(self, subject: Timed, during: str) -> Iterator[None]:
        """Reports an error, and goes on without the artifact."""
        try:
            yield
        except (KLLensError, RuntimeError, OSError) as error:
            reason = last_line(error)
            if str(subject.path) not in reason:
                reason = f"{subject.path}: {reason}"
            self._report.failures[subject.name] = f"{reason} (while {during})"
            self._alive.remove(subject)

    def _play(self, group: Sequence[Timed]) -> None:
        """All rounds of artifacts that are open at the same time."""
        sessions: dict[str, Session] = {}
        during = "timing its loading"
        with ExitStack() as stack:
            for subject in group:
                if subject in self._alive:
                    with self._leaving_out(subject, during):
                        session = self._loaded(subject)
                        sessions[subject.name] = stack.enter_context(closing(session))
                self._progress.advanced(1, f"{subject.name}, {during}")
            for number in range(self._settings.repeats + 1):
                profiles = self._round(number, group, sessions)
                if number >= FEWEST_ROUNDS and self._is_narrow(profiles):
                    break
            for profile in profiles:
                self._finished(profile)

    def _loaded(self, subject: Timed) -> Session:
        """The last of several timed loads."""
        loads = LOADS if self._settings.narrow is None else 1
        for number in range(loads + 1):
            started = time.perf_counter()
            session = subject.target.open(subject.path, self._settings.runtime)
            seconds = time.perf_counter() - started
            if number:
                self._records[subject.name].loads.append(seconds)
            if number < loads:
                session.close()
        return session

    def _round(
        self, number: int, group: Sequence[Timed], sessions: Mapping[str, Session]
    ) -> list[Profile]:
        """One turn of everything for each artifact; the profiles so far. Round 0 warms up."""
        settings = self._settings
        during = f"round {number} of {settings.repeats}" if number else "warming up"
        players = {name: Player(session) for name, session in sessions.items()}
        order = random.Random(number)
        acts = acts_of(settings)
        if not number:
            acts = acts[: len(settings.prompt_lengths) + 1]
        for act, tokens in acts:
            for subject in order.sample(group, len(group)):
                if subject in self._alive:
                    with self._leaving_out(subject, during):
                        act(players[subject.name], tokens)
        for subject in group:
            if number and subject in self._alive:
                self._records[subject.name].rounds.append(players[subject.name])
            self._progress.advanced(1, f"{subject.name}, {during}")
        return [self._profile(s) for s in group if number and s in self._alive]

    def _is_narrow(self, profiles: Sequence[Profile]) -> bool:
        """Whether further rounds would say nothing new about the speeds."""
        most = self._settings.narrow
        if most is None:
            return False
        ratios = [profile.ratios.get("tokens_per_second") for profile in profiles]
        return all(ratio and ratio.high <= most * ratio.low for ratio in ratios)

    def _profile(self, subject: Timed) -> Profile:
        settings = self._settings
        record = self._records[subject.name]
        base = base_of(subject, [s for s in self._alive if self._records[s.name].rounds])
        timings = {"load_seconds": spread_of(record.loads)}
        rounds = [player.timings for player in record.rounds]
        runtime = record.rounds[-1].session.description
        for name in rounds[0]:
            timings[name] = spread_of([values[name] for values in rounds])
        threads = _threads(runtime, settings.runtime.threads)
        load = self._meter.read()
        bound = dict[str, float]()
        if limits_hold(str(runtime.get("device", ""))):
            load["asked"] = threads / processors()
            bandwidth = self._report.bandwidth
            speed = timings["tokens_per_second"].median
            if record.contents is not None:
                bound = bound_of(record.contents, bandwidth, settings.context, speed)
        return Profile(
            subject=subject.subject,
            protocol=PROTOCOL,
            device=settings.runtime.label,
            threads=threads,
            timings=timings,
            ratios=record.ratios_to(self._records[base.name]),
            peak_memory_bytes=record.memory.peak_bytes,
            file_bytes=subject.file_bytes,
            bound=bound,
            settings={
                "prompt_lengths": list(settings.prompt_lengths),
                "new_tokens": settings.new_tokens,
                "generated_after": max(settings.prompt_lengths),
                "repeats": len(record.rounds),
                "quick": settings.quick,
                "interleaving": self._interleaving,
                "ratios_to": base.name,
                "ratios_to_fp16": base.is_fp16,
                "memory": record.memory.to_json()
                | {"model_bytes": record.memory.model_bytes},
            },
            runtime=runtime,
            load=load,
        )


def _threads(runtime: Mapping[str, Any], requested: int | None) -> int:
    """The number of threads the runtime reports; otherwise the requested one, or all processors."""
    for key in ("threads", "inference_num_threads"):
        text = str(runtime.get(key, ""))
        if text.isdigit() and int(text) > 0:
            return int(text)
    return requested or processors()


def opened(
    paths: Sequence[Path], run: Run | None, runtime: SessionSettings
) -> tuple[list[Timed], Report]:
    """The artifacts that can be timed, those in FP16 first in each target, and a report that lists the others. Raises
    TargetError if there is none."""
    exports = exported_places(run).items() if run else ()
    order = list(TARGETS)
    exported = {folder.resolve(): key for key, folder in exports}
    report = Report()
    usable = list[Timed]()
    for path in paths:
        try:
            subject = read_timed(path, exported)
        except KLLensError as error:
            name = "/".join(exported.get(path.resolve(), (str(path),)))
            report.failures[name] = str(error)
            continue
        try:
            subject.target.check_device(runtime)
        except TargetError as error:
            report.notes.append(f"{subject.name} left out: {error}")
        else:
            usable.append(subject)
    if not usable:  # measuring the machine takes seconds, so check first
        raise TargetError("; ".join([*report.failures.values(), *report.notes]))
    usable.sort(key=lambda s: (order.index(s.target.name), not s.is_fp16))
    report.bandwidth = read_bandwidth()
    return usable, report


def base_of(subject: Timed, subjects: Sequence[Timed]) -> Timed:
    """The base of ratios: the FP16 subject of the same target, else its first one."""
    similar = [s for s in subjects if s.target is subject.target]
    return next((s for s in similar if s.is_fp16), similar[0])


def read_timed(
    path: Path, exported: Mapping[Path, tuple[str, str]] | None = None
) -> Timed:
    """Raises TargetError if the artifact is missing or damaged. `exported`: the run's folders → (target, plan)."""
    path, artifact = locate(path)
    target = target_of(path)
    plan = (exported or {}).get(path.resolve(), ("", None))[1]
    subject = artifact_subject(path, artifact, target.name, plan)
    generates = artifact is None or not artifact.settings.get("static_tokens")
    size = target.loaded_bytes(path)
    return Timed(subject, path, target, size, target.is_all_floating(path), generates)


def run_places(
    run: Run, *, plans: str = ALL_PLANS, targets: Sequence[str] = tuple(TARGETS)
) -> list[Path]:
    """The exported folders of a run."""
    folders = exported_places(run)
    names = named_plans(plans)
    chosen = [
        folder
        for (target, plan), folder in folders.items()
        if target in targets and (names is None or plan in names)
    ]
    if not chosen:
        lack = "nothing" if names is None else f"no plan {plans!r}"
        option = "" if names is None else f" --plan {plans}"
        present = ", ".join(sorted("/".join(key) for key in folders))
        raise TargetError(
            f"{run.folder} has {lack} for {' or '.join(targets)}{present and f'; it has {present}'}; "
            f"export with: kl-lens export --run {run.folder} --target {targets[0]}{option}"
        )
    return chosen
