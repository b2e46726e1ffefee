"""`run`: all stages in order.

For each target it measures the target's formats, plans the smallest file within the target KL, exports it and compares
it with stock recipes.

Each stage is a command with the settings shown, and can be repeated alone. Finished stages are not repeated.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from kl_lens import planning
from kl_lens.base.environment import processors
from kl_lens.base.errors import KLLensError, PlanError, TargetError, UnsupportedError
from kl_lens.base.files import write_text
from kl_lens.base.units import human_bytes, spell_bytes, spell_share
from kl_lens.evaluation import JudgedArtifact
from kl_lens.evaluation.continuations import store_continuations
from kl_lens.measuring.perturbation import find_candidates
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.measuring.sweep import model_identity, windows_by_cost
from kl_lens.model import Anatomy, LoadedModel
from kl_lens.paper import best_paper_point
from kl_lens.planning.handover import write_recipe
from kl_lens.run.folder import CALIBRATION, RECIPES, RECOMMENDED, Run, recommended_name
from kl_lens.study.benchmark import BenchmarkSettings
from kl_lens.study.calibrate import CalibrateSettings, LearningText
from kl_lens.study.estimating import estimate
from kl_lens.study.evaluate import TORCH, EvaluateSettings
from kl_lens.study.events import JobEstimate, going_on
from kl_lens.study.export import ExportSettings
from kl_lens.study.inspect import InspectSettings
from kl_lens.study.meanwhile import quantizing_for
from kl_lens.study.measure import MeasureSettings, menu_for
from kl_lens.study.paper import RANK, PaperSettings
from kl_lens.study.plan import ALL, TUNING_WINDOWS, USUAL, PlanSettings
from kl_lens.study.report import ReportSettings
from kl_lens.study.session import QUANTIZED, Session
from kl_lens.study.settings import (
    COUNT,
    DISK,
    MEMORY,
    NAMES,
    SHARE,
    SIZE,
    THREADS,
    Calibration,
    HeldOut,
    Opening,
    Processes,
    Runtime,
    Settings,
    Tasks,
    as_yaml,
    calibration_text,
    chosen_targets,
    command_of,
    group,
    grouped,
    new_run_folder,
    of_model,
    of_run,
    option,
    place_of_weights,
)
from kl_lens.study.stages import Stages
from kl_lens.study.staging import Limits
from kl_lens.targets import (
    describe_target,
    earlier_artifact,
    get_target,
    menu_of,
    read_artifact,
    usual_targets,
)
from kl_lens.weights.formats import get_format
from kl_lens.weights.recipes import FP16, Recipe

UNIFORM_FP16 = "uniform_fp16"
PAPER_FORMATS = ("int4", "int8")
MAX_LOSS = 0.01  # nats per token: about one percent of perplexity
PROMPTS = ("The history of the city", "In the early years of the war ,")
LARGE = 5e7  # weights per processor: 8 windows of 130 million on two ARM cores took over four minutes
OPTIONAL_STAGES = ("rank", "evaluate", "benchmark", "report")
SHORT, FULL, SMALL, NONE = "short", "full", "small", "none"
_ANY_SHAPE = (1024, 1024)  # every format fits it
_wanted = partial(grouped("target size or loss (give one)"), excludes="limit")
_proof = grouped("checking the result")


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    verb: ClassVar[str] = "run"

    model: str = of_model()
    opening: Opening = group(Opening)
    weights: str = place_of_weights()
    calibration: Calibration = group(
        Calibration,
        windows=calibration_text(
            None, "number of windows (default: 4 to 64, as many as cost no more than quantizing)", kind=COUNT
        ),
    )
    processes: Processes = group(Processes)
    run: str | None = of_run("runs/<model>")
    formats: tuple[str, ...] | None = option(
        None,
        "formats to choose from, for every target that supports them (default: each target's menu)",
        kind=NAMES,
    )
    menu: str | None = option(
        None,
        "formats of each target: the most useful, all, or the most useful and those below 4 bits (default: short, or "
        "small if no file of the short menu is as small as --budget or --max-bytes)",
        choices=(SHORT, FULL, SMALL),
    )
    paper: bool = option(
        False,
        "also reproduce the paper: INT4 and INT8 weights, ranking of metrics, its points compared with ours",
    )
    max_loss: float = _wanted(MAX_LOSS, "the smallest file with a KL of at most this", metavar="NATS")
    max_drop: float | None = _wanted(
        None,
        "the smallest file with a rise of held-out perplexity of at most this, for example 3%",
        kind=SHARE,
    )
    budget: float | None = _wanted(
        None, "the best file with at most this share of the FP16 file's size", kind=SHARE
    )
    max_bytes: int | None = _wanted(None, "the best file of at most this size, for example 90MB", kind=SIZE)
    exhaustive: bool = option(
        False, "measure every component in every format, not only what plans near the limit use"
    )
    targets: tuple[str, ...] | None = _proof(
        None,
        "targets to plan for and export to (default: openvino,gguf; mlx if only that is installed)",
        kind=NAMES,
    )
    rivals: str = _proof(USUAL, "stock recipes to compare with", choices=(NONE, USUAL, ALL))
    evaluation_text: str = _proof("wikitext2:test", "text that files are scored on", metavar="TEXT")
    evaluation_windows: int | None = _proof(
        None,
        "number of windows for rank and evaluate (default: 8; 4 for a large model on few processors)",
        kind=COUNT,
    )
    tune: int | None = _proof(
        None,
        f"tune the recommended plans, as kl-lens plan --tune does (default: {TUNING_WINDOWS} windows)",
        kind=COUNT,
        nargs="?",
        bare=TUNING_WINDOWS,
        metavar="WINDOWS",
    )
    held_out: HeldOut = group(HeldOut, held_out_windows=_proof(8, "number of windows", kind=COUNT))
    tasks: Tasks = group(Tasks)
    repeats: int = _proof(3, "repeats of each timing", kind=COUNT)
    threads: int | None = _proof(None, "threads of the runtimes (default: all)", kind=THREADS)
    without: tuple[str, ...] = _proof(
        (), "stages to skip, of rank, evaluate, benchmark, report", kind=NAMES, metavar="STAGES"
    )
    again: bool = _proof(False, "repeat stages that are already done")
    estimate: bool = option(
        False, "only estimate time, memory and disk of every stage (without --paper, --tune and tasks)"
    )

    @property
    def wanted(self) -> tuple[str, ...]:
        """The targets of --targets, or the usual ones that are installed."""
        named = self.named
        return named if self.targets else tuple(t for t in named if not describe_target(t).lacks())

    @property
    def named(self) -> tuple[str, ...]:
        return chosen_targets(self.targets or usual_targets())

    def menu_of(self, target: str | None, anatomy: Anatomy | None = None) -> Sequence[str]:
        """The formats that a target's plans choose from; without `--menu`, the size asked of this model decides."""
        if target is None:
            return self.formats or PAPER_FORMATS
        chosen = get_target(target)
        if self.formats is None:
            if self.menu is None and anatomy is not None:
                return menu_for(chosen, anatomy, self._bytes_of(anatomy))
            return menu_of(chosen, full=self.menu == FULL, small=self.menu == SMALL)
        held = [r for r in self.formats if chosen.holds(Recipe.parse(r).grid, _ANY_SHAPE) is None]
        if not held:
            raise PlanError(
                f"--formats {','.join(self.formats)}: {chosen.title} supports none of them; leave it out with "
                f"--targets, or add some of {', '.join(chosen.formats)}"
            )
        return held

    def _bytes_of(self, anatomy: Anatomy) -> int | None:
        """The size asked for, without what a file has besides weights."""
        if self.budget is None:
            return self.max_bytes
        return int(self.budget * sum(2 * component.parameters for component in anatomy.components))

    def recommended(self, target: str | None) -> str:
        """Name of the plan for a target, with the limit if it is not the usual one: a run with another limit replaces
        nothing."""
        limit = "" if self.max_loss == MAX_LOSS else f"kl{self.max_loss!r}"
        if self.max_bytes is not None:
            limit = spell_bytes(self.max_bytes)
        elif (share := self.budget if self.max_drop is None else self.max_drop) is not None:
            limit = ("" if self.max_drop is None else "drop") + spell_share(share).replace("%", "pct")
        return recommended_name(target, limit)

    def check(self) -> None:
        super().check()
        if unknown := sorted(set(self.without) - set(OPTIONAL_STAGES)):
            raise KLLensError(f"--without {unknown[0]!r}: only {', '.join(OPTIONAL_STAGES)} can be skipped")
        for target in self.wanted:
            self.menu_of(target)
        self.held_out.check(searches=self.max_bytes is None and self.budget is None)
        self.tasks.check()
        if self.weights == DISK and (why := self.needs_memory()):
            raise KLLensError(
                f"--weights disk does not work with {why}, which needs the whole model in memory"
            )

    def needs_memory(self) -> str | None:
        """What cannot work with weights on disk, of all that is asked for."""
        whole = [f"--targets {name}" for name in self.wanted if not describe_target(name).streams]
        return next(iter(["--tune"] * (self.tune is not None) + whole), None)


