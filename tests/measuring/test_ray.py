"""A real Ray cluster of two nodes: equal to the last bit, whatever is killed."""

import os
import random
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="needs kl-lens[ray]")

import psutil  # noqa: E402

from kl_lens.base.progress import Progress  # noqa: E402
from kl_lens.measuring.workers import _RAY_SETTINGS, hired  # noqa: E402
from tests.measuring.conftest import some_windows  # noqa: E402
from tests.measuring.test_pieces import contents  # noqa: E402
from tests.measuring.test_workers import World  # noqa: E402

KILLS = 10
EVERY = 5  # workers, each after so many commits more (there are 68)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Windows of 512 tokens, of which eight run together: six batches."""
    return World.made(tmp_path_factory.mktemp("world"), some_windows(48, 512))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    nodes = _patiently(
        lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    )
    _patiently(lambda: nodes.add_node(num_cpus=1))
    yield nodes
    nodes.shutdown()


def _patiently(start: Callable[[], Any], times: int = 5) -> Any:
    """Ray gives a node half a minute to start, which a busy machine may not keep."""
    for remaining in reversed(range(times)):
        try:
            return start()
        except Exception as error:
            if not remaining or "timed out during startup" not in str(error):
                raise
    return None


def actors() -> list[psutil.Process]:
    """The processes of actors that are there, on whichever node."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        if any("ray::Worker" in word for word in process.info["cmdline"] or []):
            processes.append(process)
    return processes


def test_workers_killed_at_random_moments(cluster, world: World, tmp_path) -> None:
    """Ten times, each a moment after something was committed: nothing of that is lost, and all is done."""
    moments = random.Random(0)
    messages = list[str]()
    commits = count(1)
    killed = list[int]()

    def kill(work: float, what: str) -> None:
        """The driver waits meanwhile, so that no sweep is over before its kills."""
        if next(commits) % EVERY or len(killed) == KILLS:
            return
        time.sleep(moments.uniform(0.0, 1.0))
        while not (alive := actors()):
            time.sleep(0.1)
        victim = moments.choice(alive)
        victim.kill()
        victim.wait(60)
        killed.append(victim.pid)

    with hired(world.order, 2, cluster.address, say=messages.append) as workers:
        assert len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 2
        world.swept(tmp_path, workers, Progress(advanced=kill))
    print(
        f"killed {len(killed)} workers after {next(commits)} commits; {len(messages)} lines: {messages}"
    )
    assert len(set(killed)) == KILLS
    assert (
        sum("a worker died" in line and "starting another" in line for line in messages)
        == KILLS
    )
    assert contents(tmp_path) == world.whole
