"""Finds the settings class and the function of each command. A command's libraries load on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kl_lens.study.events import Events
from kl_lens.study.settings import Settings, WithLlamaCpp

if TYPE_CHECKING:
    from kl_lens.study.workbench import Workbench

# In pipeline order. A new command needs one module here and one in `cli/` that shows its result.
VERBS = (
    "run",
    "inspect",
    "calibrate",
    "measure",
    "merge",
    "plan",
    "export",
    "evaluate",
    "benchmark",
    "autopsy",
    "generate",
    "report",
    "publish",
    "paper",
    "doctor",
)


def settings_of(verb: str) -> type[Settings]:
    """`plan` → PlanSettings."""
    return getattr(_home(verb), f"{verb.capitalize()}Settings")


def perform(settings: Settings, bench: Workbench | None = None, events: Events | None = None) -> Any:
    """Checks the settings, runs the command and returns its result. Prints nothing.

    Example:
        >>> perform(MeasureSettings(model="reference:mamba", windows=8)).measurements
    """
    settings.check()
    if isinstance(settings, WithLlamaCpp) and settings.llama_cpp is not None:
        from kl_lens.targets.gguf.library import use_library

        use_library(settings.llama_cpp)
    function: Callable[..., Any] = getattr(_home(settings.verb), settings.verb)
    if not settings.opens_models:
        return function(settings, events or Events())
    from kl_lens.study.workbench import Workbench

    return function(settings, bench or Workbench(events), events or Events())


def _home(verb: str) -> Any:
    return importlib.import_module(f"kl_lens.study.{verb}")
