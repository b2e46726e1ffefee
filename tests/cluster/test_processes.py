"""Workers that are processes on this machine: equal to the last bit, whatever is killed, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kl_lens.cluster.crew import HiredCrew
from kl_lens.cluster.processes import LEAST_OPERATIONS, ProcessHands, workers_by_default
from kl_lens.environment import for_child
from kl_lens.errors import KLLensError
from kl_lens.pipeline.events import Events
from kl_lens.pipeline.measuring import MeasureSettings
from kl_lens.pipeline.spreading import crew_for
from kl_lens.sensitivity.sweep import Progress
from tests.cluster.conftest import World, driven, samples_in
from tests.sensitivity.conftest import some_windows
from tests.sensitivity.test_pieces import contents

GB = 10**9
PAUSE = 1.0  # seconds after each of 68 commits


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Windows of 512 tokens, of which eight run together: other processes have our defaults, not our patches."""
    return World.made(tmp_path_factory.mktemp("world"), some_windows(9, 512))


def workers(of: psutil.Process | None = None) -> list[psutil.Process]:
    """The processes of workers that are there."""
    children = (of or psutil.Process()).children()
    return [child for child in children if "kl_lens.cluster.processes" in child.cmdline()]


def test_a_worker_that_is_killed_costs_nothing_but_time(world: World, tmp_path) -> None:
    said: list[str] = []
    killed: list[int] = []

    def kill(work: float, what: str) -> None:
        if not killed:
            victim = workers()[0]
            killed.append(victim.pid)
            victim.kill()

    with HiredCrew(ProcessHands(), world.order, 2, say=said.append) as crew:
        result = world.swept(tmp_path, crew, Progress(advanced=kill))
        assert killed
        assert len(workers()) == 2
    assert not workers()
    assert result.failures == {}
    assert contents(tmp_path) == world.whole
    assert [line for line in said if f"worker {killed[0]} on" in line and "starting another" in line]


@pytest.mark.parametrize(
    ("cores", "copy", "free", "work", "count"),
    [
        (16, 0.3 * GB, 64 * GB, 1e14, 8),
        (12, 0.3 * GB, 64 * GB, 1e14, 6),
        (8, 0.3 * GB, 64 * GB, 1e14, 4),
        (16, 1.5 * GB, 64 * GB, 1e14, 4),  # eight copies are more than the budget of 8 GB
        (16, 0.9 * GB, 10 * GB, 1e14, 4),  # or than what is free, with what a process itself takes
        (16, 4 * GB, 64 * GB, 1e15, 1),  # two large workers gain nothing
        (16, 0.3 * GB, 64 * GB, 16 * LEAST_OPERATIONS - 1e9, 1),  # over before the workers have started
        (7, 0.3 * GB, 64 * GB, 1e15, 1),
        (2, 0.01 * GB, 64 * GB, 1e15, 1),
    ],
)
def test_how_many_workers_a_machine_gets_by_itself(cores, copy, free, work, count) -> None:
    assert workers_by_default(cores, int(copy), 8 * GB, int(free), work) == count


@pytest.mark.parametrize(("count", "operations"), [(2, 0.0), (1, 1e15)])
def test_no_worker_is_started_for_finished_work_or_for_one_process(
    world, tmp_path, count, operations
) -> None:
    settings = MeasureSettings(model=world.order.model, workers=count)
    crew = crew_for(settings, settings.model, world.model, tmp_path, Events(), operations=operations)
    with crew as hired:
        assert hired is None


@pytest.mark.parametrize(
    ("count", "copy", "message"),
    [(10**6, 0, "use at most"), (2, 10**15, "this many copies of the model need")],
)
def test_more_than_the_machine_has_is_refused_before_anything_starts(world, count, copy, message) -> None:
    with pytest.raises(KLLensError, match=message), HiredCrew(ProcessHands(copy), world.order, count):
        raise AssertionError("it was opened")
    assert not workers()


@pytest.mark.slow
def test_weights_may_stay_on_disk_there(world: World, tmp_path) -> None:
    how = {**world.order.how, "weights": "disk", "memory_budget": 10}
    with HiredCrew(ProcessHands(), replace(world.order, how=how), 2) as crew:
        world.swept(tmp_path, crew)
    assert contents(tmp_path) == world.whole


@pytest.mark.slow
def test_workers_that_cannot_start_end_the_command_with_their_last_line(
    world: World, tmp_path: Path, monkeypatch
) -> None:
    """What they import is broken there."""
    (tmp_path / "kl_lens").mkdir()
    (tmp_path / "kl_lens/__init__.py").write_text("import nothing_of_the_kind\n")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    monkeypatch.setattr("kl_lens.cluster.processes.for_child", lambda: environment)
    monkeypatch.chdir("/")
    with (
        HiredCrew(ProcessHands(), world.order, 1) as crew,
        pytest.raises(KLLensError, match="died while starting") as e,
    ):
        crew.begin(world.candidates, world.windows.ids, None, None)
    assert "No module named" in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.slow
def test_a_killed_driver_leaves_no_workers_and_resumes(world: World, tmp_path) -> None:
    driver = subprocess.Popen(driven("ProcessHands()", world, tmp_path, PAUSE), env=for_child())
    hired = _while_it_measures(driver, tmp_path / "run")
    driver.kill()
    driver.wait()
    psutil.wait_procs(hired, timeout=30)
    assert not [process for process in hired if process.is_running()]
    there = samples_in(tmp_path / "run")
    assert 0 < there < len(world.whole["samples"])
    command = driven("ProcessHands()", world, tmp_path)
    again = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=for_child())
    assert int(again.stdout) == len(world.whole["samples"]) - there
    assert contents(tmp_path / "run") == world.whole


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_no_workers(world: World, tmp_path) -> None:
    """It reaches the driver alone: a worker is in a session of its own, and goes with the driver."""
    driver = subprocess.Popen(
        driven("ProcessHands()", world, tmp_path, PAUSE),
        stderr=subprocess.PIPE,
        env=for_child(),
        start_new_session=True,
    )
    hired = _while_it_measures(driver, tmp_path / "run")
    os.killpg(driver.pid, signal.SIGINT)
    _, said = driver.communicate(timeout=60)
    psutil.wait_procs(hired, timeout=30)
    assert not [process for process in hired if process.is_running()]
    assert said.count(b"Traceback") == 1, "the driver's own"
    assert samples_in(tmp_path / "run")


def _while_it_measures(driver: subprocess.Popen[Any], folder: Path) -> list[psutil.Process]:
    while driver.poll() is None and not samples_in(folder):
        time.sleep(0.02)
    hired = workers(psutil.Process(driver.pid))
    assert len(hired) == 2
    return hired
