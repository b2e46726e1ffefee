"""The commands: each has its settings and its function in the module of its name, which loads on first use."""

from __future__ import annotations

import gc
import importlib
from typing import Any

from kl_lens.study.session import Session
from kl_lens.study.settings import Settings


def settings_of(verb: str) -> type[Settings]:
    home = _home(verb)
    return next(
        kind for kind in vars(home).values()
        if isinstance(kind, type) and issubclass(kind, Settings) and kind.__module__ == home.__name__
    )  # fmt: skip


def perform(settings: Settings, session: Session | None = None) -> Any:
    """Checks the settings, runs the command and returns its result. Prints nothing.

    Example:
        >>> perform(MeasureSettings.of(model="reference:mamba", windows=8)).measurements
    """
    settings.check()
    return getattr(_home(settings.verb), settings.verb)(settings, session or Session())


def exit_code(result: Any) -> int:
    """Of a command with this result: its own, or 1 if part of the work failed."""
    return int(getattr(result, "exit_code", bool(getattr(result, "failures", None))))


def _home(verb: str) -> Any:
    gc.disable()  # it takes an eighth of the time in which torch and transformers load
    try:
        return importlib.import_module(f"kl_lens.study.{verb}")
    finally:
        gc.enable()
