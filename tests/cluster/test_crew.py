"""Which worker gets which piece, and what happens if workers die, fail or do not fit; with a fake Ray."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest

from kl_lens.checkpoints import load
from kl_lens.cli.main import main
from kl_lens.cluster import crew as crews
from kl_lens.cluster.crew import HiredCrew
from kl_lens.cluster.ray_pool import RayPool, require_reachable
from kl_lens.errors import KLLensError, RunError
from kl_lens.recipes import Recipe
from kl_lens.runs import Run
from kl_lens.sensitivity.perturbation import Candidate
from tests.cluster.conftest import World
from tests.sensitivity.test_pieces import contents


class FakeRay:
    """Actors in this process, whose answers come in any order; `dies(actor, method, nth)` ends them."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayActorError(RayError):
            pass

    def __init__(self, dies: Callable[[int, str, int], bool] = lambda *_: False, nodes: int = 2) -> None:
        self.dies, self.count, self.nodes_there = dies, nodes, nodes
        self.actors = 0
        self.answers = random.Random(0)
        self.asked: list[Any] = []

    def init(self, **_: Any) -> None: ...

    def shutdown(self) -> None: ...

    def kill(self, actor: Any) -> None:
        actor.dead = True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.count}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 1}}] * self.count

    def remote(self, kind: type) -> Any:
        def started(order: Any) -> FakeActor:
            self.actors += 1
            return FakeActor(self, self.actors, kind(order))

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=started))

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        one = self.answers.choice(refs)
        return [one], [ref for ref in refs if ref is not one]

    def get(self, ref: Callable[[], Any]) -> Any:
        return ref()


class FakeActor:
    def __init__(self, ray: FakeRay, number: int, worker: Any) -> None:
        self.dead, self._calls = False, 0

        def call(name: str) -> Any:
            def remote(*arguments: Any) -> Callable[[], Any]:
                def answer() -> Any:
                    self._calls += 1
                    if self.dead or ray.dies(number, name, self._calls):
                        self.dead = True
                        raise ray.exceptions.RayActorError("The actor died\nOutOfMemoryError: too much")
                    if name == "do":
                        ray.asked.append(arguments[1])
                    return getattr(worker, name)(*arguments)

                return answer

            return SimpleNamespace(remote=remote)

        self.hello, self.begin, self.do = call("hello"), call("begin"), call("do")


@pytest.fixture
def hired(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[HiredCrew, FakeRay, list[str]]]:
    def hire(dies: Any = lambda *_: False, **options: Any) -> tuple[HiredCrew, FakeRay, list[str]]:
        ray, said = FakeRay(dies), list[str]()
        monkeypatch.setitem(sys.modules, "ray", ray)
        opened = {world.order.model: world.model}  # once for all, since all are in this process
        monkeypatch.setattr(
            "kl_lens.cluster.worker.load", lambda place, **how: opened.get(place) or load(place, **how)
        )
        crew = HiredCrew(RayPool("local"), options.pop("order", world.order), 2, say=said.append, **options)
        return crew, ray, said

    return hire


def test_the_crew_gives_the_sweep_of_one_process_to_the_last_bit(world: World, hired, tmp_path) -> None:
    crew, ray, said = hired()
    with crew:
        result = world.swept(tmp_path, crew)
    assert contents(tmp_path) == world.whole
    assert (result.failures, said, ray.actors) == ({}, [], 2)
    first = [piece.work for piece in ray.asked[:2]]
    assert first == sorted(first, reverse=True)
    assert max(piece.work for piece in ray.asked) == first[0], "the largest comes first"


def test_pieces_of_workers_that_die_are_done_again(world: World, hired, tmp_path) -> None:
    deaths = random.Random(5)
    crew, ray, said = hired(
        lambda actor, method, nth: actor <= 10 and method == "do" and deaths.random() < 0.3
    )
    with crew:
        result = world.swept(tmp_path, crew)
    assert ray.actors > 4
    assert len(said) == ray.actors - 2
    assert all("died; starting another" in line for line in said)
    assert result.failures == {}
    assert contents(tmp_path) == world.whole


def test_a_second_command_does_only_what_the_first_left(world: World, hired, tmp_path) -> None:
    """As after a driver that was stopped: what was committed is there, and is not done again."""
    crew, ray, _ = hired()
    with crew:
        world.swept(tmp_path, crew)
        every = len(ray.asked)
        with Run.open(tmp_path) as run:
            run.journal.execute("DELETE FROM samples WHERE component LIKE '%layers.2%'")
            run.journal.commit()
        ray.asked.clear()
        result = world.swept(tmp_path, crew)
    assert 0 < len(ray.asked) < every
    assert 0 < result.measured < result.reused
    assert contents(tmp_path)["samples"] == world.whole["samples"]


