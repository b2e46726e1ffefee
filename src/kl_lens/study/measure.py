"""`measure`: how much each component suffers from each format. Also its processes, and the staged search.

Staged search: predict what every candidate loses, plan with that, and measure what plans near the limit choose. The
measured values correct the predictions, and the next plans are made with them. What is not chosen is not measured, so
every plan consists of measured candidates.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kl_lens import planning
from kl_lens.base.errors import (
    BudgetError,
    KLLensError,
    PlanError,
    UnlearntError,
    one_line,
)
from kl_lens.base.system import available_memory
from kl_lens.measuring.perturbation import (
    Candidate,
    find_candidates,
    find_state_candidates,
    key_of,
    name_pattern,
    states_of,
)
from kl_lens.measuring.products import PRECISIONS
from kl_lens.measuring.screening import (
    Screen,
    deciding,
    few_of,
    is_worth_it,
    output_errors,
)
from kl_lens.measuring.second_order import Key, gradient_work, second_order
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.measuring.sweep import (
    Sweep,
    SweepResult,
    error_work,
)
from kl_lens.measuring.teacher import window_bytes
from kl_lens.measuring.workers import (
    Order,
    Workers,
    hired,
    threads_here,
    workers_by_default,
)
from kl_lens.model import Anatomy, LoadedModel, own_images
from kl_lens.model.residency import BLOCKS_AT_ONCE
from kl_lens.run.folder import (
    CALIBRATION,
    COMPONENTS,
    SCREENED,
    SECOND_ORDER,
    STATES,
    Run,
    role_as,
)
from kl_lens.run.merging import SHARDS
from kl_lens.run.positions import PositionCurve, longest_window
from kl_lens.run.readings import KL
from kl_lens.run.records import (
    PREDICTED,
    Component,
    Estimate,
    Measurement,
    Plan,
    SensitivityTable,
)
from kl_lens.study import settings as of
from kl_lens.study.events import Events, going_on
from kl_lens.study.planner import TargetPlanner, limited_loss, nats_allowed
from kl_lens.study.session import Session
from kl_lens.study.settings import (
    Calibration,
    ForTargets,
    HeldOut,
    Limits,
    Opening,
    Processes,
    group,
    grouped,
    with_options,
)
from kl_lens.targets import Target, computed_as, deployed, get_target, menu_of
from kl_lens.text.windows import Windows
from kl_lens.weights.recipes import Recipe, parsed

DEFAULT_FORMATS = ("int4", "int8")
WINDOWS = 64
STATE_WINDOWS = 4
STATE_TOKENS = 1024  # long windows, so that drift shows
CACHES_ONLY = r"\.(keys|values)$"  # the components that targets have formats for
SCREENING = "screening"  # role of the first measurements, on little text
# Shares of the limit to plan for, round by round; every round plans with what the one before has measured. Below the
# range of the last round a plan would lack larger formats and lose much; above it, it would only lack smaller ones.
OF_LOSS = ((1.0,), (0.9, 1.0))
OF_BYTES = ((1.0,), (0.985, 1.0))  # a file may need more bytes than its parts
UNSURE = 1.2  # predictions count so much more than measurements: only clear gains are worth measuring
_what = grouped("what to measure")
_how = grouped("how")

Hire = Callable[
    ..., AbstractContextManager[Workers | None]
]  # gives the workers for some operations


def menu_for(
    target: Target, anatomy: Anatomy, max_bytes: int | None
) -> tuple[Recipe, ...]:
    """The target's short menu, with its formats below four bits if no file of the short menu is this small."""
    usual = menu_of(target)
    if max_bytes is None or not target.small_formats:
        return usual
    smallest = {
        component.name: 2 * component.parameters for component in anatomy.components
    }
    for candidate in find_candidates(anatomy, usual)[0]:
        name = candidate.component.name
        smallest[name] = min(
            smallest[name], candidate.recipe.grid.bytes(candidate.component.shape)
        )
    return menu_of(target, anatomy.shapes, small=max_bytes < sum(smallest.values()))


