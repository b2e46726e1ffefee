"""Times what a user notices: loading, the wait for the first token, and the speed of generation.

Artifacts take turns of a prompt or a few tokens, in a new random order each time, so that noise affects all of them;
the first round is warm-up and not counted. Ratios are taken turn by turn (`spread.py`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil

from kl_lens.base.environment import processors
from kl_lens.base.errors import KLLensError, last_line
from kl_lens.base.units import human_bytes
from kl_lens.profiling.bound import decode_bound, limits_hold, prefill_bound
from kl_lens.profiling.fresh import fresh_process
from kl_lens.profiling.machine import LoadMeter, Machine
from kl_lens.profiling.memory import MemoryUse
from kl_lens.profiling.spread import compared, spread_of, spreads
from kl_lens.profiling.subjects import Failure, Timed, Timings, base_of
from kl_lens.run.records import Profile, Quartiles
from kl_lens.targets import Session, SessionSettings
from kl_lens.targets.contents import Contents

PROTOCOL = "use"
LOADS = (
    3  # timed loads of each artifact, after one that fills the file cache and the cache of compiled graphs
)
TURN_TOKENS = 4  # tokens that an artifact generates per turn
# Memory relative to the file: expanded or repacked weights come on top of mapped ones.
MEMORY_PER_FILE_BYTE = 2.5
FREE_SHARE = 0.7  # of free memory that all sessions may use

Clock = Callable[[], float]


@dataclass(frozen=True)
class UseSettings:
    prompt_lengths: tuple[int, ...] = (32, 128, 512)
    new_tokens: int = 64
    repeats: int = 5
    device: str = "CPU"
    threads: int | None = None
    gpu_layers: int = 0
    load: str = "auto"
    quick: bool = False

    @property
    def runtime(self) -> SessionSettings:
        return SessionSettings(self.device, self.threads, self.gpu_layers, load=self.load)

    @property
    def context(self) -> float:
        """Mean context of a generated token: text is generated after the longest prompt."""
        return max(self.prompt_lengths) + (self.new_tokens - 1) / 2


class Player:
    """One artifact in one round: every prompt from scratch, then greedy text after the longest."""

    def __init__(self, session: Session, clock: Clock = time.perf_counter) -> None:
        self.session, self._clock = session, clock
        self._token = 0
        self._prompts: dict[int, float] = {}  # tokens → seconds
        self._text: list[list[float]] = []  # seconds per token, by turn

    def read(self, length: int) -> None:
        """Times a prompt up to the choice of the first token."""
        (prompt,) = prompts_for(self.session.vocabulary, (length,))
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
        timings: dict[str, float] = {}
        for length, seconds in self._prompts.items():
            timings[f"first_token_seconds@{length}"] = seconds
            timings[f"prefill_tokens_per_second@{length}"] = length / seconds
        each = float(np.mean([seconds for turn in self._text for seconds in turn]))
        return timings | {"seconds_per_token": each, "tokens_per_second": 1 / each}

    @property
    def turns(self) -> dict[str, list[float]]:
        """Seconds of every turn, for ratios: of a prompt, or of the fastest token."""
        prompts = {f"@{length}": [seconds] for length, seconds in self._prompts.items()}
        return prompts | {"": [min(turn) for turn in self._text]}


def acts_of(settings: UseSettings) -> list[tuple[Callable[[Player, int], None], int]]:
    """The turns of every artifact in a round; artifacts alternate between turns."""
    starts = range(0, settings.new_tokens, TURN_TOKENS)
    reading = [(Player.read, length) for length in sorted(settings.prompt_lengths)]
    return reading + [(Player.write, min(TURN_TOKENS, settings.new_tokens - start)) for start in starts]


def prompts_for(vocabulary: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts, the same for all artifacts."""
    random = np.random.default_rng(0)
    return [random.integers(0, vocabulary, length).tolist() for length in lengths]