@dataclass(frozen=True)
class RunResult:
    settings: RunSettings
    folder: Path
    plans: dict[str, list[str]]  # target (torch: none) → plans that were compared, the recommendation last
    exported: dict[str, Path]  # target → folder of the recommendation there
    failed: list[str]  # commands that failed
    seconds: float
    generates: bool = True  # the model writes text

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0


def run(settings: RunSettings, session: Session) -> RunResult | JobEstimate:
    begin, events = time.perf_counter(), session.events
    # Opened in memory, it stays there for all stages.
    weights = MEMORY if settings.needs_memory() else settings.weights
    model = session.model(settings.model, settings.opening, weights=weights)
    settings = replace(settings, evaluation_windows=_judged(settings, model))
    if settings.estimate:
        return _estimate(settings, model, settings.calibration.windows or _windows(settings, model, None))
    folder = new_run_folder(settings.run, model.name)
    with Run.create(folder) as journal:
        journal.identify(model_identity(model))
        new = journal.text_identity(CALIBRATION) is None
        windows = settings.calibration.windows or _windows(settings, model, journal)
        settings = replace(settings, calibration=replace(settings.calibration, windows=windows))
        journal.note_command(["kl-lens", *command_of(settings)])  # and holds the lock until the end
        events.keep_in(folder)
        # What repeats this run elsewhere: `kl-lens run --config RUN/run.yaml`.
        write_text(folder / "run.yaml", as_yaml(replace(settings, model=model.source or settings.model)))
        stages = Stages(folder, session, again=settings.again)
        if new:
            with suppress(KLLensError):  # it cannot be estimated
                expected = _estimate(settings, model, windows)
                events.expect(expected)
                if expected.disk > (free := shutil.disk_usage(folder).free):
                    events.fail(
                        f"{folder}: about {human_bytes(expected.disk)} will be written, and only "
                        f"{human_bytes(free)} are free"
                    )
        with going_on(folder):
            plans, exported = _RunStages(settings, model, stages, session).run()
    seconds = time.perf_counter() - begin
    return RunResult(settings, folder, plans, exported, stages.failures, seconds, model.task.generates)


