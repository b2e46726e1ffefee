"""`paper`: what only a reproduction of the paper needs. Ranks metrics, and reads published measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kl_lens.base.errors import RunError
from kl_lens.measuring.perturbation import Candidate
from kl_lens.measuring.sweep import Sweep, model_identity
from kl_lens.model import LoadedModel
from kl_lens.paper.layouts import read_legacy
from kl_lens.paper.ranking import Ranking, rank
from kl_lens.run.folder import CALIBRATION, EVALUATION, Run
from kl_lens.run.records import Component
from kl_lens.study import settings as of
from kl_lens.study.events import going_on
from kl_lens.study.measure import Hire, workers_for
from kl_lens.study.session import Session
from kl_lens.study.settings import Opening, Processes, Settings, group, option
from kl_lens.targets import deployed
from kl_lens.text.windows import Windows, refuse_overlap
from kl_lens.weights.recipes import Recipe

RANK = "rank"
IMPORT = "import"


@dataclass(frozen=True, kw_only=True)
class PaperSettings(Settings):
    what: str = option(
        help="rank: which metric predicts the loss on held-out text; import: read published sensitivity files",
        positional=True,
        choices=(RANK, IMPORT),
    )
    run: of.Folder | None = of.of_run()
    model: of.Model | None = of.moved_model()
    opening: Opening = group(Opening)
    weights: str = of.place_of_weights()
    processes: Processes = group(Processes)
    evaluation_text: of.Text = option("wikitext2:test", "rank: held-out text")
    evaluation_windows: of.Count = option(128, "rank: windows of held-out text")
    other_text: of.Names = option(
        (), "rank: also measure on these out-of-domain texts, comma-separated"
    )
    int4: Path | None = option(
        None, "import: the published file of 4 bits", metavar="FILE"
    )
    int8: Path | None = option(
        None, "import: the published file of 8 bits", metavar="FILE"
    )

    def check(self) -> None:
        super().check()
        if self.what == IMPORT and not (self.model and (self.int4 or self.int8)):
            raise RunError(
                "paper import needs --model MODEL, and --int4 FILE or --int8 FILE or both"
            )


@dataclass(frozen=True)
class Imported:
    folder: Path
    model: str
    measurements: int


def paper(settings: PaperSettings, session: Session) -> Ranking | Imported:
    if settings.what == IMPORT:
        return _imported(settings, session)
    with Run.open(Path(settings.run or of.DEFAULT_RUN)) as run:
        run.note_command(["kl-lens", *of.command_of(settings)])
        # With Ray, this process computes nothing.
        opening = (
            replace(settings.opening, device="cpu")
            if settings.processes.ray
            else settings.opening
        )
        model = session.model_of(run, settings.model, opening, weights=settings.weights)
        hire = partial(
            workers_for,
            settings.processes,
            model,
            settings.opening,
            settings.weights,
            session.events,
        )
        text = settings.evaluation_text
        windows = settings.evaluation_windows
        texts = settings.other_text
        return rank_metrics(session, run, model, text, windows, hire, other_texts=texts)


def _imported(settings: PaperSettings, session: Session) -> Imported:
    model = session.model(settings.model or "", settings.opening)
    measurements = []
    for name, path in (("int4", settings.int4), ("int8", settings.int8)):
        measurements += read_legacy(path, name, model.anatomy) if path else []
    with Run.create(of.new_run_folder(settings.run, model.name)) as run:
        if run.roles():
            raise RunError(
                f"{run.folder} already holds measurements; import into another --run"
            )
        run.identify(model_identity(model))
        run.store("imported", "measurements", [m.to_json() for m in measurements])
        run.note_command(["kl-lens", *of.command_of(settings)])
    return Imported(run.folder, model.name, len(measurements))


def rank_metrics(
    session: Session,
    run: Run,
    model: LoadedModel,
    text: str,
    windows: int,
    hire: Hire,
    *,
    other_texts: Sequence[str] = (),
    formats: Sequence[str] = (),
) -> Ranking:
    """Measures the candidates of a run, all or those in `formats`, on held-out text and stores the ranking."""
    events = session.events
    calibration = session.calibration(run, model.task)
    held_out = session.from_start(
        text, model.task, length=calibration.length, limit=windows
    )
    session.refuse_overlap(run, held_out, model.task)
    candidates = [c for c in _measured(run) if not formats or str(c.recipe) in formats]
    kernels = deployed(run.usual_target)
    # Read the statistics before the progress bar starts.
    model.weights.learnt_by(candidate.recipe for candidate in candidates)
    work = Sweep(model, run, deployed=kernels).operations_left(
        candidates, held_out, EVALUATION
    )
    with going_on(run.folder), hire(operations=work + len(other_texts)) as workers:

        def sweep(windows: Windows, role: str, title: str) -> None:
            with events.progress(title) as progress:
                how = Sweep(
                    model, run, progress=progress, deployed=kernels, workers=workers
                )
                how.measure(candidates, windows, role)

        sweep(held_out, EVALUATION, "damage on held-out text")
        identity = run.text_identity(CALIBRATION) or {}
        for name in other_texts:
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
    components = {
        c["name"]: Component.from_json(c) for c in run.identity.get("components", [])
    }
    measured = run.measured_windows(run.measured_role())
    candidates = [
        Candidate(components[name], Recipe.parse(text)) for name, text in measured
    ]
    if not candidates:
        raise RunError(f"{run.folder} holds no measurements; run kl-lens measure first")
    order = {name: index for index, name in enumerate(components)}
    return sorted(candidates, key=lambda c: (order[c.component.name], c.recipe))