class Sessions:
    """The sessions of all subjects: kept open if memory allows, otherwise opened for each round."""

    def __init__(self, subjects: Sequence[Timed], settings: UseSettings) -> None:
        self._settings = settings
        need = int(sum(s.file_bytes for s in subjects) * MEMORY_PER_FILE_BYTE)
        free = psutil.virtual_memory().available
        self.resident = need < FREE_SHARE * free
        self.description = (
            f"all loaded at once, taking turns of {TURN_TOKENS} tokens"
            if self.resident
            else f"loaded again for each round, one at a time: together they need {human_bytes(need)}, "
            f"{human_bytes(free)} are free"
        )
        self._open: dict[str, Session] = {}

    def load(self, subject: Timed) -> Session:
        return subject.target.open(subject.path, self._settings.runtime)

    @contextmanager
    def borrow(self, subject: Timed) -> Iterator[Session]:
        session = self._open.get(subject.name)
        if session is None:
            session = self.load(subject)
            if self.resident:
                self._open[subject.name] = session
        try:
            yield session
        finally:
            if not self.resident:
                session.close()

    def close(self) -> None:
        for session in self._open.values():
            session.close()
        self._open.clear()


@dataclass
class _Record:
    """The measurements of one subject so far."""

    memory: MemoryUse
    contents: Contents | None
    loads: list[float] = field(default_factory=list)
    rounds: list[dict[str, float]] = field(default_factory=list)
    turns: dict[str, list[float]] = field(default_factory=dict)  # of all rounds, for ratios
    runtime: dict[str, Any] = field(default_factory=dict)

    def add(self, player: Player, *, counts: bool) -> None:
        self.runtime = player.session.description
        if counts:
            self.rounds.append(player.timings)
            for name, seconds in player.turns.items():
                self.turns.setdefault(name, []).extend(seconds)


def runnable(subjects: Sequence[Timed]) -> list[Timed]:
    """The subjects that can generate text."""
    return [s for s in subjects if s.static_tokens is None and s.with_head]


def steps_of(subjects: Sequence[Timed], settings: UseSettings) -> int:
    """How many times `advanced` will be called."""
    return len(subjects) * (2 + settings.repeats + 1)


