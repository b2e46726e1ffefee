"""A tiny model in a folder that workers can open, and the sweep of it in one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kl_lens.checkpoints import LoadedModel, load
from kl_lens.checkpoints.tasks import LanguageTask
from kl_lens.cluster.worker import Order
from kl_lens.recipes import Recipe
from kl_lens.runs import Run
from kl_lens.sensitivity.engines import DEFAULT_MEMORY, FastEngine
from kl_lens.sensitivity.perturbation import Candidate, find_candidates
from kl_lens.sensitivity.sweep import Progress, Sweep
from kl_lens.text import Windows
from tests.families import tiny_model
from tests.sensitivity.conftest import some_windows
from tests.sensitivity.test_pieces import contents


@dataclass
class World:
    """What a sweep needs, and what it gives in one process."""

    model: LoadedModel
    order: Order
    candidates: list[Candidate]
    windows: Windows
    whole: dict[str, list[Any]]

    @classmethod
    def made(cls, folder: Path, windows: Windows) -> World:
        tiny_model("mamba").save_pretrained(folder / "model")
        world = cls.opened(folder, windows)
        world.swept(folder / "whole", None)
        world.whole = contents(folder / "whole")
        return world

    @classmethod
    def opened(cls, folder: Path, windows: Windows) -> World:
        """A world without the one-process sweep to compare with."""
        place, how = str(folder / "model"), {"dtype": "float32", "device": "cpu"}
        model = load(place, **how)
        order = Order(place, how, model.fingerprint, FastEngine.name, DEFAULT_MEMORY, None, folder)
        return cls(
            model, order, find_candidates(model.anatomy, [Recipe("int4"), Recipe("int8")])[0], windows, {}
        )

    def swept(self, folder: Path, crew: Any, progress: Progress | None = None) -> Any:
        with Run.create(folder) as run:
            sweep = Sweep(self.model, run, crew=crew, progress=progress or Progress())
            return sweep.measure(self.candidates, self.windows)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Three windows of twenty tokens run together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageTask, "rows_at_once", 60)
        yield World.made(tmp_path_factory.mktemp("world"), some_windows(7, 20))


DRIVER = """
import sys, time
from pathlib import Path
from kl_lens.cluster.crew import HiredCrew
from kl_lens.cluster.processes import ProcessHands
from kl_lens.cluster.ray_pool import RayPool
from kl_lens.sensitivity.sweep import Progress
from tests.cluster.conftest import World
from tests.sensitivity.conftest import some_windows
world = World.opened(Path(sys.argv[2]), some_windows(int(sys.argv[3]), 512))
with HiredCrew(eval(sys.argv[1]), world.order, 2) as crew:
    pausing = Progress(advanced=lambda work, what: time.sleep(float(sys.argv[5])))
    print(world.swept(Path(sys.argv[4]), crew, pausing).measured)
"""


def driven(hands: str, world: World, folder: Path, pause: float = 0.0) -> list[str]:
    """A command that sweeps a world with two workers into folder/run, in its own process; `pause` after each commit
    leaves time to disturb it."""
    words = [hands, str(world.order.run), str(len(world.windows)), str(folder / "run"), str(pause)]
    return [sys.executable, "-c", DRIVER, *words]


def samples_in(folder: Path) -> int:
    """Candidate × window pairs in a run; another process may be writing it."""
    if not (folder / "run.sqlite").exists():
        return 0
    try:
        with Run.open(folder) as run:
            return sum(len(windows) for windows in run.measured_windows("calibration").values())
    except Exception:  # it is just making the file
        return 0
