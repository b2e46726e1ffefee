"""Turns and rounds, with a session and a clock whose every tick is known."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kl_lens.base.errors import TargetError
from kl_lens.profiling import benchmark
from kl_lens.profiling.benchmark import Report, Timed, UseSettings
from kl_lens.profiling.memory import MemoryUse
from kl_lens.run.records import ARTIFACT, Profile, Quartiles, Subject
from kl_lens.targets.abilities import Contents


class Ticking:
    """A session that takes one second for a token of a prompt and two for a generated one."""

    vocabulary = 10

    def __init__(
        self,
        log: list[str] | None = None,
        name: str = "",
        breaks_after: int | None = None,
    ) -> None:
        self.seconds = 0.0
        self.log = log if log is not None else []
        self.name = name
        self.prompts_left = breaks_after

    @property
    def description(self) -> dict[str, Any]:
        return {"library": "test", "threads": 3}

    def reset(self) -> None:
        pass

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        if self.prompts_left is not None:
            self.prompts_left -= 1
            if self.prompts_left < 0:
                raise TargetError("the file is gone")
        self.log.append(self.name)
        self.seconds += len(ids)
        return np.eye(10, dtype=np.float32)[7]

    def step(self, token: int) -> np.ndarray:
        assert token == 7  # the likeliest one
        self.seconds += 2
        return np.eye(10, dtype=np.float32)[7]

    def close(self) -> None:
        pass


def test_a_round_times_every_prompt_and_then_the_text() -> None:
    session = Ticking()
    player = benchmark.Player(session, clock=lambda: session.seconds)
    for act, tokens in benchmark.acts_of(
        UseSettings(prompt_lengths=(8, 2), new_tokens=6)
    ):
        act(player, tokens)
    prompts = {"first_token_seconds@2": 2.0, "first_token_seconds@8": 8.0}
    assert player.timings == prompts | {
        "seconds_per_token": 2.0,
        "tokens_per_second": 0.5,
    }
    text = [2.0, 2.0]  # six tokens: turns of four and two
    turns = {name: [seconds] for name, seconds in prompts.items()}
    assert player.turns == turns | {"seconds_per_token": text, "tokens_per_second": text}


@pytest.fixture
def three(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[Timed], list[str], dict[str, int | None]]:
    """Subjects a (FP16), b and c; the log of who ran when; after how many prompts each breaks."""
    log: list[str] = []
    breaks: dict[str, int | None] = {}

    target: Any = SimpleNamespace(
        name="gguf",
        open=lambda path, _: Ticking(log, path.name, breaks.get(path.name)),
        contents=lambda _: Contents(1000, 0, 0),
    )
    monkeypatch.setattr(benchmark, "fresh_process", lambda *_: MemoryUse(100, 250))
    subjects = [
        Timed(
            Subject(ARTIFACT, target="gguf", settings={"path": n}),
            Path(n),
            target,
            1000,
            n == "a",
        )
        for n in ("a", "b", "c")
    ]
    return subjects, log, breaks


SETTINGS = UseSettings(prompt_lengths=(4,), new_tokens=2, repeats=2)


def timed(
    subjects: Sequence[Timed], **settings: Any
) -> tuple[dict[str, Profile], Report]:
    """The profiles by label."""
    report = benchmark.InUse(replace(SETTINGS, **settings)).time(subjects, Report(1e9))
    return {profile.subject.label: profile for profile in report.profiles}, report


def test_artifacts_take_turns_of_a_prompt_or_a_few_tokens(
    three: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects, log, _ = three
    step = Ticking.step
    monkeypatch.setattr(
        Ticking, "step", lambda self, token: log.append(self.name) or step(self, token)
    )
    profiles, _ = timed(subjects, new_tokens=10)
    orders = set()
    last = 0
    for tokens in (
        1,
        4,
        *2 * (1, 4, 4, 2),
    ):  # a prompt and a turn to warm up, two rounds that count
        first, last = last, last + 3 * tokens
        names = log[first:last:tokens]
        assert log[first:last] == [name for name in names for _ in range(tokens)]
        assert sorted(names) == ["a", "b", "c"]
        orders.add(tuple(names))
    assert len(log) == last
    assert len(orders) > 1  # nobody is always the first
    profile = profiles["b"]
    assert profile.timings["seconds_per_token"].repeats == 2
    assert profile.settings["ratios_to"] == "a"
    assert profile.settings["ratios_to_fp16"]
    assert (
        profile.settings["interleaving"] == "all loaded at once, taking turns of 4 tokens"
    )
    assert (profile.peak_memory_bytes, profile.settings["memory"]["model_bytes"]) == (
        250,
        150,
    )
    assert profile.threads == 3
    assert profile.bound["bytes_per_token"] == 1000
    assert Profile.from_json(profile.to_json()) == profile


def test_rounds_end_when_every_interval_is_narrow(
    three: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    spreads = {
        2: 1.5,
        3: 1.2,
    }  # after so many rounds: the ends of the intervals, a factor apart
    monkeypatch.setattr(
        benchmark,
        "compared",
        lambda turns, base: Quartiles(1.1, 1.0, spreads.get(len(turns) // 5, 1.0), 24),
    )
    for narrow, rounds in (
        (None, 6),
        (1.3, 3),
        (1.5, 2),
        (9.0, 2),
    ):  # one round is never enough
        profile = timed(three[0], repeats=6, new_tokens=20, narrow=narrow)[0]["b"]
        assert profile.settings["repeats"] == rounds


def test_without_room_for_all_they_run_one_after_the_other(
    three: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects, log, _ = three
    monkeypatch.setattr(benchmark, "MEMORY_PER_FILE_BYTE", 1e15)
    profiles, _ = timed(subjects)
    assert log == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    assert (
        profiles["a"]
        .settings["interleaving"]
        .startswith("one after the other: together they need")
    )
    assert profiles["c"].settings["ratios_to"] == "a"


def test_one_that_breaks_half_way_costs_the_others_nothing(three: tuple) -> None:
    subjects, log, breaks = three
    breaks["b"] = 2  # warm-up and first round, then no more
    profiles, report = timed(subjects)
    assert sorted(log) == ["a"] * 3 + ["b"] * 2 + ["c"] * 3
    assert list(report.failures) == ["b"]
    assert "the file is gone (while round 2 of 2)" in report.failures["b"]
    assert {n: p.settings["repeats"] for n, p in profiles.items()} == {"a": 2, "c": 2}
    breaks.clear()
    # Without FP16, ratios are to the first, and say so.
    settings = timed(subjects[1:])[0]["c"].settings
    assert (settings["ratios_to"], settings["ratios_to_fp16"]) == ("b", False)