def _windows(settings: RunSettings, model: LoadedModel, journal: Run | None) -> int:
    """The default number: that of the run if it was begun, or what is cheap for all menus."""
    if journal is not None and (known := journal.text_identity(CALIBRATION)):
        return int(known["windows"])
    length = settings.calibration.window_length or model.task.window_length
    menus = [settings.menu_of(target, model.anatomy) for target in settings.wanted]
    recipes = [Recipe.parse(recipe) for recipe in dict.fromkeys(r for menu in menus for r in menu)]
    return windows_by_cost(model, find_candidates(model.anatomy, recipes)[0], length)


def _judged(settings: RunSettings, model: LoadedModel) -> int:
    """Windows to judge with: few for a large model, because runtimes compute on the CPU."""
    weights = sum(component.parameters for component in model.anatomy.components)
    return settings.evaluation_windows or (4 if weights > LARGE * processors() else 8)


def _estimate(settings: RunSettings, model: LoadedModel, windows: int) -> JobEstimate:
    """Without the paper's stages, `rank` and tasks."""
    usable = [t for t in settings.wanted if get_target(t).unsupported(model.anatomy.model_type) is None]
    if not usable:
        raise KLLensError("--estimate needs a target that supports the model")
    menus = {t: map(Recipe.parse, settings.menu_of(t, model.anatomy)) for t in usable}
    return estimate(
        model,
        {target: find_candidates(model.anatomy, [*menu])[0] for target, menu in menus.items()},
        windows=windows,
        length=settings.calibration.window_length or model.task.window_length,
        held_out=settings.held_out.held_out_windows,
        staged=not settings.exhaustive,
        judged=_judged(settings, model),
        repeats=settings.repeats,
        without=settings.without,
    )


