"""`measure`: how much each component suffers from each format."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from kl_lens.base.errors import KLLensError, UnlearntError
from kl_lens.measuring import screening
from kl_lens.measuring.engines import DEFAULT_MEMORY
from kl_lens.measuring.perturbation import find_candidates, key_of, name_pattern
from kl_lens.measuring.products import PRECISIONS
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.measuring.sweep import Sweep, SweepResult, error_work
from kl_lens.measuring.workers import Workers
from kl_lens.model import Anatomy
from kl_lens.paper import write_legacy
from kl_lens.run.folder import CALIBRATION, SCREENED, Run, role_as
from kl_lens.run.merging import SHARDS
from kl_lens.run.records import Component, Measurement
from kl_lens.study import settings as of
from kl_lens.study.events import Events, going_on
from kl_lens.study.planner import TargetPlanner
from kl_lens.study.session import Session
from kl_lens.study.settings import Calibration, HeldOut, Limits, Opening, Processes, Settings, group, grouped
from kl_lens.study.spreading import SLURM, shard_name, share_of, workers_for
from kl_lens.study.staging import expected_work, measured_kl, staged_search
from kl_lens.targets import TARGETS, Target, computed_as, deployed, get_target, menu_of
from kl_lens.text.windows import Windows
from kl_lens.weights.recipes import Recipe

DEFAULT_FORMATS = ("int4", "int8")
_what, _how = grouped("what to measure"), grouped("how")


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

    model: str = of.of_model()
    opening: Opening = group(Opening)
    weights: str = of.place_of_weights()
    calibration: Calibration = group(Calibration)
    held_out: HeldOut = group(HeldOut)
    processes: Processes = group(Processes)
    run: str | None = of.of_run("runs/<model>")
    target: str | None = _what(
        None,
        "measure for this target: its formats, and activations quantized as its kernels do it",
        choices=TARGETS,
    )
    formats: tuple[str, ...] | None = _what(
        None,
        "comma-separated; int4-g64+gptq also names the method (default: the target's formats, or int4,int8)",
        kind=of.NAMES,
    )
    components: str | None = _what(None, "only components with a matching name", metavar="REGEX")
    limits: Limits = group(Limits)  # measure only what such a plan can use
    exhaustive: bool = of.wanted(False, "measure every component in every recipe")
    memory_budget: int = _how(
        DEFAULT_MEMORY,
        "memory for cached states, and for weights if the model is larger than this; on a GPU the default is most of "
        "its free memory",
        kind=of.SIZE,
    )
    precision: str | None = _how(
        None,
        "precision of matrix products on a GPU; tf32x3 is nearly as exact as float32; tf32 and bf16 add noise, which "
        "is reported (default: tf32 if its noise is 100 times below the median KL of every format, else tf32x3)",
        choices=PRECISIONS,
    )
    shard: str | None = of.several(
        None,
        "measure only the 3rd of 16 shards, into DIR/shards/03-of-16, for `kl-lens merge`; without a value: as the "
        "variables of a Slurm job array say",
        nargs="?", bare=SLURM, metavar="3/16",
    )  # fmt: skip
    legacy_json: Path | None = _how(
        None, "also write the paper's JSON layout, one file per bit width", metavar="FILE"
    )

    def check(self) -> None:
        super().check()
        if self.limits.loss:
            self.held_out.check(searches=True)
        if self.shard and share_of(self.shard) and (self.processes.ray or (self.processes.workers or 1) > 1):
            other = "--ray" if self.processes.ray else "--workers"
            raise KLLensError(
                f"--shard and {other}: workers already share the whole sweep; give only one of them"
            )
        if self.formats == ():
            raise KLLensError("--formats names no format; give for example int4,int8")
        for name in self.formats or ():
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
    share = None if settings.shard is None else share_of(settings.shard)
    # With Ray, this process computes nothing.
    opening = replace(settings.opening, device="cpu") if settings.processes.ray else settings.opening
    model = session.model(
        settings.model, opening, weights=settings.weights, memory_budget=settings.memory_budget
    )
    menu: Sequence[str] = settings.formats or DEFAULT_FORMATS
    if settings.formats is None and settings.target is not None:
        menu = menu_for(get_target(settings.target), model.anatomy, settings.limits.max_bytes)
    windows = session.calibration_windows(settings.calibration, model.task)
    whole = of.new_run_folder(settings.run, model.name)
    folder = whole / SHARDS / shard_name(*share) if share else whole
    model = session.in_run(model, folder, learn_from=whole)
    hire = partial(
        workers_for, settings.processes, model, name=settings.model, opening=settings.opening,
        weights=settings.weights, memory_budget=settings.memory_budget, events=session.events,
    )  # fmt: skip
    with Run.create(folder) as run:
        run.note_command(["kl-lens", *of.command_of(settings)])
        sweep = Sweep(
            model, run, memory_budget=settings.memory_budget, precision=settings.precision, share=share
        )
        result = measure_recipes(
            session, sweep, menu, windows, hire, target=settings.target, components=settings.components,
            limits=settings.limits, held_out=settings.held_out, exhaustive=settings.exhaustive, learnt_in=whole,
        )  # fmt: skip
    if settings.legacy_json:
        for path in write_legacy(settings.legacy_json, result.measurements):
            session.events.note(f"wrote {path}")
    return result


def measure_recipes(
    session: Session,
    sweep: Sweep,
    recipes: Sequence[str],
    windows: Windows,
    hire: Callable[..., AbstractContextManager[Workers | None]],
    *,
    target: str | None = None,
    components: str | None = None,
    limits: Limits | None = None,
    held_out: HeldOut | None = None,
    exhaustive: bool = False,
    learnt_in: Path | None = None,
) -> MeasureResult:
    """Measures a model's components in these recipes, or with limits those that plans within them can use.

    `hire`: gives the workers for some operations; `learnt_in`: the folder with statistics (default: the run's own).
    """
    events, run, model, share = session.events, sweep.run, sweep.model, sweep.share
    limits, learnt_in = limits or Limits(), learnt_in or run.folder
    computed = None if target is None else computed_as(get_target(target))
    sweep = replace(sweep, deployed=deployed(computed))
    sweep.identify(windows)  # raises early if this does not belong in the run
    every, unfit = find_candidates(model.anatomy, [*dict.fromkeys(map(Recipe.parse, recipes))], components)
    learns = next((c.recipe for c in every if c.recipe.quantizer.learns), None)
    if learns is not None and StoredStatistics.held_by(learnt_in) is None:
        command = shlex.join(["calibrate", model.source or model.name, "--run", str(learnt_in)])
        raise UnlearntError(
            f"{learns} needs statistics and {learnt_in} has none; gather them with: kl-lens {command}"
        )
    with going_on(run.folder), events.progress("measuring") as shown:
        sweep.bind(every)
        candidates, screen, losses = every, None, dict[screening.Key, float]()
        # Otherwise there are no statistics to predict with, or shards have to agree on what they measure.
        known = not exhaustive and not share and StoredStatistics.held_by(learnt_in) is not None
        if known and screening.is_worth_it(every, with_a_limit=bool(limits.given)):
            screen = screening.Screen(every)
            shown = shown.as_one(expected_work(model, screen, len(windows), windows.length))
            shown.started(sum(map(error_work, screen.needed)), 0)
            errors = screening.output_errors(model, screen, lambda c: shown.advanced(error_work(c), str(c)))
            candidates = screen.undominated(errors)
        left = 0.0 if share else sweep.operations_left(candidates, windows)
        with hire(operations=left) as workers:
            sweep = replace(sweep, workers=workers, progress=shown)
            if screen and limits.given:
                planner = TargetPlanner(session, run, target, held_out, lambda: model)
                result, candidates, losses = staged_search(sweep, planner, screen, errors, windows, limits)
            else:
                result = sweep.measure(candidates, windows)
                if screen:
                    measured = measured_kl(sweep, candidates, len(windows))
                    losses = screen.predicted(errors, screen.first_from(errors, measured), measured)
    _say_unfit(unfit, events)
    role = role_as(CALIBRATION, computed)
    if len(candidates) < len(every):
        chosen = [key_of(candidate) for candidate in candidates]
        rest = set(losses) - set(chosen)
        predicted = [(*key, max(value, 0.0)) for key, value in losses.items() if key in rest]
        about = {"measured": len(candidates), "of": len(every), "limit": limits.given, "chosen": chosen}
        run.store(SCREENED, role, about | {"predicted": predicted})
        events.note(
            f"measured {len(candidates)} of {len(every)} candidates: by their predicted KL, no good plan "
            f"{'near this limit ' if limits.given else ''}uses the others; --exhaustive measures all"
        )
    else:
        run.store(SCREENED, role, None)
    noise = (run.load("noise", role) or {}).get("kl_teacher_to_student", 0.0)
    shard = None if share is None else f"{share[0]}/{share[1]}"
    return MeasureResult(run.folder, run.measurements(role), noise, result, model.task.unit, shard)


def _say_unfit(unfit: Sequence[tuple[Component, Recipe, str]], events: Events) -> None:
    """One warning per format and reason."""
    grouped_by: dict[tuple[str, str], dict[str, None]] = {}
    for component, recipe, reason in unfit:
        grouped_by.setdefault((recipe.grid.name, reason), {})[component.name] = None
    for (name, reason), components in grouped_by.items():
        first, *others = components
        more = f" and {len(others)} more" if others else ""
        events.warn(f"{first}{more} not measured in {name}: {reason}")
