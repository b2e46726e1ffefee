"""`measure`: how much each component suffers from each format."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from kl_lens.base.errors import KLLensError, UnlearntError
from kl_lens.measuring import screening
from kl_lens.measuring.engines import DEFAULT_MEMORY, ENGINES
from kl_lens.measuring.perturbation import Candidate, crossed, find_candidates, name_pattern
from kl_lens.measuring.pieces import key_of
from kl_lens.measuring.precision import PRECISIONS
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.measuring.sweep import Progress, Sweep, SweepResult, error_work
from kl_lens.model import Anatomy, LoadedModel
from kl_lens.paper import write_legacy
from kl_lens.run.folder import CALIBRATION, SCREENED, Run, role_as
from kl_lens.run.merging import SHARDS
from kl_lens.run.records import Component, Measurement
from kl_lens.study.calibrate import CalibrateSettings
from kl_lens.study.costs import JobEstimate
from kl_lens.study.estimating import Estimator
from kl_lens.study.events import Events, going_on
from kl_lens.study.menus import menu_for
from kl_lens.study.plan_settings import PlanSettings, check_held_out
from kl_lens.study.settings import (
    COUNT,
    NAMES,
    SEED,
    SHARE,
    SIZE,
    TOKENS,
    FromDisk,
    HeldOut,
    OfModel,
    Settings,
    command_of,
    grouped,
    new_run_folder,
    option,
)
from kl_lens.study.spreading import (
    SLURM,
    SeveralProcesses,
    several,
    shard_name,
    share_of,
    workers_for,
)
from kl_lens.study.staging import Limits, StagedSearch, expected_work
from kl_lens.study.target_planner import TargetPlanner
from kl_lens.study.workbench import Workbench
from kl_lens.targets import TARGETS, computed_as, deployed, get_target, menu_of
from kl_lens.weights.recipes import Recipe

DEFAULT_FORMATS = ("int4", "int8")
calibration_text, _what, _how = grouped("calibration text"), grouped("what to measure"), grouped("how")
_near = partial(grouped("measure only what a plan can use (give one)"), excludes="limit")


@dataclass(frozen=True, kw_only=True)
class Calibration(Settings):
    """The text that the sweep measures on."""

    text: str = calibration_text(
        "wikitext2:train", "name:split, or a .txt, .jsonl, .jsonl.zst or .parquet file or folder"
    )
    windows: int = calibration_text(64, "number of windows", kind=COUNT)
    window_length: int | None = calibration_text(
        None, "tokens per window (default: 512; 16 images)", kind=TOKENS
    )
    seed: int = calibration_text(42, "chooses the windows", kind=SEED)


@dataclass(frozen=True, kw_only=True)
class MeasureSettings(SeveralProcesses, Calibration, HeldOut, OfModel, FromDisk):
    verb: ClassVar[str] = "measure"

    run: str | None = option(None, "the run folder (default: runs/<model>)", metavar="DIR")
    target: str | None = _what(
        None,
        "measure for this target: its formats, and activations quantized as its kernels do it",
        choices=TARGETS,
    )
    formats: tuple[str, ...] | None = _what(
        None,
        "comma-separated; int4-g64+gptq also names the method (default: the target's formats, or int4,int8)",
        kind=NAMES,
    )
    methods: tuple[str, ...] = _what(
        (), "measure every format with each of these: rtn, search, imatrix, gptq", kind=NAMES
    )
    components: str | None = _what(None, "only components with a matching name", metavar="REGEX")
    max_loss: float | None = _near(None, "for the smallest plan with a KL of at most this", metavar="NATS")
    max_drop: float | None = _near(
        None, "for the smallest plan with a rise of perplexity of at most this, for example 3%", kind=SHARE
    )
    max_bytes: int | None = _near(None, "for the best plan of at most this size, for example 90MB", kind=SIZE)
    exhaustive: bool = _near(False, "measure every component in every recipe")
    engine: str = _how("fast", "plain: slow, for checking", choices=tuple(ENGINES))
    memory_budget: int = _how(
        DEFAULT_MEMORY,
        "memory for cached states, and for weights if the model is larger than this; on a GPU the default is most of "
        "its free memory",
        kind=SIZE,
    )
    precision: str | None = _how(
        None,
        "precision of matrix products on a GPU; tf32x3 is nearly as exact as float32; tf32 and bf16 add noise, which "
        "is reported (default: tf32 if its noise is 100 times below the median KL of every format, else tf32x3)",
        choices=PRECISIONS,
    )
    shard: str | None = several(
        None,
        "measure only the 3rd of 16 shards, into DIR/shards/03-of-16, for `kl-lens merge`; without a value: as the "
        "variables of a Slurm job array say",
        nargs="?",
        bare=SLURM,
        metavar="3/16",
    )
    estimate: bool = option(False, "only estimate time, memory and disk, with one process")
    legacy_json: Path | None = _how(
        None, "also write the paper's JSON layout, one file per bit width", metavar="FILE"
    )

    @property
    def menu(self) -> tuple[str, ...]:
        """The formats measured for every component."""
        if self.formats is not None:
            return self.formats
        return DEFAULT_FORMATS if self.target is None else menu_of(get_target(self.target))

    def menu_for(self, anatomy: Anatomy) -> tuple[str, ...]:
        if self.formats is not None or self.target is None:
            return self.menu
        return menu_for(get_target(self.target), anatomy, self.max_bytes)

    @property
    def share(self) -> tuple[int, int] | None:
        return None if self.shard is None else share_of(self.shard)

    @property
    def limits(self) -> Limits:
        return Limits(self.max_bytes, self.max_loss, self.max_drop)

    def check(self) -> None:
        super().check()
        if self.limits.loss is not None:
            check_held_out(self.held_out_windows, searches=True)
        if self.share and (self.ray or (self.workers or 1) > 1):
            other = "--ray" if self.ray else "--workers"
            raise KLLensError(
                f"--shard and {other}: workers already share the whole sweep; give only one of them"
            )
        if not self.menu:
            raise KLLensError("--formats names no format; give for example int4,int8")
        crossed(self.menu, self.methods)
        name_pattern(self.components)


@dataclass(frozen=True)
class MeasureResult:
    folder: Path
    measurements: list[Measurement]
    noise: float  # KL measured when nothing is quantized
    sweep: SweepResult
    unit: str = "tokens"  # what windows are made of
    shard: str | None = None  # `3/16`: only that share


def measure(settings: MeasureSettings, bench: Workbench, events: Events) -> MeasureResult | JobEstimate:
    share = settings.share
    # With Ray, this process computes nothing.
    model = bench.model(replace(settings, device="cpu") if settings.ray else settings)
    recipes, unsuited = crossed(settings.menu_for(model.anatomy), settings.methods)
    candidates, unfit = find_candidates(model.anatomy, recipes, settings.components)
    if settings.estimate:
        return _estimate(settings, model, candidates)
    windows = bench.drawn(
        settings.text,
        model.task,
        windows=settings.windows,
        length=settings.window_length,
        seed=settings.seed,
        split=None,
    )
    target = None if settings.target is None else computed_as(get_target(settings.target))
    whole = new_run_folder(settings.run, model.name)
    folder = whole / SHARDS / shard_name(*share) if share else whole
    model = bench.in_run(model, folder, learn_from=whole)
    with Run.create(folder) as run:
        run.note_command(["kl-lens", *command_of(settings)])
        sweep = Sweep(
            model,
            run,
            settings.engine,
            settings.memory_budget,
            deployed=deployed(target),
            precision=settings.precision,
            share=share,
        )
        sweep.identify(windows)  # raises early if this does not belong in the run
        for reason in unsuited:
            events.note(f"not measured: {reason}")
        _require_statistics(candidates, whole, settings)
        with going_on(folder), events.progress("measuring") as shown:
            sweep.bind(candidates)
            everything, screen, errors = len(candidates), None, dict[screening.Key, float]()
            if screen := _screen(settings, candidates, whole):
                shown = shown.as_one(expected_work(model, screen, windows))
                errors = _errors(screen, model, shown)
                candidates = screen.undominated(errors)
            left = 0.0 if share else sweep.operations_left(candidates, windows)
            with workers_for(settings, settings, settings.memory_budget, model, left, events) as workers:
                sweep = replace(sweep, workers=workers, progress=shown)
                if screen and settings.limits:
                    staged = StagedSearch(sweep, _planner(settings, run, bench), screen, errors, windows)
                    result, candidates, losses = staged.measure(settings.limits)
                else:
                    result = sweep.measure(candidates, windows)
                    losses = _losses(screen, errors, sweep, candidates, len(windows)) if screen else {}
        _say_unfit(unfit, events)
        role = role_as(CALIBRATION, target)
        if len(candidates) < everything:
            limit = {name: value for name, value in asdict(settings.limits).items() if value is not None}
            chosen = [key_of(candidate) for candidate in candidates]
            rest = set(losses) - set(chosen)
            predicted = [(*key, max(value, 0.0)) for key, value in losses.items() if key in rest]
            known = {"measured": len(candidates), "of": everything, "limit": limit, "chosen": chosen}
            run.store(SCREENED, role, known | {"predicted": predicted})
            events.note(
                f"measured {len(candidates)} of {everything} candidates: by their predicted KL, no good plan "
                f"{'near this limit ' if limit else ''}uses the others; --exhaustive measures all"
            )
        else:
            run.store(SCREENED, role, None)
        measurements = run.measurements(role)
        noise = (run.load("noise", role) or {}).get("kl_teacher_to_student", 0.0)
    if settings.legacy_json:
        for path in write_legacy(settings.legacy_json, measurements):
            events.note(f"wrote {path}")
    shard = None if share is None else f"{share[0]}/{share[1]}"
    return MeasureResult(folder, measurements, noise, result, model.task.unit, shard)


def _require_statistics(candidates: Sequence[Candidate], run: Path, settings: MeasureSettings) -> None:
    """Raises before the sweep if a method needs statistics and there are none."""
    learns = next((c.recipe for c in candidates if c.recipe.quantizer.learns), None)
    if learns is None or StoredStatistics.held_by(run) is not None:
        return
    given = {name: getattr(settings, name) for name in ("model", "text", "window_length", *settings.how)}
    command = command_of(CalibrateSettings(run=str(run), **given))
    raise UnlearntError(
        f"{learns} needs statistics and {run} has none; gather them with: kl-lens {shlex.join(command)}"
    )


def _estimate(settings: MeasureSettings, model: LoadedModel, candidates: Sequence[Candidate]) -> JobEstimate:
    """For one process; with `calibrate`, if that has to come first."""
    estimator = Estimator(
        model,
        {settings.target: candidates},
        windows=settings.windows,
        length=settings.window_length or model.task.window_length,
        held_out=settings.held_out_windows if settings.limits else 0,
        staged=bool(settings.limits),
    )
    known = StoredStatistics.held_by(new_run_folder(settings.run, model.name)) is not None
    stage = estimator.measure(settings.target)
    if settings.share:
        stage = replace(stage, seconds=stage.seconds / settings.share[1])
    return estimator.of([*([] if known else estimator.calibrate()), stage])


def _screen(settings: MeasureSettings, candidates: Sequence[Candidate], run: Path) -> screening.Screen | None:
    """None: everything is measured, because there is nothing to save, there are no statistics to predict with, or
    shards have to agree on what they measure."""
    if settings.exhaustive or settings.share:
        return None
    if not screening.is_worth_it(candidates, with_a_limit=bool(settings.limits)):
        return None
    return None if StoredStatistics.held_by(run) is None else screening.Screen(candidates)


def _errors(screen: screening.Screen, model: LoadedModel, progress: Progress) -> dict[screening.Key, float]:
    progress.started(sum(map(error_work, screen.needed)), 0)
    return screening.output_errors(model, screen, lambda c: progress.advanced(error_work(c), str(c)))


def _losses(
    screen: screening.Screen,
    errors: Mapping[screening.Key, float],
    sweep: Sweep,
    candidates: Sequence[Candidate],
    windows: int,
) -> dict[screening.Key, float]:
    """The KL of every candidate, predicted from those that were measured."""
    values = ((key_of(c), sweep.kl(c, windows, CALIBRATION)) for c in candidates)
    measured = {key: value for key, value in values if value is not None}
    return screen.predicted(errors, screen.first_from(errors, measured), measured)


def _planner(settings: MeasureSettings, run: Run, bench: Workbench) -> TargetPlanner:
    names = ("model", "target", "held_out", "held_out_windows", "weights", *settings.how)
    how = {name: getattr(settings, name) for name in names}
    return TargetPlanner(PlanSettings(run=str(run.folder), **how), run, bench)


def _say_unfit(unfit: Sequence[tuple[Component, Recipe, str]], events: Events) -> None:
    """One warning per format and reason."""
    grouped_by: dict[tuple[str, str], dict[str, None]] = {}
    for component, recipe, reason in unfit:
        grouped_by.setdefault((recipe.grid.name, reason), {})[component.name] = None
    for (name, reason), components in grouped_by.items():
        first, *others = components
        more = f" and {len(others)} more" if others else ""
        events.warn(f"{first}{more} not measured in {name}: {reason}")
