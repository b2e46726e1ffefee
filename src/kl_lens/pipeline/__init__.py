"""The verbs as settings and functions.

`perform(MeasureSettings(...))` does what `kl-lens measure ...` does, into a run folder, and returns the result. The
functions below it (`measure`, `plan`, `export`, …) are the same stages on opened models and records, for notebooks.

Example:
    >>> bench = Workbench()
    >>> perform(MeasureSettings(model="reference:mamba", windows=8, run="runs/mine"), bench)
    >>> perform(RankSettings(run="runs/mine", evaluation_windows=8), bench)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_lens.lazy import lazy_names

if TYPE_CHECKING:
    from kl_lens.pipeline.api import (
        benchmark,
        calibrate,
        evaluate,
        export,
        generate,
        measure,
        plan,
        rank,
        report,
        verify,
    )
    from kl_lens.pipeline.benchmarking import BenchmarkSettings
    from kl_lens.pipeline.calibrating import CalibrateSettings
    from kl_lens.pipeline.evaluating import EvaluateSettings
    from kl_lens.pipeline.events import Events
    from kl_lens.pipeline.exporting import ExportSettings
    from kl_lens.pipeline.generating import GenerateSettings
    from kl_lens.pipeline.importing import ImportLegacySettings
    from kl_lens.pipeline.inspecting import InspectSettings
    from kl_lens.pipeline.measuring import MeasureSettings
    from kl_lens.pipeline.planning import PlanSettings
    from kl_lens.pipeline.ranking import RankSettings
    from kl_lens.pipeline.reporting import ReportSettings
    from kl_lens.pipeline.running import RunSettings
    from kl_lens.pipeline.settings import command_of
    from kl_lens.pipeline.verbs import perform
    from kl_lens.pipeline.workbench import Workbench
else:
    _API = [
        "benchmark",
        "calibrate",
        "evaluate",
        "export",
        "generate",
        "measure",
        "plan",
        "rank",
        "report",
        "verify",
    ]
    # `generate` runs on small devices and loads no torch.
    __getattr__ = lazy_names(
        __name__,
        {
            "kl_lens.pipeline.api": _API,
            "kl_lens.pipeline.benchmarking": ["BenchmarkSettings"],
            "kl_lens.pipeline.calibrating": ["CalibrateSettings"],
            "kl_lens.pipeline.evaluating": ["EvaluateSettings"],
            "kl_lens.pipeline.events": ["Events"],
            "kl_lens.pipeline.exporting": ["ExportSettings"],
            "kl_lens.pipeline.generating": ["GenerateSettings"],
            "kl_lens.pipeline.importing": ["ImportLegacySettings"],
            "kl_lens.pipeline.inspecting": ["InspectSettings"],
            "kl_lens.pipeline.measuring": ["MeasureSettings"],
            "kl_lens.pipeline.planning": ["PlanSettings"],
            "kl_lens.pipeline.ranking": ["RankSettings"],
            "kl_lens.pipeline.reporting": ["ReportSettings"],
            "kl_lens.pipeline.running": ["RunSettings"],
            "kl_lens.pipeline.settings": ["command_of"],
            "kl_lens.pipeline.verbs": ["perform"],
            "kl_lens.pipeline.workbench": ["Workbench"],
        },
    )

__all__ = [
    "BenchmarkSettings",
    "CalibrateSettings",
    "EvaluateSettings",
    "Events",
    "ExportSettings",
    "GenerateSettings",
    "ImportLegacySettings",
    "InspectSettings",
    "MeasureSettings",
    "PlanSettings",
    "RankSettings",
    "ReportSettings",
    "RunSettings",
    "Workbench",
    "benchmark",
    "calibrate",
    "command_of",
    "evaluate",
    "export",
    "generate",
    "measure",
    "perform",
    "plan",
    "rank",
    "report",
    "verify",
]