@with_options
class MeasureSettings(ForTargets):
    model: of.Model = of.of_model()
    opening: Opening = group(Opening)
    calibration: Calibration = group(
        Calibration,
        windows=of.calibration_text(
            None, f"number of windows (default: {WINDOWS}; of states {STATE_WINDOWS})"
        ),
    )
    held_out: HeldOut = group(HeldOut)
    processes: Processes = group(Processes)
    run: of.Folder | None = of.of_new_run()
    formats: of.Names | None = _what(
        None,
        "such as int8 or int4-g64+gptq, with the method (default: the target's, or int4,int8)",
    )
    components: str | None = _what(
        None, "only components with a matching name", metavar="REGEX"
    )
    states: bool = _what(
        False,
        "not weights, but recurrent states and attention caches, kept in each format after every token; by position in "
        f"windows of {STATE_TOKENS} tokens",
    )
    limits: Limits = group(Limits)  # measure only what such a plan can use
    exhaustive: bool = of.wanted(False, "measure every component in every recipe")
    gradients: bool = _what(False, of.GRADIENTS)
    precision: str | None = _how(
        None,
        "of matrix products on a GPU; tf32 adds noise, which is reported (default: tf32x3, nearly as exact as "
        "float32)",
        choices=PRECISIONS,
    )
    shard: str | None = of.several(
        None,
        "measure only the 3rd of 16 shards, into DIR/shards/03-of-16, for `kl-lens merge`",
        metavar="3/16",
    )

    def check(self) -> None:
        super().check()
        self.limits.check()
        if self.limits.loss:
            self.held_out.check(searches=True)
        if (
            self.shard
            and share_of(self.shard)
            and (self.processes.ray or (self.processes.workers or 1) > 1)
        ):
            raise KLLensError(
                "--shard: leave out --workers and --ray; workers already share the whole sweep"
            )
        if self.formats == ():
            raise KLLensError("--formats names no format; give for example int4,int8")
        if self.states and self.limits.given:
            raise KLLensError(
                "--states measures every format; leave out the limit, or give it to kl-lens plan"
            )
        for name in () if self.states else self.formats or ():
            Recipe.parse(name)
        if self.limits.memory is not None and self.target is None:
            raise PlanError("--memory is about a target's files: name it with --target")
        name_pattern(self.components)


@dataclass(frozen=True)
class MeasureResult:
    folder: Path
    measurements: list[Measurement]
    noise: float  # KL measured when nothing is quantized
    sweep: SweepResult
    unit: str = "tokens"  # what windows are made of
    share: tuple[int, int] | None = None  # (3, 16): only the third of sixteen
    curves: Sequence[PositionCurve] = ()  # of states: each measurement's KL by position
    target: str | None = None


def measure(settings: MeasureSettings, session: Session) -> MeasureResult:
    share = None if settings.shard is None else share_of(settings.shard)
    # With Ray, this process computes nothing.
    opening = (
        replace(settings.opening, device="cpu")
        if settings.processes.ray
        else settings.opening
    )
    model = session.model(settings.model, opening)
    if model.template:  # of another model it is refused before anything is measured
        get_target("gguf").stock_recipes(model)
    menu: Sequence[str] = settings.formats or DEFAULT_FORMATS
    if settings.formats is None and settings.runtime is not None:
        menu = menu_for(
            get_target(settings.runtime), model.anatomy, settings.limits.max_bytes
        )
    text = settings.calibration
    text = (
        states_text(text, model)
        if settings.states
        else replace(text, windows=text.windows or WINDOWS)
    )
    windows = session.calibration_windows(text, model.task)
    whole = of.new_run_folder(settings.run, model.name)
    folder = whole / SHARDS / shard_name(*share) if share else whole
    model = session.in_run(model, folder, learn_from=whole)
    hire = partial(
        workers_for, settings.processes, model, settings.opening, session.events
    )
    with Run.create(folder) as run:
        run.note_command(["kl-lens", *of.command_of(settings)])
        sweep = Sweep(
            model,
            run,
            memory_budget=settings.opening.memory,
            precision=settings.precision,
            share=share,
        )
        if settings.states:
            formats = settings.formats
            components = settings.components
            if settings.runtime is not None and not formats:
                formats = get_target(settings.runtime).cache_formats
                components = components or CACHES_ONLY
            return measure_states(session, sweep, windows, hire, formats, components)
        return measure_recipes(
            session,
            sweep,
            menu,
            windows,
            hire,
            target=settings.runtime,
            components=settings.components,
            limits=settings.limits,
            held_out=settings.held_out,
            exhaustive=settings.exhaustive,
            gradients=settings.gradients,
            learnt_in=whole,
        )


