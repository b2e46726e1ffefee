"""Sample runs, made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kl_lens.reporting import write_report
from kl_lens.run.folder import Run
from tests.reporting.sample import make_run


@pytest.fixture(scope="session")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("sample") / "run")


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
