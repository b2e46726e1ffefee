"""The stages of a run, in their order: what is done, resumed, forecast and shown is this list."""

from __future__ import annotations

from collections.abc import Sequence

from kl_lens.study.run.exporting import (
    ExportFP16,
    ExportRecommended,
    ExportRivals,
    ExportStock,
)
from kl_lens.study.run.making import (
    Calibrate,
    Inspect,
    Measure,
    MeasureCaches,
    MeasurePaper,
    Plan,
    PlanFP16,
    PlanPaper,
    PlanStock,
)
from kl_lens.study.run.proving import (
    Benchmark,
    Compare,
    Judge,
    Rank,
    Report,
    Samples,
)
from kl_lens.study.run.settings import NONE, RunSettings
from kl_lens.study.run.stage import Stage


def stages_of(
    settings: RunSettings, targets: Sequence[str], *, ahead: bool
) -> list[Stage]:
    """`ahead`: files are read while a GPU measures, so that comparing them with PyTorch waits for the first target."""
    judges = "evaluate" not in settings.without
    compare = [Compare()] if judges else []
    # The FP16 file first: it shows whether a target supports the model, and --budget is a share of its size.
    stages: list[Stage] = [Inspect(), PlanFP16(), *map(ExportFP16, targets)]
    if not ahead:
        stages += compare
    if settings.paper:
        stages.append(MeasurePaper())
        if "rank" not in settings.without:
            stages.append(Rank())
        stages.append(PlanPaper())
    stages.append(Calibrate())
    if ahead and judges and settings.rivals != NONE:
        for target in targets:
            stages += [PlanStock(target), ExportStock(target)]
    for target in targets:
        if settings.limits.use is not None:
            stages.append(MeasureCaches(target))
        stages.append(Measure(target))
        if ahead and target == targets[0]:
            stages += compare
        stages += [Plan(target), ExportRecommended(target)]
    stages += map(ExportRivals, targets)
    if judges:
        stages += [Judge(), Samples()]
    if "benchmark" not in settings.without:
        stages.append(Benchmark())
    if "report" not in settings.without:
        stages.append(Report())
    return stages