def benchmark_use(
    subjects: Sequence[Timed],
    settings: UseSettings,
    machine: Machine,
    *,
    store: Callable[[Profile, bool], None] = lambda profile, partial: None,
    advanced: Callable[[str], None] = lambda what: None,
) -> Timings:
    """Profiles of all subjects.

    `store` gets the profiles after every round, so that a stop loses one round. A subject that fails is left out from
    then on; what was stored before stays.
    """
    results = Timings()
    records: dict[str, _Record] = {}
    alive = list(subjects)

    def attempt(what: str, subject: Timed, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(subject, *arguments)
        except (KLLensError, RuntimeError, OSError) as error:
            results.failures.append(Failure(subject.name, f"{reason_of(subject, error)} (while {what})"))
            alive.remove(subject)

    def play(number: int, together: Sequence[Timed]) -> None:
        what = f"round {number} of {settings.repeats}" if number else "warming up"
        order = random.Random(number)
        players: dict[str, Player] = {}
        with ExitStack() as stack:

            def enter(subject: Timed) -> None:
                players[subject.name] = Player(stack.enter_context(sessions.borrow(subject)))

            def move(subject: Timed, act: Callable[[Player, int], None], tokens: int) -> None:
                act(players[subject.name], tokens)

            for subject in together:
                attempt(what, subject, enter)
            # A session opened just now has to warm up first.
            for _ in range(2 if number and not sessions.resident else 1):
                players |= {name: Player(player.session) for name, player in players.items()}
                for act, tokens in acts_of(settings):
                    for subject in order.sample(together, len(together)):
                        if subject in alive:
                            attempt(what, subject, move, act, tokens)
            for subject in together:
                if subject in alive:
                    records[subject.name].add(players[subject.name], counts=number > 0)
                advanced(f"{subject.name}, {what}")

    for subject in list(alive):
        attempt(what := "loading it in a fresh process", subject, _examine, records, settings)
        advanced(f"{subject.name}, {what}")
    sessions = Sessions(alive, settings)
    try:
        for subject in list(alive):
            attempt(what := "timing its loading", subject, _time_loads, sessions, records)
            advanced(f"{subject.name}, {what}")
        meter = LoadMeter()
        for number in range(settings.repeats + 1):
            for together in [list(alive)] if sessions.resident else [[subject] for subject in alive]:
                play(number, together)
            if number:
                for subject in alive:
                    base = base_of(subject, alive)
                    profile = _profile(subject, base, records, settings, machine, sessions.description)
                    asked = {"asked": profile.threads / processors()} if limits_hold(profile.device) else {}
                    profile = replace(profile, load=meter.read() | asked)
                    results.profiles[subject.name] = profile
                    store(profile, number < settings.repeats)
    finally:
        sessions.close()
    return results


def reason_of(subject: Timed, error: Exception) -> str:
    """The last line of an error, with the artifact's path in it."""
    reason = last_line(error)
    return reason if str(subject.path) in reason else f"{subject.path}: {reason}"


def _examine(subject: Timed, records: dict[str, _Record], settings: UseSettings) -> None:
    memory = fresh_process(subject.path, subject.target.name, settings.runtime)
    records[subject.name] = _Record(memory, subject.target.contents(subject.path))


def _time_loads(subject: Timed, sessions: Sessions, records: dict[str, _Record]) -> None:
    for number in range(LOADS + 1):
        started = time.perf_counter()
        session = sessions.load(subject)
        if number:
            records[subject.name].loads.append(time.perf_counter() - started)
        session.close()


def _ratios(own: _Record, base: _Record) -> dict[str, Quartiles]:
    """Ratios by the names of the timings, if they have an interval; the base itself is 1."""
    if own is base:
        return {name: Quartiles(1.0, 1.0, 1.0, len(own.rounds)) for name in own.rounds[0]}
    found = {key: compared(own.turns[key], base.turns[key]) for key in own.turns}
    spread_by_name = {name: found["".join(name.partition("@")[1:])] for name in own.rounds[0]}
    return {name: spread for name, spread in spread_by_name.items() if spread is not None}


def _profile(
    subject: Timed,
    base: Timed,
    records: dict[str, _Record],
    settings: UseSettings,
    machine: Machine,
    interleaving: str,
) -> Profile:
    record = records[subject.name]
    timings = {
        "load_seconds": spread_of(record.loads),
        "first_load_seconds": spread_of([record.memory.load_seconds]),
        **spreads(record.rounds),
    }
    speed = timings["tokens_per_second"].median
    bound: dict[str, float] = {}
    if record.contents is not None and limits_hold(str(record.runtime.get("device", ""))):
        bound = decode_bound(record.contents, machine, context=settings.context, tokens_per_second=speed)
        bound |= prefill_bound(record.contents, machine, timings)
    return Profile(
        subject=subject.subject,
        protocol=PROTOCOL,
        device=subject.target.device_label(settings.runtime),
        threads=threads_of(record.runtime, settings.threads),
        timings=timings,
        ratios=_ratios(record, records[base.name]),
        peak_memory_bytes=record.memory.peak_bytes,
        file_bytes=subject.file_bytes,
        bound=bound,
        settings={
            "prompt_lengths": list(settings.prompt_lengths),
            "new_tokens": settings.new_tokens,
            "generated_after": max(settings.prompt_lengths),
            "repeats": len(record.rounds),
            "warm_up_rounds": 1,
            "quick": settings.quick,
            "interleaving": interleaving,
            "ratios_to": base.name,
            "ratios_to_fp16": base.is_fp16,
            "memory": record.memory.to_json() | {"model_bytes": record.memory.model_bytes},
        },
        runtime=record.runtime,
    )


def threads_of(runtime: dict[str, Any], asked: int | None) -> int:
    """The number of threads the runtime reports; otherwise the requested one, or all processors."""
    for key in ("threads", "inference_num_threads"):
        text = str(runtime.get(key, ""))
        if text.isdigit() and int(text) > 0:
            return int(text)
    return asked or processors()
