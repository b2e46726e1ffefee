"""Sample runs, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kl_lens.reporting import write_report
from kl_lens.runs import Run
from tests.reporting.sample import make_run, store_points


@pytest.fixture(scope="session")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("sample") / "run")


@pytest.fixture(scope="session")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many components and recipes as a hybrid of 2.7 billion weights has."""
    kinds = [f"{kind}_proj" for kind in ("in", "x", "dt", "out", "q", "k", "v", "o")]
    formats = ("int4", "int8", "int4-g32", "int4-g64", "q8_0", "q4_0", "q5_0", "q5_1")
    folder = tmp_path_factory.mktemp("large") / "run"
    make_run(folder, blocks=50, kinds=kinds, formats=formats, stages=("plan", "verify"))
    with Run.open(folder) as run:
        store_points(run)
    return folder


@pytest.fixture(scope="session")
def sample_page(sample_run: Path) -> str:
    return page_of(sample_run)


def page_of(folder: Path) -> str:
    with Run.open(folder) as run:
        return write_report(run).read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def make_page(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    def make(**settings: object) -> str:
        return page_of(make_run(tmp_path_factory.mktemp("run") / "run", **settings))  # type: ignore[arg-type]

    return make
