"""`paper`: which metric predicts the loss on held-out text, as the paper asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kl_lens.base.errors import RunError
from kl_lens.judging.ranking import Ranking as Ranking, rank
from kl_lens.measuring.perturbation import Candidate
from kl_lens.measuring.sweep import Sweep
from kl_lens.model import LoadedModel
from kl_lens.run.folder import CALIBRATION, EVALUATION, Run
from kl_lens.study import settings as of
from kl_lens.study.events import going_on
from kl_lens.study.measure import workers_for
from kl_lens.study.session import Session
from kl_lens.study.settings import (
    Opening,
    Processes,
    Settings,
    group,
    option,
    with_options,
)
from kl_lens.targets import deployed
from kl_lens.text.windows import Windows, refuse_overlap
from kl_lens.weights.recipes import Recipe


@with_options
class PaperSettings(Settings):
    run: of.Folder | None = of.of_run()
    model: of.Model | None = of.moved_model()
    opening: Opening = group(Opening)
    processes: Processes = group(Processes)
    evaluation_text: of.Text = option("wikitext2:test", "held-out text")
    evaluation_windows: of.Count = option(128, "windows of held-out text")
    other_text: of.Names = option(
        (), "also measure on these out-of-domain texts, comma-separated"
    )


def paper(settings: PaperSettings, session: Session) -> Ranking:
    with Run.open(Path(settings.run or of.DEFAULT_RUN)) as run:
        run.note_command(["kl-lens", *of.command_of(settings)])
        # With Ray, this process computes nothing.
        opening = (
            replace(settings.opening, device="cpu")
            if settings.processes.ray
            else settings.opening
        )
        model = session.model_of(run, settings.model, opening)
        return _ranked(settings, session, run, model)


def _ranked(
    settings: PaperSettings, session: Session, run: Run, model: LoadedModel
) -> Ranking:
    """Measures the candidates of a run on held-out text and stores the ranking."""
    events = session.events
    calibration = session.calibration(run, model.task)
    held_out = session.from_start(
        settings.evaluation_text,
        model.task,
        length=calibration.length,
        limit=settings.evaluation_windows,
    )
    session.refuse_overlap(run, held_out, model.task)
    candidates = _measured(run)
    kernels = deployed(run.usual_target)
    # Read the statistics before the progress bar starts.
    model.weights.learnt_by(candidate.recipe for candidate in candidates)
    work = Sweep(model, run, deployed=kernels).operations_left(
        candidates, held_out, EVALUATION
    )
    hired = workers_for(
        settings.processes,
        model,
        settings.opening,
        events,
        operations=work + len(settings.other_text),
    )
    with going_on(run.folder), hired as workers:

        def sweep(windows: Windows, role: str, title: str) -> None:
            with events.progress(title) as progress:
                sweeping = Sweep(
                    model, run, progress=progress, deployed=kernels, workers=workers
                )
                sweeping.measure(candidates, windows, role)

        sweep(held_out, EVALUATION, "damage on held-out text")
        identity = run.text_identity(CALIBRATION) or {}
        for name in settings.other_text:
            second = model.task.drawn(
                name, **{key: identity[key] for key in ("windows", "length", "seed")}
            )
            refuse_overlap(second, held_out)
            sweep(
                second,
                f"{CALIBRATION}:{Path(second.source).stem}",
                f"calibration on {second.source}",
            )
    ranking = rank(run)
    run.store("ranking", "latest", ranking.to_json())
    return ranking


def _measured(run: Run) -> list[Candidate]:
    components = {component.name: component for component in run.components}
    measured = run.measured_windows(run.measured_role())
    candidates = [
        Candidate(components[name], Recipe.parse(text)) for name, text in measured
    ]
    if not candidates:
        raise RunError(f"{run.folder} holds no measurements; run kl-lens measure first")
    order = {name: index for index, name in enumerate(components)}
    return sorted(candidates, key=lambda c: (order[c.component.name], c.recipe))
