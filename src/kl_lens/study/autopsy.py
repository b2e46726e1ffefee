"""`autopsy`: what is wrong with a GGUF, OpenVINO or MLX file, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from kl_lens import evaluation
from kl_lens.base.errors import KLLensError, TargetError
from kl_lens.evaluation.autopsy import Autopsy, perform_autopsy
from kl_lens.model import LanguageTask, LoadedModel
from kl_lens.run.folder import Run
from kl_lens.run.positions import BIN, longest_window
from kl_lens.run.records import ARTIFACT, Subject
from kl_lens.run.subjects import file_digest, outside_path
from kl_lens.study.evaluate import DEFAULT_TEXT
from kl_lens.study.events import Events
from kl_lens.study.plan import plan
from kl_lens.study.plan_settings import PlanSettings
from kl_lens.study.settings import (
    COUNT,
    MEMORY,
    THREADS,
    TOKENS,
    VERB_MODEL,
    Loading,
    WithLlamaCpp,
    command_of,
    number,
    option,
)
from kl_lens.study.workbench import Workbench
from kl_lens.targets import Target, computed_as, deployed, dissected
from kl_lens.targets.dissection import Dissection

KIND = "autopsy"  # of the run's results
LOGITS = 2**28  # of a long window: 1 GB


@dataclass(frozen=True, kw_only=True)
class AutopsySettings(WithLlamaCpp, Loading):
    verb: ClassVar[str] = "autopsy"
    weights: ClassVar[str] = MEMORY  # it looks at all of them

    file: Path = option(
        help="a .gguf file, an OpenVINO .xml, or a folder of llama.cpp, OpenVINO or mlx-lm",
        positional=True,
        metavar="FILE",
    )
    model: str | None = option(
        None, f"the original model: {VERB_MODEL} (default: the run's)", flag="--against", metavar="MODEL"
    )
    run: str | None = option(
        None,
        "a run of this model: keeps the result for its report, and plans for the same bytes",
        metavar="DIR",
    )
    text: str = option(DEFAULT_TEXT, "text that everything is measured on", metavar="TEXT")
    windows: int = option(8, "number of windows", kind=COUNT)
    window_length: int = option(256, "tokens per window", kind=TOKENS)
    positions: int = option(
        4, "long windows, to see whether the loss grows along the text; 0: do not look", kind=number(64)
    )
    threads: int | None = option(None, "of the runtime (default: its own choice)", kind=THREADS)


@dataclass
class AutopsyResult:
    autopsy: Autopsy
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """2: a fault; 3: none was found, but not everything could be checked."""
        return 2 if self.autopsy.faults else 3 if self.autopsy.unchecked else 0


def autopsy(settings: AutopsySettings, bench: Workbench, events: Events) -> AutopsyResult:
    target, dissection = dissected(settings.file)
    model, text, long = _original(settings, bench)
    with events.progress("autopsy") as progress:
        found = perform_autopsy(
            dissection, target, model, text, long=long, threads=settings.threads, progress=progress
        )
    result = AutopsyResult(found)
    if settings.run is not None and model is not None and text is not None:
        try:
            result.autopsy = _with_plan(found, settings, target, model, text, bench, events)
        except KLLensError as error:
            result.notes.append(f"No plan of the same bytes: {error}")
        _store(result.autopsy, dissection, target, settings)
    return result


def _original(
    settings: AutopsySettings, bench: Workbench
) -> tuple[LoadedModel | None, evaluation.EvaluationText | None, evaluation.EvaluationText | None]:
    """The original, the text, and longer windows of it."""
    if settings.run is not None:
        with Run.open(Path(settings.run)) as run:
            model = bench.model_of(run, settings)
    elif settings.model is not None:
        model = bench.model(settings)
    else:
        return None, None, None
    if not isinstance(model.task, LanguageTask):
        raise TargetError(f"{model.name}: autopsy compares language models; this one classifies images")
    text = evaluation.prepare(
        settings.text, model.task, window=settings.window_length, limit=settings.windows
    )
    return model, text, _long_windows(settings, model)


def _long_windows(settings: AutopsySettings, model: LoadedModel) -> evaluation.EvaluationText | None:
    """As long as the model and memory allow; None if the text has fewer than two."""
    vocabulary = model.anatomy.component(model.anatomy.head).shape[-2]
    length = min(longest_window(model.config), LOGITS // vocabulary) // BIN * BIN
    if settings.positions < 2 or length <= settings.window_length:
        return None
    text = evaluation.prepare(settings.text, model.task, window=length, limit=settings.positions)
    whole = tuple(window for window in text.items if len(window.ids) == length)
    return replace(text, items=whole) if len(whole) > 1 else None


def _with_plan(
    found: Autopsy,
    settings: AutopsySettings,
    target: Target,
    model: LoadedModel,
    text: evaluation.EvaluationText,
    bench: Workbench,
    events: Events,
) -> Autopsy:
    """What the run's measurements make of the same bytes, measured on the same text."""
    wanted = PlanSettings(
        run=settings.run, model=settings.model, target=target.name, max_bytes=found.bytes, dry_run=True,
        **settings.how,
    )  # fmt: skip
    ours = plan(wanted, bench, events).plans[-1]
    recipes = evaluation.planned_recipes(model, ours.assignment)
    session = evaluation.TorchSession(model, recipes, deployed=deployed(computed_as(target)))
    scores = evaluation.score_text(session, text, evaluation.TorchSession(model))
    kl = evaluation.divergence_values(scores)["kl_mean"]
    return replace(found, planned_kl=kl, planned_bytes=ours.file_bytes)


def _store(found: Autopsy, dissection: Dissection, target: Target, settings: AutopsySettings) -> None:
    """Once for each file: a later autopsy replaces it."""
    weights = dissection.files[-1]
    subject = Subject(ARTIFACT, None, target.name, {"path": outside_path(weights)}, file_digest(weights))
    with Run.open(Path(settings.run or "")) as run:
        run.note_command(["kl-lens", *command_of(settings)])
        run.store_result(KIND, subject, found.text, found.to_json())
