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
from kl_lens.measuring.engines import DEFAULT_MEMORY
from kl_lens.measuring.perturbation import Candidate, find_candidates, name_pattern
from kl_lens.measuring.pieces import key_of
from kl_lens.measuring.products import PRECISIONS
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.measuring.sweep import Progress, Sweep, SweepResult, error_work
from kl_lens.model import Anatomy, LoadedModel
from kl_lens.paper import write_legacy
from kl_lens.run.folder import CALIBRATION, SCREENED, Run, role_as
from kl_lens.run.merging import SHARDS
from kl_lens.run.records import Component, Measurement
from kl_lens.study.events import Events, going_on
from kl_lens.study.planner import TargetPlanner
from kl_lens.study.session import Session
from kl_lens.study.settings import (
    NAMES,
    SHARE,
    SIZE,
    Calibration,
    HeldOut,
    Opening,
    Processes,
    Settings,
    command_of,
    group,
    grouped,
    new_run_folder,
    of_model,
    of_run,
    place_of_weights,
    several,
)
from kl_lens.study.spreading import SLURM, shard_name, share_of, workers_for
from kl_lens.study.staging import Limits, StagedSearch, expected_work
from kl_lens.targets import TARGETS, Target, computed_as, deployed, get_target, menu_of
from kl_lens.weights.recipes import Recipe

DEFAULT_FORMATS = ("int4", "int8")
_what, _how = grouped("what to measure"), grouped("how")
_near = partial(grouped("measure only what a plan can use (give one)"), excludes="limit")


def menu_for(target: Target, anatomy: Anatomy, max_bytes: int | None) -> tuple[Recipe, ...]:
    """The target's short menu, with its formats below four bits if no file of the short menu is this small."""
    usual = menu_of(target)
    if max_bytes is None or not target.small_formats:
        return usual
    smallest = {component.name: 2 * component.parameters for component in anatomy.components}
    for candidate in find_candidates(anatomy, usual)[0]:
        name = candidate.component.name
        smallest[name] = min(smallest[name], candidate.recipe.grid.bytes(candidate.component.shape))
    return menu_of(target, small=max_bytes < sum(smallest.values()))


@dataclass(frozen=True, kw_only=True)
class MeasureSettings(Settings):
    verb: ClassVar[str] = "measure"

    model: str = of_model()
    opening: Opening = group(Opening)
    weights: str = place_of_weights()
    calibration: Calibration = group(Calibration)
    held_out: HeldOut = group(HeldOut)
    processes: Processes = group(Processes)
    run: str | None = of_run("runs/<model>")
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
    components: str | None = _what(None, "only components with a matching name", metavar="REGEX")
    max_loss: float | None = _near(None, "for the smallest plan with a KL of at most this", metavar="NATS")
    max_drop: float | None = _near(
        None, "for the smallest plan with a rise of perplexity of at most this, for example 3%", kind=SHARE
    )
    max_bytes: int | None = _near(None, "for the best plan of at most this size, for example 90MB", kind=SIZE)
    exhaustive: bool = _near(False, "measure every component in every recipe")
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
    legacy_json: Path | None = _how(
        None, "also write the paper's JSON layout, one file per bit width", metavar="FILE"
    )

    @property
    def menu(self) -> tuple[str, ...]:
        """The formats measured for every component."""
        if self.formats is not None:
            return self.formats
        return DEFAULT_FORMATS if self.target is None else menu_of(get_target(self.target))

    def check(self) -> None:
        super().check()
        if self.max_loss is not None or self.max_drop is not None:
            self.held_out.check(searches=True)
        if self.shard and share_of(self.shard) and (self.processes.ray or (self.processes.workers or 1) > 1):
            other = "--ray" if self.processes.ray else "--workers"
            raise KLLensError(
                f"--shard and {other}: workers already share the whole sweep; give only one of them"
            )
        if not self.menu:
            raise KLLensError("--formats names no format; give for example int4,int8")
        for name in self.menu:
            Recipe.parse(name)
        name_pattern(self.components)


@dataclass(frozen=True)
class MeasureResult:
    folder: Path
    measurements: list[Measurement]
    noise: float  # KL measured when nothing is quantized
    sweep: SweepResult
    unit: str = "tokens"  # what windows are made of
    shard: str | None = None  # `3/16`: only that share


