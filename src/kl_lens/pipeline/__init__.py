"""The commands as Python: `Study` has one method for each; every command has a settings class and a function.

Example:
    >>> study = Study("reference:mamba", folder="runs/mine")
    >>> study.measure(windows=8)
    >>> study.do(RankSettings(run="runs/mine", evaluation_windows=8))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_lens.lazy import lazy_names

if TYPE_CHECKING:
    from kl_lens.pipeline.autopsying import AutopsySettings as AutopsySettings
    from kl_lens.pipeline.benchmarking import BenchmarkSettings as BenchmarkSettings
    from kl_lens.pipeline.calibrating import CalibrateSettings as CalibrateSettings
    from kl_lens.pipeline.evaluating import EvaluateSettings as EvaluateSettings
    from kl_lens.pipeline.events import Events as Events
    from kl_lens.pipeline.exporting import ExportSettings as ExportSettings
    from kl_lens.pipeline.generating import GenerateSettings as GenerateSettings
    from kl_lens.pipeline.importing import ImportLegacySettings as ImportLegacySettings
    from kl_lens.pipeline.inspecting import InspectSettings as InspectSettings
    from kl_lens.pipeline.measuring import MeasureSettings as MeasureSettings
    from kl_lens.pipeline.merging import MergeSettings as MergeSettings
    from kl_lens.pipeline.plan_settings import PlanSettings as PlanSettings
    from kl_lens.pipeline.ranking import RankSettings as RankSettings
    from kl_lens.pipeline.reporting import ReportSettings as ReportSettings
    from kl_lens.pipeline.running import RunSettings as RunSettings
    from kl_lens.pipeline.settings import command_of as command_of
    from kl_lens.pipeline.study import Study as Study
    from kl_lens.pipeline.verbs import perform as perform
    from kl_lens.pipeline.workbench import Workbench as Workbench
else:
    # `generate` runs on small devices and loads no torch.
    __getattr__, __all__ = lazy_names(__name__)
