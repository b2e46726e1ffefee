"""Two cores, two processes: `--beside FOLDER` runs a folder in a process of its own, at the same time.

The other process hands each report over as it comes, so that one run has one line of dots, one list of the slowest,
one summary and one exit status. Folders are divided by name and not by who is free: which tests share a process
never depends on time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO

import pytest

# Exit statuses whose reason the reports say themselves.
UNDERSTOOD = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--beside", action="append", default=[], help="run this folder in a second process")
    parser.addoption("--hand-over", help="write every report to this file (given by --beside)")


def pytest_configure(config: pytest.Config) -> None:
    if beside := config.getoption("--beside"):
        config.option.ignore = [*(config.option.ignore or []), *beside]
        config.pluginmanager.register(Beside(config, beside))
    elif path := config.getoption("--hand-over"):
        config.pluginmanager.register(HandsOver(config, Path(path)))


class HandsOver:
    """In the second process: a line of JSON for each report."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._file = path.open("w")

    def _write(self, message: dict[str, object]) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write({"collected": len(session.items)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


class Beside:
    """In the first process: starts the second, and takes its reports as if the tests had run here."""

    def __init__(self, config: pytest.Config, folders: list[str]) -> None:
        self._config = config
        self._folders = folders
        self._scratch = tempfile.TemporaryDirectory(prefix="kl-lens-tests-")
        self._log = Path(self._scratch.name) / "output"
        reports = Path(self._scratch.name) / "reports"
        reports.touch()
        self._reports: IO[str] = reports.open()
        self._rest = ""
        selected = ["-m", config.option.markexpr] if config.option.markexpr else []
        command = [sys.executable, "-m", "pytest", "-p", "tests.side_by_side", "--hand-over", str(reports)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *selected, *folders], cwd=config.rootpath, stdout=log, stderr=subprocess.STDOUT
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        result = yield
        self._take(item.session)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        result = yield
        while self._process.poll() is None and not (session.shouldfail or session.shouldstop):
            self._take(session)
            time.sleep(0.2)
        self._take(session)
        if self._process.poll() not in (None, *UNDERSTOOD):
            self._say_that_it_died()
        return result

    def pytest_unconfigure(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reports.close()
        self._scratch.cleanup()

    def _take(self, session: pytest.Session) -> None:
        *lines, self._rest = (self._rest + self._reports.read()).split("\n")
        for line in lines:
            message = json.loads(line)
            if "collected" in message:
                session.testscollected += message["collected"]
                continue
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=message)
            self._config.hook.pytest_runtest_logreport(report=report)

    def _say_that_it_died(self) -> None:
        """A crash, or an error before the first test: what it last said stands in the summary as one failure."""
        status = self._process.returncode
        said = "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
        name = f"the process of {', '.join(self._folders)} (exit status {status})"
        self._config.hook.pytest_runtest_logreport(
            report=pytest.TestReport(
                nodeid=name,
                location=(name, None, name),
                keywords={},
                outcome="failed",
                longrepr=said,
                when="call",
            )
        )
