"""Workers: equal to one process to the last bit, whatever dies, and nothing left behind."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from kl_lens.base.environment import for_child
from kl_lens.base.errors import KLLensError, RunError
from kl_lens.base.progress import Progress
from kl_lens.cli.main import main
from kl_lens.measuring.perturbation import Candidate, find_candidates
from kl_lens.measuring.sweep import Sweep, SweepResult
from kl_lens.measuring.workers import (
    LEAST_OPERATIONS,
    Order,
    Worker,
    Workers,
    hired,
    workers_by_default,
)
from kl_lens.model import LoadedModel, load
from kl_lens.model.tasks import LanguageTask
from kl_lens.run.folder import Run
from kl_lens.text.windows import Windows
from kl_lens.weights.recipes import Recipe
from tests.families import tiny_model
from tests.measuring.conftest import some_windows
from tests.measuring.test_pieces import contents

GB = 10**9


@dataclass
class World:
    """A model in a folder that workers can open, and what its sweep gives in one process."""

    model: LoadedModel
    order: Order
    candidates: list[Candidate]
    windows: Windows
    whole: dict[str, list[Any]]

    @classmethod
    def made(cls, folder: Path, windows: Windows) -> Self:
        tiny_model("mamba").save_pretrained(folder / "model")
        place = str(folder / "model")
        how = {"dtype": "float32", "device": "cpu"}
        model = load(place, **how)
        candidates = find_candidates(model.anatomy, [Recipe("int4"), Recipe("int8")])[0]
        world = cls(model, Order(place, how, model.fingerprint), candidates, windows, {})
        world.swept(folder / "whole", None)
        world.whole = contents(folder / "whole")
        return world

    def swept(
        self, folder: Path, workers: Workers | None, progress: Progress | None = None
    ) -> SweepResult:
        with Run.create(folder) as run:
            sweep = Sweep(
                self.model, run, workers=workers, progress=progress or Progress()
            )
            return sweep.measure(self.candidates, self.windows)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Windows of 512 tokens, of which eight run together: other processes have our defaults, not our patches."""
    return World.made(tmp_path_factory.mktemp("world"), some_windows(9, 512))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """For workers in this process: three windows of twenty tokens run together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageTask, "rows_at_once", 60)
        yield World.made(tmp_path_factory.mktemp("small"), some_windows(7, 20))


def processes(of: psutil.Process | None = None) -> list[psutil.Process]:
    """The processes of workers that are there."""
    of = of or psutil.Process()
    words = {child: " ".join(child.cmdline()) for child in of.children(recursive=True)}
    return [
        each
        for each in words
        if ("forkserver" if each.ppid() != of.pid else "spawn_main") in words[each]
    ]


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_one_piece_and_a_resumed_sweep_does_the_rest(
    world: World, tmp_path
) -> None:
    messages: list[str] = []
    killed: list[int] = []

    def kill(work: float, what: str) -> None:
        if not killed:
            victim = processes()[0]
            killed.append(victim.pid)
            victim.kill()

    with hired(world.order, 2, say=messages.append) as workers:
        assert world.swept(tmp_path, workers, Progress(advanced=kill)).measured == len(
            world.whole["samples"]
        )
        assert contents(tmp_path) == world.whole
        assert [
            line
            for line in messages
            if "a worker died" in line and "starting another" in line
        ]
        with Run.open(tmp_path) as run:
            run.journal.execute("DELETE FROM samples WHERE component LIKE '%layers.2%'")
            run.journal.commit()
        resumed = world.swept(tmp_path, workers)
        assert 0 < resumed.measured < resumed.reused
    assert contents(tmp_path) == world.whole
    assert not processes()


# A script without `if __name__ == "__main__"`: workers must not run it again.
DRIVER = """
import time
from kl_lens.measuring.workers import Order, _process
workers = [_process(Order("nowhere", {}, "")) for _ in range(2)]
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_with_a_driver_that_is_killed(tmp_path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=for_child()) as driver:
        assert driver.stdout.readline() == b"started\n"
        workers = processes(psutil.Process(driver.pid))
        assert len(workers) == 2
        driver.kill()
    psutil.wait_procs(workers, timeout=30)
    assert not [process for process in workers if process.is_running()]


class Inside:
    """A worker in this process, which `dies(number, call, piece)` ends."""

    made = 0

    def __init__(
        self, world: World, order: Order, dies: Callable[[int, Any], bool]
    ) -> None:
        Inside.made += 1
        self._worker = Worker(order)
        self._number = Inside.made
        self._dies = dies
        self.dead = False
        if order == world.order:
            self._worker._model = world.model  # opened once for all

    def submit(self, *work: Any) -> Future[Any]:
        answer = Future[Any]()
        self.dead = self.dead or self._dies(self._number, work[-1])
        if self.dead:
            answer.set_exception(BrokenExecutor("out of memory"))
        else:
            answer.set_result(self._worker.do(*work))
        return answer

    def end(self) -> None:
        self.dead = True


