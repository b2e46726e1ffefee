"""The commands as Python: `Study` has one method for each; every command has a settings class and a function.

Example:
    >>> study = Study("reference:mamba", folder="runs/mine")
    >>> study.measure(windows=8)
    >>> study.do(PaperSettings(what="rank", run="runs/mine"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kl_lens.base.lazy import lazy_names

if TYPE_CHECKING:
    from kl_lens.study.autopsy import AutopsySettings as AutopsySettings
    from kl_lens.study.benchmark import BenchmarkSettings as BenchmarkSettings
    from kl_lens.study.calibrate import CalibrateSettings as CalibrateSettings
    from kl_lens.study.evaluate import EvaluateSettings as EvaluateSettings
    from kl_lens.study.events import Events as Events
    from kl_lens.study.export import ExportSettings as ExportSettings
    from kl_lens.study.generate import GenerateSettings as GenerateSettings
    from kl_lens.study.inspect import InspectSettings as InspectSettings
    from kl_lens.study.measure import MeasureSettings as MeasureSettings
    from kl_lens.study.merge import MergeSettings as MergeSettings
    from kl_lens.study.paper import PaperSettings as PaperSettings
    from kl_lens.study.plan import PlanSettings as PlanSettings
    from kl_lens.study.report import ReportSettings as ReportSettings
    from kl_lens.study.run import RunSettings as RunSettings
    from kl_lens.study.session import Session as Session
    from kl_lens.study.settings import command_of as command_of
    from kl_lens.study.study import Study as Study
    from kl_lens.study.verbs import perform as perform
else:
    # `generate` runs on small devices and loads no torch.
    __getattr__, __all__ = lazy_names(__name__)
