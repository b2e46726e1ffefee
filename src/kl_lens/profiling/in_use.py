"""Times what a user notices: loading, the wait for the first token, and the speed of generation.

Artifacts take turns of a prompt or a few tokens, in a new random order each time, so that noise affects all of them;
the first round is warm-up and not counted. Ratios are taken turn by turn (`machine.py`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import psutil

from kl_lens.base.environment import processors
from kl_lens.base.errors import KLLensError
from kl_lens.base.units import human_bytes
from kl_lens.profiling.benchmark import Benchmark, Report, Timed, UseSettings, base_of
from kl_lens.profiling.machine import (
    LoadMeter,
    bound_of,
    compared,
    limits_hold,
    spread_of,
)
from kl_lens.profiling.memory import MemoryUse, fresh_process
from kl_lens.run.records import Profile, Quartiles
from kl_lens.targets import Session
from kl_lens.targets.base import Contents

PROTOCOL = "use"
# Timed loads of each artifact, after one that fills the file cache; one in a run.
LOADS = 3
TURN_TOKENS = 4  # tokens that an artifact generates per turn
# Memory relative to the file: expanded or repacked weights come on top of mapped ones.
MEMORY_PER_FILE_BYTE = 2.5
FREE_SHARE = 0.7  # of free memory that all sessions may use
FEWEST_ROUNDS = 2  # before an interval is believed to be narrow

Clock = Callable[[], float]


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
        prompt = (
            np.random.default_rng(0).integers(0, self.session.vocabulary, length).tolist()
        )
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
        each = float(np.mean([seconds for turn in self._text for seconds in turn]))
        prompts = {
            f"first_token_seconds@{length}": seconds
            for length, seconds in self._prompts.items()
        }
        return prompts | {"seconds_per_token": each, "tokens_per_second": 1 / each}

    @property
    def turns(self) -> dict[str, list[float]]:
        """Seconds of every turn by the names of the timings, for ratios: of a prompt, or of the fastest token."""
        text = [min(turn) for turn in self._text]
        return {name: [self.timings[name]] for name in self.timings if "@" in name} | {
            "seconds_per_token": text,
            "tokens_per_second": text,
        }


def acts_of(settings: UseSettings) -> list[tuple[Callable[[Player, int], None], int]]:
    """The turns of every artifact in a round; artifacts alternate between turns."""
    starts = range(0, settings.new_tokens, TURN_TOKENS)
    reading = [(Player.read, length) for length in sorted(settings.prompt_lengths)]
    return reading + [
        (Player.write, min(TURN_TOKENS, settings.new_tokens - start)) for start in starts
    ]


@dataclass
class _Record:
    """The measurements of one subject so far."""

    memory: MemoryUse
    contents: Contents | None
    loads: list[float] = field(default_factory=list)
    rounds: list[Player] = field(default_factory=list)

    def ratios_to(self, base: _Record) -> dict[str, Quartiles]:
        """Ratios by the names of the timings, if they have an interval; the base itself is 1."""
        found = {}
        for name in self.rounds[0].timings:
            ours, theirs = (
                [t for r in record.rounds for t in r.turns[name]]
                for record in (self, base)
            )
            one = Quartiles(1.0, 1.0, 1.0, len(self.rounds))
            if (spread := one if self is base else compared(ours, theirs)) is not None:
                found[name] = spread
        return found


class InUse:
    """Times loading, the first token and text generation of artifacts that take turns."""

    def measure(
        self, subjects: Sequence[Timed], benchmark: Benchmark, report: Report
    ) -> None:
        """Profiles go to the benchmark's `store` after every round, so that a stop loses one round. A subject that
        fails is left out from then on; what was stored before stays."""
        report.notes += [
            f"{subject.name} cannot generate text (static shape or no head); time it with --protocol benchmark_app"
            for subject in subjects
            if subject.signature
        ]
        self._benchmark = benchmark
        self._settings = benchmark.settings
        self._report = report
        self._alive = [subject for subject in subjects if not subject.signature]
        benchmark.started(len(self._alive) * (2 + self._settings.repeats + 1))
        self._records: dict[str, _Record] = {}
        self._profiles: dict[str, Profile] = {}
        need = int(sum(s.file_bytes for s in self._alive) * MEMORY_PER_FILE_BYTE)
        free = psutil.virtual_memory().available
        fits = need < FREE_SHARE * free
        during = "loading it in a fresh process"
        runtime = self._settings.runtime
        with ThreadPoolExecutor(
            processors() if fits else 1
        ) as several:  # nothing is timed yet
            memory = {
                s.name: several.submit(fresh_process, s.path, s.target.name, runtime)
                for s in self._alive
            }

            def examine(subject: Timed) -> None:
                used = memory[subject.name].result()
                contents = subject.target.contents(subject.path)
                self._records[subject.name] = _Record(used, contents)

            for subject in [*self._alive]:
                self._attempt(during, subject, examine)
                benchmark.advanced(f"{subject.name}, {during}")
        self._interleaving = f"all loaded at once, taking turns of {TURN_TOKENS} tokens"
        groups = [[*self._alive]]
        if not fits:
            self._interleaving = (
                f"one after the other: together they need {human_bytes(need)}, "
                f"{human_bytes(free)} are free"
            )
            groups = [[subject] for subject in self._alive]
        self._meter = LoadMeter()
        for group in groups:
            self._play(group)
        report.profiles += self._profiles.values()

    def _attempt(
        self, during: str, subject: Timed, work: Callable[[Timed], None]
    ) -> None:
        if subject in self._alive:
            try:
                work(subject)
            except (KLLensError, RuntimeError, OSError) as error:
                self._report.failed(subject, error, during)
                self._alive.remove(subject)

    def _play(self, group: Sequence[Timed]) -> None:
        """All rounds of artifacts that are open at the same time."""
        sessions: dict[str, Session] = {}

        def load(subject: Timed) -> None:
            loads = LOADS if self._settings.narrow is None else 1
            for number in range(loads + 1):
                started = time.perf_counter()
                session = subject.target.open(subject.path, self._settings.runtime)
                if number:
                    self._records[subject.name].loads.append(
                        time.perf_counter() - started
                    )
                if number < loads:
                    session.close()
            sessions[subject.name] = stack.enter_context(closing(session))

        with ExitStack() as stack:
            for subject in group:
                self._attempt("timing its loading", subject, load)
                self._benchmark.advanced(f"{subject.name}, timing its loading")
            for number in range(self._settings.repeats + 1):
                during = (
                    f"round {number} of {self._settings.repeats}"
                    if number
                    else "warming up"
                )
                players = {name: Player(session) for name, session in sessions.items()}
                order = random.Random(number)
                acts = acts_of(self._settings)
                for act, tokens in (
                    acts if number else acts[: len(self._settings.prompt_lengths) + 1]
                ):
                    for subject in order.sample(group, len(group)):
                        player = players[subject.name]
                        self._attempt(
                            during, subject, partial(_play, act, player, tokens)
                        )
                for subject in group:
                    if number and subject in self._alive:
                        self._records[subject.name].rounds.append(players[subject.name])
                    self._benchmark.advanced(f"{subject.name}, {during}")
                alive = [
                    subject for subject in group if number and subject in self._alive
                ]
                made = {subject.name: self._profile(subject) for subject in alive}
                self._profiles |= made
                last = number == self._settings.repeats or (
                    number >= FEWEST_ROUNDS and self._narrow(made)
                )
                for profile in made.values():
                    self._benchmark.store(profile, partial=not last)
                if last:
                    break

    def _narrow(self, profiles: Mapping[str, Profile]) -> bool:
        """Whether further rounds would say nothing new about the speeds."""
        ratios = [
            profile.ratios.get("tokens_per_second") for profile in profiles.values()
        ]
        most = self._settings.narrow
        return most is not None and all(
            ratio and ratio.high <= most * ratio.low for ratio in ratios
        )

    def _profile(self, subject: Timed) -> Profile:
        settings = self._settings
        record = self._records[subject.name]
        base = base_of(subject, [s for s in self._alive if self._records[s.name].rounds])
        timings = {"load_seconds": spread_of(record.loads)}
        rounds = [player.timings for player in record.rounds]
        runtime = record.rounds[-1].session.description
        timings |= {
            name: spread_of([each[name] for each in rounds]) for name in rounds[0]
        }
        threads = _threads(runtime, settings.runtime.threads)
        load = self._meter.read()
        bound = dict[str, float]()
        if limits_hold(str(runtime.get("device", ""))):
            load["asked"] = threads / processors()
            if record.contents is not None:
                speed = timings["tokens_per_second"].median
                bound = bound_of(
                    record.contents, self._report.bandwidth, settings.context, speed
                )
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


def _play(
    act: Callable[[Player, int], None], player: Player, tokens: int, _: Timed
) -> None:
    act(player, tokens)


def _threads(runtime: dict[str, Any], asked: int | None) -> int:
    """The number of threads the runtime reports; otherwise the requested one, or all processors."""
    for key in ("threads", "inference_num_threads"):
        text = str(runtime.get(key, ""))
        if text.isdigit() and int(text) > 0:
            return int(text)
    return asked or processors()