@pytest.fixture
def inside(
    small: World, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Workers, list[str]]]:
    def workers(
        dies: Callable[[int, Any], bool] = lambda *_: False, order: Order = small.order
    ) -> tuple[Workers, list[str]]:
        messages: list[str] = []
        monkeypatch.setattr(Inside, "made", 0)
        return Workers(lambda: Inside(small, order, dies), 2, messages.append), messages  # type: ignore[arg-type,return-value]

    return workers


def test_pieces_of_workers_that_die_are_done_again(
    small: World, inside, tmp_path
) -> None:
    deaths = random.Random(5)
    workers, messages = inside(
        lambda number, piece: piece is not None and number <= 8 and deaths.random() < 0.3
    )
    small.swept(tmp_path, workers)
    assert Inside.made > 4
    assert len(messages) == Inside.made - 2
    assert contents(tmp_path) == small.whole


def test_what_no_worker_can_do_is_done_by_this_process(
    small: World, inside, tmp_path
) -> None:
    workers, messages = inside(lambda number, piece: piece is not None)
    small.swept(tmp_path, workers)
    assert Inside.made == 2 + 3
    assert "a worker died: out of memory; going on without it" in messages
    assert contents(tmp_path) == small.whole


def test_a_process_that_computes_differently_does_not_do_it(
    small: World, inside, tmp_path
) -> None:
    """As if workers had another device: what they left undone is not mixed with results from here."""
    workers, _ = inside(
        lambda number, piece: piece is not None and piece.groups[-1][-1] == 33
    )
    begin = workers.begin
    workers.begin = lambda job: begin(replace(job, engine="plain"))
    with pytest.raises(
        RunError,
        match=r"^\d pieces of the sweep failed on every worker: a worker died: out",
    ):
        small.swept(tmp_path, workers)
    with Run.open(tmp_path) as run:
        assert len(run.measurements()) > 20
    job = workers._job
    layout = replace(workers._layout, batch=1)
    assert "it would compute differently" in Worker(small.order).do(1, job, layout, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "other"}, "has other weights there than here"),
        ({"version": ("9.9", 1)}, r"it has kl-lens .* the command 9\.9 \(metrics 1\)"),
    ],
)
def test_workers_that_cannot_open_the_model_end_the_command_with_one_line(
    small: World, inside, tmp_path, change, message
) -> None:
    workers, messages = inside(order=replace(small.order, **change))
    with pytest.raises(
        KLLensError, match=f"no worker could start: worker .*{message}"
    ) as raised:
        small.swept(tmp_path, workers)
    assert "\n" not in str(raised.value)
    assert len(messages) == 5


@pytest.mark.parametrize(
    ("cores", "copy", "free", "work", "count"),
    [
        (16, 0.3 * GB, 64 * GB, 1e14, 8),
        (8, 0.3 * GB, 64 * GB, 1e14, 4),
        (16, 1.5 * GB, 64 * GB, 1e14, 4),  # eight copies are more than the budget of 8 GB
        (
            16,
            0.9 * GB,
            10 * GB,
            1e14,
            4,
        ),  # or than what is free, with what a process itself takes
        (16, 4 * GB, 64 * GB, 1e15, 1),  # two large workers gain nothing
        (
            16,
            0.3 * GB,
            64 * GB,
            16 * LEAST_OPERATIONS - 1e9,
            1,
        ),  # over before the workers have started
        (7, 0.3 * GB, 64 * GB, 1e15, 1),
    ],
)
def test_how_many_workers_a_machine_gets_by_itself(
    cores, copy, free, work, count
) -> None:
    assert workers_by_default(cores, int(copy), 8 * GB, int(free), work) == count


@pytest.mark.parametrize(("count", "copy"), [(10**6, 0), (2, 10**15)])
def test_more_than_the_machine_has_is_refused_before_anything_starts(
    small: World, count, copy
) -> None:
    with (
        pytest.raises(KLLensError, match="of free memory are enough for"),
        hired(small.order, count, copy_bytes=copy),
    ):
        raise AssertionError("it was opened")
    assert not processes()


def test_without_ray_the_command_says_what_to_install(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "text.txt").write_text("word " * 5000)
    words = [
        "measure",
        "reference:mamba",
        "--text",
        str(tmp_path / "text.txt"),
        "--windows",
        "2",
    ]
    words += ["--window-length", "16", "--run", str(tmp_path / "run"), "--ray", "local"]
    assert main(words) == 1
    assert (
        "--ray needs Ray; install it with: pip install 'kl-lens[ray]'"
        in capsys.readouterr().err
    )