def states_text(text: Calibration, model: LoadedModel) -> Calibration:
    """With the usual windows for states, where none are asked for."""
    length = text.window_length or min(STATE_TOKENS, longest_window(model.model.config))
    return replace(text, windows=text.windows or STATE_WINDOWS, window_length=length)


def measure_states(
    session: Session,
    sweep: Sweep,
    windows: Windows,
    hire: Hire,
    formats: Sequence[str] | None = None,
    components: str | None = None,
) -> MeasureResult:
    """Measures every block's state and cache in each format, in place of weights."""
    run = sweep.run
    model = sweep.model
    share = sweep.share
    candidates, unfit = find_state_candidates(model, formats, components)
    run.store(STATES, COMPONENTS, [component.to_json() for component in states_of(model)])
    with going_on(run.folder), session.events.progress("measuring") as shown:
        work = 0.0 if share else sweep.operations_left(candidates, windows, STATES)
        with hire(operations=work) as workers:
            sweep = replace(sweep, workers=workers, progress=shown)
            result = sweep.measure(candidates, windows, STATES)
    session.tell_once(sweep.lost(windows, STATES))
    _say_unfit(unfit, session.events)
    without = [
        str(block)
        for block in range(model.anatomy.blocks)
        if all(block != c.component.block for c in candidates)
    ]
    if without and components is None:
        session.events.warn(
            f"blocks {', '.join(without)} are not measured: they have no Mamba scan and no attention of transformers"
        )
    noise = (run.load("noise", STATES) or {}).get(KL, 0.0)
    rows = [(m, curve) for _, m, curve in run.state_rows()]
    measurements = [m for m, _ in rows]
    curves = [curve for _, curve in rows]
    return MeasureResult(
        run.folder, measurements, noise, result, model.task.unit, share, curves
    )