def measure(settings: MeasureSettings, session: Session) -> MeasureResult:
    events, limits = session.events, Limits(settings.max_bytes, settings.max_loss, settings.max_drop)
    share = None if settings.shard is None else share_of(settings.shard)
    # With Ray, this process computes nothing.
    opening = replace(settings.opening, device="cpu") if settings.processes.ray else settings.opening
    model = session.model(
        settings.model, opening, weights=settings.weights, memory_budget=settings.memory_budget
    )
    menu = settings.menu
    if settings.formats is None and settings.target is not None:
        menu = menu_for(get_target(settings.target), model.anatomy, settings.max_bytes)
    recipes = list(dict.fromkeys(map(Recipe.parse, menu)))
    candidates, unfit = find_candidates(model.anatomy, recipes, settings.components)
    text = settings.calibration
    windows = session.drawn(
        text.text, model.task, windows=text.windows or 0, length=text.window_length, seed=text.seed
    )
    target = None if settings.target is None else computed_as(get_target(settings.target))
    whole = new_run_folder(settings.run, model.name)
    folder = whole / SHARDS / shard_name(*share) if share else whole
    model = session.in_run(model, folder, learn_from=whole)
    with Run.create(folder) as run:
        run.note_command(["kl-lens", *command_of(settings)])
        sweep = Sweep(
            model,
            run,
            memory_budget=settings.memory_budget,
            deployed=deployed(target),
            precision=settings.precision,
            share=share,
        )
        sweep.identify(windows)  # raises early if this does not belong in the run
        _require_statistics(candidates, whole, settings.model)
        with going_on(folder), events.progress("measuring") as shown:
            sweep.bind(candidates)
            everything, screen, errors = len(candidates), None, dict[screening.Key, float]()
            # Otherwise there are no statistics to predict with, or shards have to agree on what they measure.
            known = not settings.exhaustive and not share and StoredStatistics.held_by(whole) is not None
            if known and screening.is_worth_it(candidates, with_a_limit=bool(limits)):
                screen = screening.Screen(candidates)
            if screen:
                shown = shown.as_one(expected_work(model, screen, windows))
                errors = _errors(screen, model, shown)
                candidates = screen.undominated(errors)
            left = 0.0 if share else sweep.operations_left(candidates, windows)
            with workers_for(
                settings.processes, model, name=settings.model, opening=settings.opening, operations=left,
                weights=settings.weights, memory_budget=settings.memory_budget, events=events,
            ) as workers:  # fmt: skip
                sweep = replace(sweep, workers=workers, progress=shown)
                if screen and limits:
                    planner = TargetPlanner(
                        session, run, settings.target, settings.held_out,
                        model=settings.model, opening=settings.opening, weights=settings.weights,
                    )  # fmt: skip
                    staged = StagedSearch(sweep, planner, screen, errors, windows)
                    result, candidates, losses = staged.measure(limits)
                else:
                    result = sweep.measure(candidates, windows)
                    losses = _losses(screen, errors, sweep, candidates, len(windows)) if screen else {}
        _say_unfit(unfit, events)
        role = role_as(CALIBRATION, target)
        if len(candidates) < everything:
            limit = {name: value for name, value in asdict(limits).items() if value is not None}
            chosen = [key_of(candidate) for candidate in candidates]
            rest = set(losses) - set(chosen)
            predicted = [(*key, max(value, 0.0)) for key, value in losses.items() if key in rest]
            about = {"measured": len(candidates), "of": everything, "limit": limit, "chosen": chosen}
            run.store(SCREENED, role, about | {"predicted": predicted})
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


def _require_statistics(candidates: Sequence[Candidate], run: Path, model: str) -> None:
    """Raises before the sweep if a method needs statistics and there are none."""
    learns = next((c.recipe for c in candidates if c.recipe.quantizer.learns), None)
    if learns is None or StoredStatistics.held_by(run) is not None:
        return
    command = shlex.join(["calibrate", model, "--run", str(run)])
    raise UnlearntError(f"{learns} needs statistics and {run} has none; gather them with: kl-lens {command}")


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


def _say_unfit(unfit: Sequence[tuple[Component, Recipe, str]], events: Events) -> None:
    """One warning per format and reason."""
    grouped_by: dict[tuple[str, str], dict[str, None]] = {}
    for component, recipe, reason in unfit:
        grouped_by.setdefault((recipe.grid.name, reason), {})[component.name] = None
    for (name, reason), components in grouped_by.items():
        first, *others = components
        more = f" and {len(others)} more" if others else ""
        events.warn(f"{first}{more} not measured in {name}: {reason}")
