"""Turns and rounds, with a session and a clock whose every tick is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kl_lens.base.errors import TargetError
from kl_lens.profiling import in_use
from kl_lens.profiling.machine import Bandwidth, Machine
from kl_lens.profiling.memory import MemoryUse
from kl_lens.profiling.spread import ratio_of
from kl_lens.profiling.subjects import Timed
from kl_lens.run.records import ARTIFACT, Profile, Subject
from kl_lens.targets import describe_target
from kl_lens.targets.contents import BODY, Contents, StoredWeight

MACHINE = Machine(Bandwidth(1e9, 1e9, 2, 1 << 20, 3), 1e9, None)


class Ticking:
    """A session that takes one second for a token of a prompt and two for a generated one."""

    vocabulary = 10

    def __init__(self, log: list[str] | None = None, name: str = "", breaks_after: int | None = None) -> None:
        self.now = 0.0
        self.log, self.name, self.left = log if log is not None else [], name, breaks_after

    @property
    def description(self) -> dict[str, Any]:
        return {"library": "test", "threads": 3}

    def reset(self) -> None:
        pass

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise TargetError("the file is gone")
        self.log.append(self.name)
        self.now += len(ids)
        return np.eye(10, dtype=np.float32)[7]

    def step(self, token: int) -> np.ndarray:
        assert token == 7  # the likeliest one
        self.now += 2
        return np.eye(10, dtype=np.float32)[7]

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        raise AssertionError("timing never asks for all logits")

    def close(self) -> None:
        pass


def test_a_round_times_every_prompt_and_then_the_text() -> None:
    session = Ticking()
    player = in_use.Player(session, clock=lambda: session.now)
    for act, tokens in in_use.acts_of(in_use.UseSettings(prompt_lengths=(8, 2), new_tokens=6)):
        act(player, tokens)
    assert player.timings == {
        "first_token_seconds@2": 2.0,
        "prefill_tokens_per_second@2": 1.0,
        "first_token_seconds@8": 8.0,
        "prefill_tokens_per_second@8": 1.0,
        "seconds_per_token": 2.0,
        "tokens_per_second": 0.5,
    }
    assert player.turns == {"@2": [2.0], "@8": [8.0], "": [2.0, 2.0]}  # six tokens: turns of four and two


def test_the_first_token_of_a_turn_does_not_count_and_the_quickest_stands_for_it() -> None:
    """The weights of another file are in the caches; and one token of the turn was disturbed."""
    session, ticks = Ticking(), iter([0.0, 9.0, 10.0, 13.0, 20.0, 22.0, 30.0, 37.0])
    player = in_use.Player(session, clock=lambda: next(ticks))
    player._token = 7
    player.write(4)
    assert player.turns == {"": [2.0]}
    assert player.timings["seconds_per_token"] == 4.0  # what a user feels: the mean of 3, 2 and 7


def test_all_artifacts_get_the_same_prompts() -> None:
    assert in_use.prompts_for(50, (3, 5)) == in_use.prompts_for(50, (3, 5))
    assert [len(p) for p in in_use.prompts_for(50, (3, 5))] == [3, 5]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Timed], list[str], dict[str, int | None]]:
    """Subjects a (FP16), b and c; the log of who ran when; after how many prompts each breaks."""
    log: list[str] = []
    breaks: dict[str, int | None] = {}

    def load(self: in_use.Sessions, subject: Timed) -> Ticking:
        return Ticking(log, subject.name, breaks.get(subject.name))

    contents = Contents((StoredWeight("w", 1000, 500, BODY),), 0, 0)
    monkeypatch.setattr(in_use.Sessions, "load", load)
    monkeypatch.setattr(in_use, "fresh_process", lambda *_: MemoryUse(100, 250, 0.5))
    target = describe_target("gguf")
    monkeypatch.setattr(type(target), "contents", lambda self, path: contents)
    subjects = [
        Timed(Subject(ARTIFACT, target="gguf", settings={"path": n}), Path(n), target, 1000, n == "a")
        for n in ("a", "b", "c")
    ]
    return subjects, log, breaks


SETTINGS = in_use.UseSettings(prompt_lengths=(4,), new_tokens=2, repeats=2)


def test_artifacts_take_turns(three: tuple) -> None:
    subjects, log, _ = three
    results = in_use.benchmark_use(subjects, SETTINGS, MACHINE)
    rounds = [log[start : start + 3] for start in range(0, len(log), 3)]
    assert len(rounds) == 3  # one to warm up, two that count
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1  # nobody is always the first
    profile = results.profiles["b"]
    assert profile.timings["seconds_per_token"].repeats == 2
    assert profile.settings["ratios_to"] == "a"
    assert profile.settings["ratios_to_fp16"]
    assert profile.settings["interleaving"] == "all loaded at once, taking turns of 4 tokens"
    assert (profile.peak_memory_bytes, profile.settings["memory"]["model_bytes"]) == (250, 150)
    assert profile.threads == 3
    assert profile.bound["bytes_per_token"] == 1000
    assert Profile.from_json(profile.to_json()) == profile


def test_files_alternate_every_few_tokens(three: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects, log, _ = three
    step = Ticking.step

    def logged(self: Ticking, token: int) -> np.ndarray:
        log.append(self.name)
        return step(self, token)

    monkeypatch.setattr(Ticking, "step", logged)
    settings = in_use.UseSettings(prompt_lengths=(4,), new_tokens=10, repeats=1)
    in_use.benchmark_use(subjects, settings, MACHINE)
    prompts, first, second, rest = log[:3], log[3:15], log[15:27], log[27:33]
    for turn, tokens in ((prompts, 1), (first, 4), (second, 4), (rest, 2)):
        names = turn[::tokens]
        assert turn == [name for name in names for _ in range(tokens)]
        assert sorted(names) == ["a", "b", "c"]


def test_the_profile_says_how_busy_the_machine_was(three: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_use.LoadMeter, "read", lambda self: {"stolen": 0.42, "others": 0.1})
    monkeypatch.setattr(in_use, "processors", lambda: 6)
    profile = in_use.benchmark_use(three[0], SETTINGS, MACHINE).profiles["b"]
    assert profile.load == {"stolen": 0.42, "others": 0.1, "asked": 0.5}  # three threads
    assert "tokens_per_second" not in profile.ratios  # two turns are too few for an interval
    assert ratio_of(profile, "tokens_per_second").words.startswith("not measurable here: too few turns")


def test_without_room_for_all_each_is_loaded_for_its_round(
    three: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects, log, _ = three
    monkeypatch.setattr(in_use, "MEMORY_PER_FILE_BYTE", 1e15)
    results = in_use.benchmark_use(subjects, SETTINGS, MACHINE)
    assert log == [
        "a",
        "b",
        "c",
        *["a", "a", "b", "b", "c", "c"] * 2,
    ]  # a warm-up of its own before each turn
    assert (
        results.profiles["a"]
        .settings["interleaving"]
        .startswith("loaded again for each round, one at a time")
    )


def test_one_that_breaks_half_way_costs_the_others_nothing(three: tuple) -> None:
    subjects, log, breaks = three
    breaks["b"] = 2  # warm-up and first round, then no more
    stored: list[Profile] = []
    results = in_use.benchmark_use(
        subjects, SETTINGS, MACHINE, store=lambda profile, partial: stored.append(profile)
    )
    assert sorted(log) == ["a"] * 3 + ["b"] * 2 + ["c"] * 3
    (failure,) = results.failures
    assert failure.subject == "b"
    assert "the file is gone (while round 2 of 2)" in failure.reason
    assert [(p.subject.label, p.settings["repeats"]) for p in stored] == [
        ("a", 1), ("b", 1), ("c", 1), ("a", 2), ("c", 2),
    ]  # fmt: skip


def test_without_fp16_ratios_are_to_the_first_and_say_so(three: tuple) -> None:
    subjects, _, _ = three
    results = in_use.benchmark_use(subjects[1:], SETTINGS, MACHINE)
    assert results.profiles["c"].settings["ratios_to"] == "b"
    assert not results.profiles["c"].settings["ratios_to_fp16"]
