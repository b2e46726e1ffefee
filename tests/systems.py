"""Another operating system, pretended on Linux: what it lacks is missing for our code, and open files stay.

python -m pytest -p tests.systems --system windows …; libraries still see Linux. `./test --system` adds the encodings.
"""

import builtins
import errno
import fcntl
import importlib
import io
import os
import platform
import signal
import sys
from collections import Counter
from collections.abc import Callable
from multiprocessing import resource_tracker, set_start_method
from pathlib import PureWindowsPath
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import transformers

LACKING = {"windows": {"fcntl", "resource"}, "macos": set()}
PLATFORM = {"windows": "win32", "macos": "darwin"}
LONGEST_PATH = 180  # of the 260 characters that Windows allows, below a user's folder
FUNCTIONS = {
    "windows": ("fork", "pread", "preadv", "pwrite", "sched_getaffinity", "sysconf"),
    "macos": ("sched_getaffinity",),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--system", choices=sorted(PLATFORM))


@pytest.hookimpl(tryfirst=True)  # before the folder goes
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Neither system tells `Small` from `small`, and Windows has no names such as `con` and no long paths."""
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if item.config.getoption("--system") and folder:
        paths = [str(path.relative_to(folder)) for path in folder.rglob("*")]
        one_file = [path for path, n in Counter(map(str.lower, paths)).items() if n > 1]
        assert not one_file, "one file where case is ignored"
        assert not any(map(PureWindowsPath.is_reserved, map(PureWindowsPath, paths)))
        assert max(map(len, paths), default=0) < LONGEST_PATH


@pytest.hookimpl(tryfirst=True)  # before conftest.py imports KL Lens
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    system = early_config.known_args_namespace.system
    if system:
        pretend(system)


def pretend(system: str) -> None:
    assert torch
    assert transformers.AutoModelForCausalLM  # libraries are loaded as they are on Linux
    hide_modules(LACKING[system])
    for name in FUNCTIONS[system]:
        delattr(os, name)
    builtins.open = without_proc(open)
    io.text_encoding = with_encoding(io.text_encoding)
    set_start_method("spawn")
    if system == "windows":
        resource_tracker._HAVE_SIGMASK = False
        del signal.pthread_sigmask
        os.replace = os.rename = unless_open(os.replace)
        os.unlink = os.remove = unless_open(os.unlink)
        psutil.Process.memory_info = with_peak(psutil.Process.memory_info)
    spelling = {"x86_64": "AMD64", "aarch64": "ARM64"}[platform.machine()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "platform", PLATFORM[system])
        name = spelling if system == "windows" else "arm64"
        patch.setattr(platform, "machine", lambda: name)
        importlib.import_module("kl_lens.base.system")


def hide_modules(names: set[str]) -> None:
    real = builtins.__import__

    def find(name: str, globals: Any = None, *others: Any, **more: Any) -> Any:
        if globals and str(globals.get("__name__")).startswith("kl_lens"):
            if name in names:
                raise ModuleNotFoundError(f"No module named {name!r}")
            if name == "msvcrt":
                return SimpleNamespace(LK_NBLCK=2, locking=lock)
        return real(name, globals, *others, **more)

    builtins.__import__ = find


def lock(handle: int, mode: int, count: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, "Permission denied") from None


def without_proc(real: Callable[..., Any]) -> Callable[..., Any]:
    def opened(path: Any, mode: str = "r", *settings: Any, **more: Any) -> Any:
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("kl_lens"):
            if str(path).startswith("/proc/"):
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
            assert "b" in mode or "encoding" in more, f"{path}: text without its encoding"
        return real(path, mode, *settings, **more)

    return opened


def with_encoding(real: Callable[..., str]) -> Callable[..., str]:
    """Each system has its own default for the text of `Path`: ours has none."""

    def encoding_of(encoding: str | None, level: int = 2) -> str:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__") == "pathlib":
            frame = frame.f_back
        name = str(frame.f_globals.get("__name__"))
        assert encoding or not name.startswith("kl_lens"), "text without its encoding"
        return real(encoding, level)

    return encoding_of


def unless_open(real: Callable[..., None]) -> Callable[..., None]:
    """Windows replaces, renames and removes no file that is open or mapped."""

    def change(*paths: Any, **settings: Any) -> None:
        if "dir_fd" not in settings and any(is_open(path) for path in paths):
            raise PermissionError(errno.EACCES, "Permission denied", str(paths[-1]))
        real(*paths, **settings)

    return change


def is_open(path: Any) -> bool:
    place = os.path.realpath(path)
    for handle in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{handle}") == place:
            return True
    with os.fdopen(os.open("/proc/self/maps", os.O_RDONLY)) as maps:
        return any(line.rstrip("\n").endswith(f" {place}") for line in maps)


def with_peak(real: Callable[..., Any]) -> Callable[..., Any]:
    def memory(process: psutil.Process) -> Any:
        used = real(process)
        return SimpleNamespace(rss=used.rss, peak_wset=used.rss)

    return memory
