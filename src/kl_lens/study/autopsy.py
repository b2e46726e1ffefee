"""`autopsy`: what is wrong with a GGUF, OpenVINO or MLX file, whoever made it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from kl_lens import judging
from kl_lens.autopsy import perform_autopsy
from kl_lens.base.errors import KLLensError, TargetError
from kl_lens.model import LanguageTask
from kl_lens.run.autopsies import Autopsy
from kl_lens.run.folder import Run
from kl_lens.run.records import ARTIFACT, Subject
from kl_lens.run.subjects import file_digest, outside_path
from kl_lens.study import settings as of
from kl_lens.study.evaluate import DEFAULT_TEXT
from kl_lens.study.plan import plan_within
from kl_lens.study.planner import TargetPlanner
from kl_lens.study.session import Session
from kl_lens.study.settings import (
    VERB_MODEL,
    Limits,
    Opening,
    Settings,
    group,
    option,
    with_options,
)
from kl_lens.targets import computed_as, deployed, dissected

KIND = "autopsy"  # of the run's results
WINDOW = 256  # tokens


@with_options
class AutopsySettings(Settings):
    file: Path = option(
        help="a .gguf file, an OpenVINO .xml, or a folder of llama.cpp, OpenVINO or mlx-lm",
        positional=True,
        metavar="FILE",
    )
    model: of.Model | None = option(
        None, f"the original: {VERB_MODEL} (default: the run's)", former=("against",)
    )
    opening: Opening = group(Opening, weights=None, working_memory=None)
    run: of.Folder | None = option(
        None,
        "a run of this model: keeps the result for its report, and plans for the same bytes",
    )
    text: of.Text = option(DEFAULT_TEXT, "text that everything is measured on")
    windows: of.Count = option(8, "number of windows")
    window_length: of.Tokens | None = option(
        None, f"tokens per window (default: {WINDOW})"
    )
    threads: of.Threads | None = option(None, "of the runtime (default: its own choice)")


@dataclass
class AutopsyResult:
    autopsy: Autopsy
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """2: a fault; 3: none was found, but not everything could be checked."""
        return 2 if self.autopsy.faults else 3 if self.autopsy.unchecked else 0


def autopsy(settings: AutopsySettings, session: Session) -> AutopsyResult:
    target, dissection = dissected(settings.file)
    opening = replace(settings.opening, weights=of.MEMORY)
    with ExitStack() as stack:
        run = (
            stack.enter_context(Run.open(Path(settings.run)))
            if settings.run is not None
            else None
        )
        model = None
        text = None
        if run is not None:
            model = session.model_of(run, settings.model, opening)
        elif settings.model is not None:
            model = session.model(settings.model, opening)
        if model is not None:
            if not isinstance(model.task, LanguageTask):
                raise TargetError(
                    f"{model.name}: autopsy needs a language model; this one classifies images"
                )
            window = settings.window_length or min(WINDOW, model.task.window_length)
            limit = settings.windows
            text = judging.prepare(settings.text, model.task, window=window, limit=limit)
            session.say_note(text.windows)
        with session.events.progress("autopsy") as progress:
            report = perform_autopsy(
                dissection,
                target,
                model,
                text,
                threads=settings.threads,
                progress=progress,
            )
        if run is None or model is None or text is None:
            return AutopsyResult(report)
        notes = []
        try:
            # What the run's measurements make of the same bytes, measured on the same text.
            limits = Limits(max_bytes=report.bytes)
            planner = TargetPlanner(
                session, run, target.name, opened=lambda: model, limits=limits
            )
            table = run.table(target=target.name, predicted=True)
            best = plan_within(planner, table)
            recipes = judging.planned_recipes(model, best.assignment)
            as_deployed = judging.TorchSession(
                model, recipes, deployed=deployed(computed_as(target))
            )
            scores = judging.score_text(as_deployed, text, judging.TorchSession(model))
            kl = judging.divergence_values(scores)["kl_mean"]
            report = replace(report, planned_kl=kl, planned_bytes=best.file_bytes)
        except KLLensError as error:
            notes.append(f"No plan of the same bytes: {error}")
        # Once for each file: a later autopsy replaces it.
        weights = dissection.files[-1]
        subject = Subject(
            ARTIFACT,
            None,
            target.name,
            {"path": outside_path(weights)},
            file_digest(weights),
        )
        run.note_command(["kl-lens", *of.command_of(settings)])
        run.store_result(KIND, subject, report.text, report.to_json())
        return AutopsyResult(report, notes)
