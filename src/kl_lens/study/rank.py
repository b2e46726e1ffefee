"""`rank`: which metric best predicts the damage on held-out text?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from kl_lens.base.errors import RunError
from kl_lens.measuring.correlation import Ranking, rank as compare_metrics
from kl_lens.measuring.engines import DEFAULT_MEMORY
from kl_lens.measuring.perturbation import Candidate
from kl_lens.measuring.sweep import Sweep
from kl_lens.measuring.workers import Workers
from kl_lens.model import LoadedModel
from kl_lens.run.folder import CALIBRATION, EVALUATION, Run
from kl_lens.run.records import Component
from kl_lens.study.events import Events, going_on
from kl_lens.study.settings import COUNT, SIZE, FromDisk, OfRun, command_of, option
from kl_lens.study.spreading import SeveralProcesses, workers_for
from kl_lens.study.workbench import Workbench
from kl_lens.targets import deployed
from kl_lens.text import Windows, refuse_overlap
from kl_lens.weights.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class RankSettings(SeveralProcesses, FromDisk, OfRun):
    verb: ClassVar[str] = "rank"

    evaluation_text: str = option("wikitext2:test", "held-out text", metavar="TEXT")
    evaluation_windows: int = option(128, "windows of held-out text", kind=COUNT)
    other_text: tuple[str, ...] = option(
        (), "also measure on this out-of-domain text (may be repeated)", repeated=True, metavar="TEXT"
    )
    memory_budget: int = option(DEFAULT_MEMORY, "for cached states", kind=SIZE)


def rank(settings: RankSettings, bench: Workbench, events: Events) -> Ranking:
    with Run.open(settings.run_folder) as run:
        run.note_command(["kl-lens", *command_of(settings)])
        # With Ray, this process computes nothing.
        model = bench.model_of(run, replace(settings, device="cpu") if settings.ray else settings)
        length = bench.calibration(run, model.task).length
        held_out = bench.from_start(
            settings.evaluation_text, model.task, length=length, limit=settings.evaluation_windows
        )
        bench.refuse_overlap(run, held_out, model.task)
        sweep = Sweep(model, run, deployed=deployed(run.usual_target))
        left = sweep.operations_left(_measured(run), held_out, EVALUATION) + len(settings.other_text)
        budget = settings.memory_budget
        with going_on(run.folder), workers_for(settings, settings, budget, model, left, events) as workers:
            return rank_run(run, model, held_out, settings.other_text, budget, events, workers)


def rank_run(
    run: Run,
    model: LoadedModel,
    held_out: Windows,
    other_texts: Sequence[str] = (),
    memory_budget: int = DEFAULT_MEMORY,
    events: Events | None = None,
    workers: Workers | None = None,
) -> Ranking:
    """Measures every candidate of a run on held-out text and stores the ranking."""
    events = events or Events()
    candidates = _measured(run)
    calibration = run.text_identity(CALIBRATION)
    assert calibration is not None
    kernels = deployed(run.usual_target)
    # Read the statistics before the progress bar starts.
    model.weights.learnt_by(candidate.recipe for candidate in candidates)

    def sweep(windows: Windows, role: str, title: str) -> None:
        with events.progress(title) as progress:
            how = Sweep(
                model, run, memory_budget=memory_budget, progress=progress, deployed=kernels, workers=workers
            )
            how.measure(candidates, windows, role)

    sweep(held_out, EVALUATION, "damage on held-out text")
    how = {name: calibration[name] for name in ("windows", "length", "seed")}
    for text in other_texts:
        other = model.task.drawn(text, **how)
        refuse_overlap(other, held_out)
        sweep(other, f"{CALIBRATION}:{Path(other.source).stem}", f"calibration on {other.source}")
    ranking = compare_metrics(run)
    run.store("ranking", "latest", ranking.to_json())
    return ranking


def _measured(run: Run) -> list[Candidate]:
    components = {c["name"]: Component.from_json(c) for c in run.identity.get("components", [])}
    measured = run.measured_windows(run.measured_role())
    candidates = [Candidate(components[name], Recipe.parse(text)) for name, text in measured]
    if not candidates:
        raise RunError(f"{run.folder} holds no measurements; run kl-lens measure first")
    order = {name: index for index, name in enumerate(components)}
    return sorted(candidates, key=lambda c: (order[c.component.name], c.recipe))
