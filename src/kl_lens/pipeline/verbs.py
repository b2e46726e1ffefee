"""Finds the settings class and the function of each command. A command's libraries load on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kl_lens.pipeline.events import Events
from kl_lens.pipeline.settings import Settings, WithLlamaCpp

if TYPE_CHECKING:
    from kl_lens.pipeline.workbench import Workbench

# In pipeline order. A new command needs one module here and one in `cli/` that shows its result.
HOMES = {
    "run": "running",
    "inspect": "inspecting",
    "calibrate": "calibrating",
    "measure": "measuring",
    "merge": "merging",
    "rank": "ranking",
    "plan": "planning",
    "export": "exporting",
    "evaluate": "evaluating",
    "benchmark": "benchmarking",
    "autopsy": "autopsying",
    "generate": "generating",
    "report": "reporting",
    "publish": "publishing",
    "import-legacy": "importing",
    "doctor": "doctoring",
}


def settings_of(verb: str) -> type[Settings]:
    """`import-legacy` → ImportLegacySettings."""
    name = "".join(part.capitalize() for part in verb.split("-")) + "Settings"
    return getattr(_home(verb), name)


def perform(settings: Settings, bench: Workbench | None = None, events: Events | None = None) -> Any:
    """Checks the settings, runs the command and returns its result. Prints nothing.

    Example:
        >>> perform(MeasureSettings(model="reference:mamba", windows=8)).measurements
    """
    settings.check()
    if isinstance(settings, WithLlamaCpp) and settings.llama_cpp is not None:
        from kl_lens.targets.gguf.library import use_library

        use_library(settings.llama_cpp)
    function: Callable[..., Any] = getattr(_home(settings.verb), settings.verb.replace("-", "_"))
    if not settings.opens_models:
        return function(settings, events or Events())
    from kl_lens.pipeline.workbench import Workbench

    return function(settings, bench or Workbench(events), events or Events())


def _home(verb: str) -> Any:
    return importlib.import_module(f"kl_lens.pipeline.{HOMES[verb]}")