def measure_recipes(
    session: Session,
    sweep: Sweep,
    recipes: Sequence[str],
    windows: Windows,
    hire: Hire,
    *,
    target: str | None = None,
    components: str | None = None,
    limits: Limits | None = None,
    held_out: HeldOut | None = None,
    exhaustive: bool = False,
    gradients: bool = False,
    learnt_in: Path | None = None,
) -> MeasureResult:
    """Measures a model's components in these recipes, or with limits those that plans within them can use.

    `learnt_in`: the folder with statistics (default: the run's own).
    """
    events = session.events
    run = sweep.run
    model = sweep.model
    share = sweep.share
    limits = limits or Limits()
    learnt_in = learnt_in or run.folder
    computed = None if target is None else computed_as(get_target(target))
    sweep = replace(sweep, deployed=deployed(computed))
    every, unfit = find_candidates(
        model.anatomy, [*dict.fromkeys(map(Recipe.parse, recipes))], components
    )
    learns = next((c.recipe for c in every if c.recipe.quantizer.learns), None)
    if learns is not None and StoredStatistics.held_by(learnt_in) is None:
        words = ["calibrate", model.source or model.name, "--run", str(learnt_in)]
        # A run that has measured nothing does not know its text yet.
        words += ["--text", windows.label, "--window-length", str(windows.length)]
        command = shlex.join(words)
        why = f"{learns} needs statistics and {learnt_in} has none"
        raise UnlearntError(f"{why}; gather them with: kl-lens {command}")
    sweep.identify(windows)  # raises early if this does not belong in the run
    with going_on(run.folder), events.progress("measuring") as shown:
        sweep.bind(every)
        candidates = every
        screen = None
        estimates = dict[Key, float]()
        losses = dict[Key, float]()
        # Otherwise there are no statistics to predict with, or shards have to agree on what they measure.
        screens = (
            not exhaustive
            and not share
            and StoredStatistics.held_by(learnt_in) is not None
        )
        gradients = (
            bool(limits.given)
            and gradients
            and Screen(every).gradients_cost_less(model, len(windows))
        )
        if screens and is_worth_it(
            every, with_a_limit=bool(limits.given), gradients=gradients
        ):
            screen = Screen(every)
            shown = shown.as_one(
                screen.expected_work(
                    model, len(windows), windows.length, gradients=gradients
                )
            )
            shown.started(sum(map(error_work, screen.needed)), 0)
            errors = output_errors(
                model, screen, lambda c: shown.advanced(error_work(c), str(c))
            )
            candidates = screen.undominated(errors)
        work = 0.0 if share else sweep.operations_left(candidates, windows)
        with hire(operations=work) as workers:
            sweep = replace(sweep, workers=workers, progress=shown)
            if screen and limits.given:
                planner = TargetPlanner(
                    session, run, target, held_out, lambda: model, limits
                )
                if gradients:
                    estimates = _estimates(sweep, screen, windows, events)
                result, candidates, losses = staged_search(
                    sweep, planner, screen, errors, windows, estimates
                )
            else:
                result = sweep.measure(candidates, windows)
                if screen:
                    measured = sweep.losses(candidates, len(windows))
                    losses = screen.predicted(
                        errors, screen.first_from(errors, measured), measured
                    )
    session.tell_once(sweep.lost(windows, CALIBRATION))
    _say_unfit(unfit, events)
    role = role_as(CALIBRATION, computed)
    if len(candidates) < len(every):
        chosen = [key_of(candidate) for candidate in candidates]
        unchosen = set(losses) - set(chosen)
        predicted = [
            (*key, max(value, 0.0)) for key, value in losses.items() if key in unchosen
        ]
        about = {
            "measured": len(candidates),
            "of": len(every),
            # Else plans of this limit consist of measured candidates.
            "limit": None if estimates else limits.given,
            "chosen": chosen,
        }
        run.store(SCREENED, role, about | {"predicted": predicted})
        events.note(
            f"measured {len(candidates)} of {len(every)} candidates: by their predicted KL, good plans "
            f"{'near this limit ' if limits.given else ''}do without the others, or hardly suffer; --exhaustive "
            "measures all"
        )
    else:
        run.store(SCREENED, role, None)
    noise = (run.load("noise", role) or {}).get(KL, 0.0)
    return MeasureResult(
        run.folder,
        run.measurements(role),
        noise,
        result,
        model.task.unit,
        share,
        target=target,
    )


def _estimates(
    sweep: Sweep, screen: Screen, windows: Windows, events: Events
) -> dict[Key, float]:
    """The KL of what `screen` begins with, from gradients; kept in the run. Empty, with a reason, without gradients."""
    run = sweep.run
    model = sweep.model
    work = gradient_work(model)
    expected = [list(key_of(c)) for c in screen.first if c.component.blocks]
    stored = run.load(SECOND_ORDER, CALIBRATION) or {}
    if stored.get("windows") != len(windows) or stored.get("keys") != expected:
        sweep.progress.message("gradients of the original model")
        try:
            values = second_order(model, screen.first, windows.ids, sweep.memory_budget)
        except (KLLensError, RuntimeError, NotImplementedError) as error:
            events.note(
                f"no gradients of this model ({one_line(error)}): one recipe of each component is measured instead"
            )
            return {}
        stored = {
            "windows": len(windows),
            "keys": expected,
            "kl": [values[name, Recipe.parse(recipe)] for name, recipe in expected],
        }
        run.store(SECOND_ORDER, CALIBRATION, stored)
    sweep.progress.started(work, work)
    return {
        (name, Recipe.parse(recipe)): kl
        for (name, recipe), kl in zip(expected, stored["kl"], strict=True)
    }


def _say_unfit(unfit: Sequence[tuple[Component, Recipe, str]], events: Events) -> None:
    """One warning per format and reason."""
    grouped_by: dict[tuple[str, str], dict[str, None]] = {}
    for component, recipe, reason in unfit:
        grouped_by.setdefault((recipe.grid.name, reason), {})[component.name] = None
    for (name, reason), (first, *more_names) in grouped_by.items():
        more = f" and {len(more_names)} more" if more_names else ""
        events.warn(f"{first}{more} not measured in {name}: {reason}")