def test_a_piece_that_fails_on_two_workers_is_named_and_the_rest_goes_on(
    world: World, hired, tmp_path
) -> None:
    """A recipe that learns, where no worker has statistics."""
    crew, _, said = hired()
    bad = Candidate(world.candidates[5].component, Recipe("int4-g64", "gptq"))
    candidates = [*world.candidates[:5], bad, *world.candidates[5:]]
    with crew:
        layout = crew.begin(candidates, world.windows.ids, None, None)
        pieces = layout.spread([1.0] * len(candidates), 2)
        found = [index for each in crew.do(pieces, lambda text: None) for index, _ in each.candidates]
    lost = [piece for piece in pieces if any(5 in group for group in piece.groups)]
    assert set(crew.failures) == {piece.named(candidates) for piece in lost}
    assert all("failed on 2 workers" in reason for reason in crew.failures.values())
    assert len(said) == len(lost)
    assert all("trying another worker" in line for line in said)
    done = [i for piece in pieces if piece not in lost for group in piece.groups for i in group]
    assert sorted(found) == sorted(done)


def test_what_fails_from_the_start_ends_the_command_with_its_reason(world: World, hired) -> None:
    crew, ray, _ = hired()
    candidates = [
        Candidate(candidate.component, Recipe("int4-g64", "gptq")) for candidate in world.candidates
    ]
    with crew:
        pieces = crew.begin(candidates, world.windows.ids, None, None).spread([1.0] * len(candidates), 2)
        assert len(pieces) > 5
        with pytest.raises(KLLensError, match="statistics"):
            list(crew.do(pieces, lambda text: None))
    assert ray.actors == 2 + 3


def test_a_piece_that_kills_workers_is_given_up(world: World, hired, tmp_path) -> None:
    crew, ray, _ = hired(lambda actor, method, nth: method == "do")
    with crew:
        layout = crew.begin(world.candidates, world.windows.ids, None, None)
        piece = layout.spread([1.0] * len(world.candidates), 2)[0]
        assert list(crew.do([piece], lambda text: None)) == []
    assert ray.actors == 2 + 5
    assert crew.failures == {piece.named(world.candidates): ANY}
    assert "5 workers died on it" in crew.failures[piece.named(world.candidates)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "other"}, "has other weights on the worker"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_workers_that_cannot_open_the_model_end_the_command_with_one_line(
    world: World, hired, tmp_path, change, message
) -> None:
    crew, _, said = hired(order=replace(world.order, **change))
    with crew, pytest.raises(KLLensError, match=message) as raised:
        world.swept(tmp_path, crew)
    assert "\n" not in str(raised.value)
    assert all(message in line for line in said)


def test_a_worker_of_another_version_is_refused_by_name(world: World, hired, tmp_path, monkeypatch) -> None:
    crew, _, _ = hired()
    monkeypatch.setattr(crews, "__version__", "9.9")
    with crew, pytest.raises(KLLensError, match=r"worker \d+ on .* it has kl-lens .*, this machine has 9\.9"):
        world.swept(tmp_path, crew)


def test_workers_that_die_while_they_start_end_the_command(world: World, hired, tmp_path) -> None:
    crew, ray, _ = hired(lambda actor, method, nth: method == "begin")
    with crew, pytest.raises(KLLensError, match="died while starting: OutOfMemoryError: too much"):
        world.swept(tmp_path, crew)
    assert ray.actors < 10


def test_a_full_disk_is_one_line_and_what_was_committed_is_kept(
    world: World, hired, tmp_path, monkeypatch
) -> None:
    crew, _, _ = hired()
    store, left = Run.store_samples, [5]

    def stored(run: Run, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RunError(f"{run.folder} cannot grow: the disk is full")
        store(run, *arguments)

    monkeypatch.setattr(Run, "store_samples", stored)
    with crew, pytest.raises(RunError, match="the disk is full"):
        world.swept(tmp_path, crew)
    monkeypatch.undo()
    with Run.open(tmp_path) as run:
        assert len(run.measurements()) == 5


def test_an_address_without_a_cluster_is_one_line() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(KLLensError, match=rf"--ray 127\.0\.0\.1:{port}: cannot be reached"):
        require_reachable(f"127.0.0.1:{port}", 1.0)
    with pytest.raises(KLLensError, match="give HOST:PORT"):
        require_reachable("head")


def test_without_ray_the_command_says_what_to_install(world: World, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "text.txt").write_text("word " * 5000)
    words = [
        "measure",
        "reference:mamba",
        "--text",
        str(tmp_path / "text.txt"),
        "--windows",
        "2",
        "--window-length",
        "16",
    ]
    assert main([*words, "--run", str(tmp_path / "run"), "--ray", "local"]) == 1
    assert "--ray needs Ray; install it with: pip install 'kl-lens[ray]'" in capsys.readouterr().err
    assert main([*words, "--run", str(tmp_path / "run"), "--ray", "local", "--shard", "1/2"]) == 1
    assert "give only one of them" in capsys.readouterr().err