class _RunStages:
    def __init__(self, settings: RunSettings, model: LoadedModel, stages: Stages, session: Session) -> None:
        self.settings, self.model, self.stages = settings, model, stages
        self.session, self.events, self.folder = session, session.events, stages.folder
        self.place = str(self.folder)
        self.planning = partial(
            PlanSettings, run=self.place, opening=settings.opening, weights=settings.weights
        )

    def run(self) -> tuple[dict[str, list[str]], dict[str, Path]]:
        settings = self.settings
        self.stages.do(InspectSettings(model=settings.model, opening=settings.opening))
        self.stages.do(
            self.planning(uniform=(FP16,)),
            key="plan fp16",
            outputs=[f"plans/{UNIFORM_FP16}.json"],
        )
        # The FP16 file first: it shows whether a target supports the model, and --budget is a share of its size.
        for name in settings.named:
            if name not in settings.wanted:
                self.events.fail(f"left out: {describe_target(name).lacks()}")
        usable = [t for t in settings.wanted if self._export(t, [UNIFORM_FP16], "fp16")]
        if (
            usable and "evaluate" not in settings.without
        ):  # a runtime that computes something else shows at once
            self._evaluate([UNIFORM_FP16], tuple(usable))
        if settings.paper:
            self._paper()
        aims: list[str | None] = [*usable] or [None]
        self._calibrate(usable)
        for target in aims:
            with self._meanwhile(target):
                self._measure(target)
            self._plan(target)
        self.session.drop_meters()
        plans = {target or TORCH: self._compared(target) for target in aims}
        exported = {
            t: self.folder / "artifacts" / t / plans[t][-1]
            for t in usable
            if self._export(t, plans[t][1:], plans[t][-1])
        }
        every = list(dict.fromkeys(name for names in plans.values() for name in names))
        if "evaluate" not in settings.without:
            self._evaluate(every, tuple(exported) or (TORCH,), settings.tasks, again=settings.again)
        if self.model.task.generates:
            if "evaluate" not in settings.without:
                self._write_samples(exported)
            if "benchmark" not in settings.without and exported:
                self._benchmark(every, tuple(exported))
        else:
            self.events.note("no text samples and no timing: this model classifies images")
        if "report" not in settings.without:
            self.stages.do(ReportSettings(run=self.place))
        return plans, exported

    def _menu(self, target: str | None) -> Sequence[str]:
        return self.settings.menu_of(target, self.model.anatomy)

    def _calibrate(self, targets: Sequence[str]) -> None:
        """Gathers statistics if any recipe of these targets, or any stock recipe, needs them."""
        recipes = {recipe for target in targets for recipe in self._menu(target)}
        if self.settings.rivals != NONE:
            for stock in (one for target in targets for one in get_target(target).stock_recipes(self.model)):
                recipes |= set(stock.assignment.values())
        if not any(Recipe.parse(recipe).quantizer.learns for recipe in recipes):
            return
        stored, text = StoredStatistics.held_by(self.folder), self.settings.calibration
        self.stages.do(
            CalibrateSettings(
                run=self.place,
                learning=LearningText(
                    text=text.text,
                    window_length=text.window_length,
                    seed=text.seed + 1,  # not the sweep's: no method is measured on the text it learned from
                ),
                opening=self.settings.opening,
                weights=self.settings.weights,
            ),
            key="calibrate",
            lost=stored is None or not stored.covers(self.model),
        )

    def _measure(self, target: str | None, formats: Sequence[str] | None = None) -> None:
        settings = self.settings
        limit = self._limit(target) if formats is None and not settings.exhaustive else Limits()
        self.stages.do(
            MeasureSettings(
                model=settings.model,
                opening=settings.opening,
                weights=settings.weights,
                run=self.place,
                target=target,
                formats=tuple(formats or self._menu(target)),
                calibration=settings.calibration,
                max_bytes=limit.max_bytes,
                max_loss=limit.max_loss,
                max_drop=limit.max_drop,
                exhaustive=settings.exhaustive,
                held_out=settings.held_out,
                processes=settings.processes,
            )
        )

    def _meanwhile(self, target: str | None) -> AbstractContextManager[object]:
        """While a GPU measures, the CPU quantizes for stock recipes."""
        on_gpu = self.model.chain.device.type == "cuda" and self.model.residency is None
        if target is None or self.settings.rivals == NONE or not on_gpu:
            return nullcontext()
        stock = get_target(target).stock_recipes(self.model)
        usual = [one for one in stock if one.usual or self.settings.rivals == ALL]
        return quantizing_for(usual, self.model, self.folder / QUANTIZED)

    def _paper(self) -> None:
        """Reproduces the paper: measures weights alone, ranks metrics, makes its points."""
        self._measure(None, PAPER_FORMATS)
        settings, inputs = self.settings, self.stages.measurements()
        if "rank" not in settings.without:
            self.stages.do(
                PaperSettings(
                    what=RANK,
                    run=self.place,
                    opening=settings.opening,
                    weights=settings.weights,
                    evaluation_text=settings.evaluation_text,
                    evaluation_windows=_judged(settings, self.model),
                    processes=settings.processes,
                ),
                key="rank",
                inputs=inputs,
            )
        self.stages.do(
            self.planning(paper="cpu", verify=True, held_out=settings.held_out),
            key="plan paper",
            inputs=inputs,
            outputs=["plans/uniform_int?.json", "plans/*_point[0-9][0-9].json"],
        )

    def _plan(self, target: str | None) -> None:
        """Plans for a target and compares with stock recipes."""
        settings, limit = self.settings, self._limit(target)
        name = settings.recommended(target)
        self.stages.do(
            self.planning(
                name=name,
                target=target,
                rivals=None if target is None or settings.rivals == NONE else settings.rivals,
                verify=True,
                tune=settings.tune,
                max_bytes=limit.max_bytes,
                max_loss=limit.max_loss,
                max_drop=limit.max_drop,
                held_out=settings.held_out,
            ),
            key=f"plan {name}",
            inputs=self.stages.measurements(target),
            outputs=[f"plans/{name}.json"],
        )
        with Run.open(self.folder) as journal:
            journal.store(RECOMMENDED, recommended_name(target), name)
        self._hand_over(target)

    def _hand_over(self, target: str | None) -> None:
        """The recommended plan for the runtime's own quantizer, unless that has no words for it."""
        tool = None if target is None else get_target(target).recipe_tool
        if tool is None:
            return
        with Run.open(self.folder) as journal:
            components = journal.table().components
        plan = planning.read_plan(
            self.folder / "plans" / f"{self.settings.recommended(target)}.json", components
        )
        place = self.folder / RECIPES / f"{plan.name}.{tool}"
        with suppress(PlanError):
            model = self.session.in_run(self.model, self.folder)  # recipes learn from the run's statistics
            write_recipe(tool, model, plan, place, StoredStatistics.held_by(self.folder))

    def _limit(self, target: str | None) -> Limits:
        settings = self.settings
        if settings.max_drop is not None:
            return Limits(max_drop=settings.max_drop)
        if settings.max_bytes is not None:
            return Limits(max_bytes=settings.max_bytes)
        if settings.budget is None:
            return Limits(max_loss=settings.max_loss)
        whole = sum(2 * c.parameters for c in self.model.anatomy.components)
        if target is not None:
            whole = read_artifact(self.folder / "artifacts" / target / UNIFORM_FP16).realised_bytes
        return Limits(max_bytes=int(settings.budget * whole))

    def _compared(self, target: str | None) -> list[str]:
        """The plans to export and compare for a target, the recommendation last."""
        with Run.open(self.folder) as journal:
            components = journal.table().components
        paths = sorted((self.folder / "plans").glob("*.json"))
        plans = {path.stem: planning.read_plan(path, components) for path in paths}
        name = self.settings.recommended(target)
        # What runs with other limits recommended stays as it is.
        of_runs, ours = recommended_name(target), (name, f"{name}.own")
        own = [p for p in plans.values() if p.target == target]
        own = [p for p in own if p.name in ours or not p.name.startswith(of_runs)]
        own.sort(key=lambda p: -(p.file_bytes or 0))
        names = [UNIFORM_FP16, *(p.name for p in own if target is not None)]
        grids = [get_format(name) for name in PAPER_FORMATS]
        held = target is None or not any(get_target(target).holds(grid, _ANY_SHAPE) for grid in grids)
        if self.settings.paper and held:
            points = [p for p in plans.values() if p.target in (None, target)]
            best = best_paper_point(points, plans[name])
            names += [*(f"uniform_{fmt}" for fmt in reversed(PAPER_FORMATS)), *([best.name] if best else [])]
        return [*(n for n in dict.fromkeys(names) if n in plans and n != name), name]

    def _export(self, target: str, plans: Sequence[str], key: str = "") -> bool:
        """Whether the plans were exported. An architecture that the runtime does not support is not a failure."""
        folder = self.folder / "artifacts" / target
        try:
            self.stages.do(
                # `fallback`: formats the runtime cannot hold are replaced; the export's table says which and why.
                ExportSettings(
                    run=self.place,
                    target=target,
                    plan=",".join(plans),
                    options={"fallback": True},
                    opening=self.settings.opening,
                ),
                key=f"export {target} {key}".strip(),
                inputs=self.stages.files(*(f"plans/{name}.json" for name in plans)),
                lost=not all(earlier_artifact(folder / name) for name in plans),
                # Runs with other limits write the files of stock recipes again; their weights are the same.
                outputs=[f"artifacts/{target}/{plans[-1]}/artifact.json"],
            )
        except UnsupportedError as error:
            self.events.fail(f"not exported to {target}: {error}")
            return False
        except TargetError as error:
            self.events.fail(str(error))
            self.stages.failures.append(f"export --target {target}")
            return False
        return True

    def _evaluate(
        self,
        plans: Sequence[str],
        targets: tuple[str, ...],
        tasks: Tasks | None = None,
        *,
        again: bool = False,
    ) -> None:
        settings = self.settings
        self.stages.do(
            EvaluateSettings(
                run=self.place,
                opening=settings.opening,  # its --device is the runtime's; PyTorch uses the run's device
                plan=",".join(plans),
                targets=targets,
                perplexity=settings.evaluation_text,
                divergence="",
                window=settings.calibration.window_length or self.model.task.window_length,
                limit=settings.evaluation_windows,
                runtime=Runtime(threads=settings.threads),
                tasks=tasks or Tasks(),
                again=again,
            ),
            optional=True,
        )

    def _write_samples(self, exported: dict[str, Path]) -> None:
        """Text by the original and by the recommended files, for the report."""
        if self.model.residency is not None and not self.model.residency.kept:
            self.events.note("no text samples: every token would read the whole model from disk")
            return
        self.events.heading("text samples")
        try:
            with Run.open(self.folder) as journal:
                files = [JudgedArtifact(place, plan=place.name) for place in exported.values()]
                store_continuations(journal, self.model, files, PROMPTS)
        except (KLLensError, RuntimeError, OSError) as error:
            self.events.fail(f"no text samples: {error}")
            self.stages.failures.append("generate")

    def _benchmark(self, plans: Sequence[str], targets: tuple[str, ...]) -> None:
        artifacts = [f"artifacts/{target}/{plan}/artifact.json" for target in targets for plan in plans]
        self.stages.do(
            BenchmarkSettings(
                run=self.place,
                plan=",".join(plans),
                targets=targets,
                repeats=self.settings.repeats,
                prompt_lengths=(32, 128),
                new_tokens=32,
                runtime=Runtime(threads=self.settings.threads),
            ),
            key=f"benchmark {plans[-1]}",
            # Another version may have another speed.
            inputs=" ".join([self.stages.files(*artifacts), *(get_target(name).version for name in targets)]),
            optional=True,
        )
