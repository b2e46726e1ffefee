"""The commands: where each has its settings and its function. A command's libraries load on first use."""

from __future__ import annotations

import importlib
from typing import Any

from kl_lens.study.session import Session
from kl_lens.study.settings import Settings

# In pipeline order: verb → its settings, in the module of that name, beside the function of that name. A new command
# needs one line here and one module in `cli/` that shows its result.
VERBS = {
    "run": "RunSettings",
    "inspect": "InspectSettings",
    "calibrate": "CalibrateSettings",
    "measure": "MeasureSettings",
    "merge": "MergeSettings",
    "plan": "PlanSettings",
    "export": "ExportSettings",
    "evaluate": "EvaluateSettings",
    "benchmark": "BenchmarkSettings",
    "autopsy": "AutopsySettings",
    "generate": "GenerateSettings",
    "report": "ReportSettings",
    "publish": "PublishSettings",
    "paper": "PaperSettings",
    "doctor": "DoctorSettings",
}


def settings_of(verb: str) -> type[Settings]:
    return getattr(_home(verb), VERBS[verb])


def perform(settings: Settings, session: Session | None = None) -> Any:
    """Checks the settings, runs the command and returns its result. Prints nothing.

    Example:
        >>> perform(MeasureSettings.of(model="reference:mamba", windows=8)).measurements
    """
    settings.check()
    return getattr(_home(settings.verb), settings.verb)(settings, session or Session())


def _home(verb: str) -> Any:
    return importlib.import_module(f"kl_lens.study.{verb}")