# -- processes -----------------------------------------------------------------------------------------------


def workers_for(
    processes: Processes,
    model: LoadedModel,
    opening: Opening,
    events: Events,
    *,
    operations: float,
) -> AbstractContextManager[Workers | None]:
    """The workers for a sweep, or None to measure in this process. `operations`: work left; with none, no process is
    started; `opening`: how they open the model."""
    if (residency := model.residency) is not None:
        copy = residency.resident_bytes + BLOCKS_AT_ONCE * residency.block_bytes
    else:
        copy = sum(p.nbytes for p in model.model.parameters())
    count = processes.workers
    device = model.chain.device
    if processes.ray is None:
        count = count or _by_default(model, copy, opening.memory, operations)
        if count == 1 or not operations:
            return nullcontext()
        if device.type != "cpu":
            raise KLLensError(
                f"--workers {count} on {device}: add --ray local (GPU workers need Ray) or --device cpu"
            )
        if processes.workers is None:
            events.note(
                f"measuring with {count} processes; --workers 1 uses only this one"
            )
        opening = replace(opening, device=device.type)  # `auto` is decided here
    source = model.source or model.name
    images = _absolute(opening.images or own_images(source) or "") or None
    # Each worker checks whether the weights fit into its memory.
    opened_as = replace(opening, images=images, bos=model.beginning.choice).arguments
    order = Order(_absolute(source), opened_as, model.fingerprint)
    return hired(order, count, processes.ray, copy, events.note)


def _by_default(model: LoadedModel, weights: int, budget: int, operations: float) -> int:
    chain = model.chain
    if model.residency is not None or chain.device.type != "cpu":
        return 1
    vocabulary, width = (int(n) for n in chain.head.weight.shape)  # type: ignore[union-attr]
    copy = weights + window_bytes(chain, chain.task.rows_at_once, width, vocabulary)
    return workers_by_default(
        threads_here(), copy, budget, available_memory(), operations
    )


def _absolute(source: str) -> str:
    """An absolute path if the place exists; other names are unchanged."""
    expanded = os.path.expanduser(source)
    return os.path.abspath(expanded) if os.path.exists(expanded) else source


def share_of(text: str) -> tuple[int, int]:
    """`3/16` → (3, 16)."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    index, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= index <= count:
        raise KLLensError(f"--shard {text}: write 3/16 for the third of sixteen")
    return index, count


def shard_name(index: int, count: int) -> str:
    """Zero-padded, so that folders sort by number."""
    return f"{index:0{len(str(count))}}-of-{count}"


# -- staged search -------------------------------------------------------------------------------------------


def staged_search(
    sweep: Sweep,
    planner: TargetPlanner,
    screen: Screen,
    errors: Mapping[Key, float],
    windows: Windows,
    estimates: Mapping[Key, float],
) -> tuple[SweepResult, list[Candidate], dict[Key, float]]:
    """Measures what plans within the limits choose; also returns these candidates, and every one's KL. `errors`: of the
    outputs, for all that `screen` needs. `estimates`: from gradients; with them, of a plan only what decides is
    measured."""
    few = windows.first(few_of(len(windows)))
    table = sweep.run.table()
    limits = planner.limits
    first = dict(estimates)
    anchors = [c for c in screen.first if key_of(c) not in first]
    # Of each kind and recipe one shows what gradients do not see, such as rounded activations.
    samples_wanted = screen.samples({}) if estimates else []
    begin = [*dict.fromkeys([*anchors, *samples_wanted])]
    results = [sweep.measure(begin, few, SCREENING, noise=False)]
    first |= sweep.losses(anchors, len(few), SCREENING)
    samples = sweep.losses(samples_wanted, len(few), SCREENING)
    chosen: list[Candidate] = []

    def table_now(unsure: float = 1.0) -> SensitivityTable:
        """`unsure`: times what is only predicted, once something is measured."""
        measured = sweep.losses(chosen, len(windows))
        values = screen.predicted(errors, first, measured, samples)
        unsure = 1.0 if estimates else unsure
        rows = (
            Measurement(
                name, recipe, {KL: Estimate(max(value, 0.0), 0.0)}, 0, 0, PREDICTED, 0.0
            )
            for (name, recipe), kl in values.items()
            for value in [
                kl * unsure ** ((name, recipe) not in measured and bool(measured))
            ]
        )
        return replace(table, measurements=tuple(rows))

    def measure(plans: Sequence[Plan], rivals: Collection[Key] = ()) -> None:
        measured = sweep.losses(chosen, len(windows))
        kl = screen.predicted(errors, first, measured, samples)
        wanted = set(rivals)
        for plan in plans:
            choices = set(parsed(plan.assignment).items())
            if estimates:
                choices = {*deciding({k: kl[k] for k in choices.intersection(kl)})}
            wanted |= choices
        new = [c for c in screen.candidates if key_of(c) in wanted and c not in chosen]
        if new:
            results.append(sweep.measure(new, windows))
            chosen.extend(new)

    if limits.bytes is not None:
        fixed = planner.held.fixed if planner.held else 0
        for shares in OF_BYTES:
            plans = []
            for share in shares:
                most = fixed + share * (limits.bytes - fixed)
                with suppress(BudgetError) if share < 1 else nullcontext():
                    plans.append(_plan(planner, table_now(UNSURE), max_bytes=most))
            most = limits.bytes - (planner.held.bytes({}) if planner.held else 0)
            measure(
                plans, _stock(planner, table_now(), plans[-1].predicted_kl or 0.0, most)
            )
    else:
        room = nats_allowed(limits.loss)
        for shares in OF_LOSS:
            room = _room(planner, table_now(), room)
            measure(
                [
                    _plan(planner, table_now(UNSURE), max_kl=share * room)
                    for share in shares
                ]
            )
    whole = results[-1]
    measured = sweep.losses(chosen, len(windows))
    if not estimates and (samples_wanted := screen.samples(measured)):
        results.append(sweep.measure(samples_wanted, few, SCREENING, noise=False))
        samples = sweep.losses(samples_wanted, len(few), SCREENING)
    whole = replace(
        whole,
        candidates=len(chosen),
        measured=sum(result.measured for result in results),
        reused=sum(result.reused for result in results),
        seconds=sum(result.seconds for result in results),
    )
    return whole, chosen, screen.predicted(errors, first, measured, samples)


def _plan(planner: TargetPlanner, table: SensitivityTable, **limit: Any) -> Plan:
    problem = planning.build_problem(
        table,
        metric=KL,
        target=planner.target,
        fixed_bytes=planner.fixed_bytes,
        held=planner.held,
    )
    return planning.plan_for_budget(problem, **limit).plan


def _room(planner: TargetPlanner, table: SensitivityTable, room: float) -> float:
    """The sum of KLs at which whole plans reach the limit on the held-out half that decides, with one standard error:
    by a plan for the sum that seemed right so far. (`plan` asks the other half too: a few percent, and the plans of the
    last round begin below.)"""
    plan = _plan(planner, table, max_kl=room)
    limit = planner.limits.loss
    parts = planning.Predictor(table, KL).total(plan.assignment)
    if parts is None or parts.value <= 0:
        return room
    loss = limited_loss(planner.halves[0].measure(plan.assignment), limit)
    return parts.value * min(
        2.0, nats_allowed(limit) / max(loss.value + loss.standard_error, 1e-12)
    )


def _stock(
    planner: TargetPlanner, table: SensitivityTable, loss: float, most: int
) -> set[Key]:
    """Stock recipes with our methods that fit and lose less, by bytes that only a written file shows."""
    problem = planning.build_problem(
        table, target=planner.target, metric=KL, keep_fused=False
    )
    keys: set[Key] = set()
    for plan in planner.improved_stock(problem):
        fits = (plan.bytes or 0) + planner.fixed_bytes <= most
        if fits and plan.predicted_kl is not None and plan.predicted_kl < loss:
            keys |= set(parsed(plan.assignment).items())
    return keys
