"""`run`: all stages in order.

For each target it measures the target's formats, plans the smallest file within the target KL, exports it and compares
it with stock recipes. Each stage calls what the command of its name calls; finished stages are not repeated.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from kl_lens import judging, planning
from kl_lens.base.aside import Aside, aside
from kl_lens.base.environment import processors
from kl_lens.base.errors import (
    KLLensError,
    PlanError,
    TargetError,
    UnsupportedError,
)
from kl_lens.base.files import write_text
from kl_lens.base.units import human_bytes, spell_bytes, spell_share
from kl_lens.judging import choosing
from kl_lens.judging.ahead import SPARED, Ahead
from kl_lens.judging.evaluator import DIVERGENCE, PERPLEXITY
from kl_lens.judging.judged import store_continuations
from kl_lens.judging.scoring import COMPARED_WINDOWS
from kl_lens.measuring.perturbation import find_candidates, states_of
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.measuring.sweep import (
    Sweep,
    model_identity,
    windows_by_cost,
)
from kl_lens.model import Anatomy, LoadedModel
from kl_lens.model.states import CACHES
from kl_lens.paper.points import best_paper_point
from kl_lens.profiling.benchmark import UseSettings
from kl_lens.reporting import write_report
from kl_lens.run.folder import CALIBRATION, RECOMMENDED, SCREENED, Run, recommended_name
from kl_lens.run.records import ARTIFACT, Plan, Subject
from kl_lens.run.subjects import current_results
from kl_lens.study import (
    benchmark,
    calibrate,
    evaluate,
    export,
    measure,
    paper,
    plan,
    settings as of,
)
from kl_lens.study.events import JobEstimate, exit_code, going_on
from kl_lens.study.forecast import estimate
from kl_lens.study.planner import KL, TargetPlanner
from kl_lens.study.session import Session
from kl_lens.study.settings import (
    Calibration,
    HeldOut,
    Limits,
    Opening,
    Processes,
    Tasks,
    group,
    option,
)
from kl_lens.targets import (
    TARGETS,
    Target,
    describe_target,
    earlier_artifact,
    get_target,
    menu_of,
    read_artifact,
    usual_targets,
)
from kl_lens.text.windows import Windows
from kl_lens.weights.recipes import FP16, Recipe, parsed

UNIFORM_FP16 = "uniform_fp16"
PAPER_FORMATS = ("int4", "int8")
MAX_LOSS = 0.01  # nats per token: about one percent of perplexity
PROMPTS = ("The history of the city", "In the early years of the war ,")
FIRST_LOOK = 1  # window that shows whether a runtime computes what PyTorch does; a wrong weight shows in each
LARGE = 5e7  # weights per processor: 8 windows of 130 million on two ARM cores took over four minutes
AT_ONCE = 3  # files of a small model read beside a GPU
NARROW = 1.05  # ends of a speed's interval: closer together, it is timed no longer
OPTIONAL_STAGES = ("rank", "evaluate", "benchmark", "report")
SHORT = "short"
FULL = "full"
SMALL = "small"
NONE = "none"
_ANY_SHAPE = (1024, 1024)  # every format fits it
_proof = of.grouped("checking the result")


@dataclass(frozen=True, kw_only=True)
class RunSettings(of.Settings):
    model: of.Model = of.of_model()
    opening: Opening = group(Opening)
    weights: str = of.place_of_weights()
    calibration: Calibration = group(
        Calibration,
        windows=of.calibration_text(
            None, "default: 4 to 64, as many as cost no more than quantizing"
        ),
    )
    processes: Processes = group(Processes)
    run: of.Folder | None = of.of_new_run()
    formats: of.Names | None = option(
        None, "formats to choose from (default: each target's menu)"
    )
    menu: str | None = option(
        None,
        "formats of each target: the most useful, all, or the most useful and those below 4 bits (default: short, or "
        "small if no file of the short menu is as small as --budget or --max-bytes)",
        choices=(SHORT, FULL, SMALL),
    )
    paper: bool = option(
        False,
        "also reproduce the paper: its INT4 and INT8 points, its ranking of metrics",
    )
    limits: Limits = group(
        Limits, max_loss=of.wanted(MAX_LOSS, "the smallest file with at most this KL")
    )
    budget: of.Share | None = of.wanted(
        None, "the best file of at most this share of the FP16 file's size"
    )
    exhaustive: bool = option(False, "measure every component in every format")
    targets: of.Names | None = _proof(
        None,
        "targets to plan for and export to (default: openvino,gguf; mlx if only that is installed)",
    )
    rivals: str = _proof(
        plan.USUAL, "stock recipes to compare with", choices=(NONE, plan.USUAL, plan.ALL)
    )
    evaluation_text: of.Text = _proof("wikitext2:test", "text that files are scored on")
    evaluation_windows: of.Count | None = _proof(
        None,
        "number of windows for rank and evaluate (default: 8; 4 for a large model on few processors)",
    )
    tune: of.Count | None = plan.tuning(
        f"tune the recommended plans, as kl-lens plan --tune does (default: {plan.TUNING_WINDOWS} windows)",
        group="checking the result",
    )
    held_out: HeldOut = group(HeldOut, held_out_windows=_proof(8, "number of windows"))
    tasks: Tasks = group(Tasks)
    repeats: of.Count = _proof(3, "repeats of each timing")
    threads: of.Threads | None = _proof(None, "threads of the runtimes (default: all)")
    without: of.Names = _proof(
        (), "stages to skip, of rank, evaluate, benchmark, report", metavar="STAGES"
    )
    again: bool = _proof(False, "repeat stages that are already done")
    estimate: bool = option(
        False, "only estimate time, memory and disk (without --paper, --tune and tasks)"
    )

    @property
    def named(self) -> tuple[str, ...]:
        return of.chosen_targets(self.targets or usual_targets())

    @property
    def wanted(self) -> tuple[str, ...]:
        """The targets of --targets, or the usual ones that are installed."""
        return (
            self.named
            if self.targets
            else tuple(t for t in self.named if not describe_target(t).lacks())
        )

    def menu_of(self, target: str, anatomy: Anatomy) -> Sequence[str]:
        """The formats that a target's plans choose from; without `--menu`, the size asked of this model decides."""
        chosen = get_target(target)
        max_bytes = self.limits.max_bytes
        if self.formats is not None:
            return _held(chosen, self.formats)
        if self.menu is not None:
            return menu_of(chosen, full=self.menu == FULL, small=self.menu == SMALL)
        if self.budget is not None:  # without what a file has besides weights
            max_bytes = int(
                self.budget * sum(2 * c.parameters for c in anatomy.components)
            )
        return measure.menu_for(chosen, anatomy, max_bytes)

    def recommended(self, target: str) -> str:
        """Name of the plan for a target, with the limit if it is not the usual one: a run with another limit replaces
        nothing."""
        asked = self.limits
        if asked.max_bytes is not None:
            limit = spell_bytes(asked.max_bytes)
        elif (use := asked.use) is not None:
            limit = f"{spell_bytes(asked.memory or 0)}-{use.context}x{use.batch}"
        elif asked.max_drop is not None:
            limit = f"drop{spell_share(asked.max_drop)}"
        elif self.budget is not None:
            limit = spell_share(self.budget)
        else:
            limit = "" if asked.max_loss == MAX_LOSS else f"kl{asked.max_loss!r}"
        return recommended_name(target, limit.replace("%", "pct"))

    def check(self) -> None:
        super().check()
        if unknown := sorted(set(self.without) - set(OPTIONAL_STAGES)):
            raise KLLensError(
                f"--without {unknown[0]!r}: only {', '.join(OPTIONAL_STAGES)} can be skipped"
            )
        for target in map(get_target, self.wanted if self.formats else ()):
            if not _held(target, self.formats or ()):
                raise PlanError(
                    f"--formats {','.join(self.formats or ())}: {target.title} supports none of them; leave it out "
                    f"with --targets, or add some of {', '.join(target.formats)}"
                )
        self.limits.check()
        self.held_out.check(searches=self.limits.bytes is None and self.budget is None)
        self.tasks.check()
        if self.weights == of.DISK and (why := self.needs_memory()):
            raise KLLensError(
                f"--weights disk does not work with {why}, which needs the model in memory"
            )

    def needs_memory(self) -> str | None:
        """What cannot work with weights on disk, of all that is asked for."""
        whole = [
            f"--targets {name}"
            for name in self.wanted
            if not describe_target(name).streams
        ]
        return next(iter(["--tune"] * (self.tune is not None) + whole), None)


@dataclass(frozen=True)
class RunResult:
    settings: RunSettings
    folder: Path
    # Target → plans that were compared, the recommendation last.
    plans: dict[str, list[str]]
    exported: dict[str, Path]  # target → folder of the recommendation there
    failed: list[str]  # commands that failed
    without_file: dict[str, str]  # target → why it has no file, or none that works
    seconds: float
    generates: bool = True  # the model writes text

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0


def run(settings: RunSettings, session: Session) -> RunResult | JobEstimate:
    begin = time.perf_counter()
    events = session.events
    # Opened in memory, it stays there for all stages.
    weights = of.MEMORY if settings.needs_memory() else settings.weights
    model = session.model(settings.model, settings.opening, weights=weights)
    if settings.estimate:
        settings = _completed(settings, model, None)
        return _estimate(settings, model, opened=time.perf_counter() - begin)
    folder = of.new_run_folder(settings.run, model.name)
    with Run.create(folder) as journal:
        journal.identify(model_identity(model))
        known = journal.text_identity(CALIBRATION)
        settings = _completed(
            settings, model, None if known is None else int(known["windows"])
        )
        journal.note_command(
            ["kl-lens", *of.command_of(settings)]
        )  # and holds the lock until the end
        events.keep_in(folder)
        # What repeats this run elsewhere: `kl-lens run --config RUN/run.yaml`.
        write_text(
            folder / "run.yaml",
            of.as_yaml(replace(settings, model=model.source or settings.model)),
        )
        if known is None:
            with suppress(KLLensError):  # it cannot be estimated
                opened = time.perf_counter() - begin
                expected = _estimate(settings, model, opened=opened)
                events.expect(expected)
                if expected.disk > (free := shutil.disk_usage(folder).free):
                    size = human_bytes(expected.disk)
                    room = human_bytes(free)
                    events.tell(
                        f"{folder}: about {size} will be written, and only {room} are free"
                    )
        job = _Job(settings, session, journal, model)
        with going_on(folder), job.working_ahead():
            plans, exported = job.all_stages()
    seconds = time.perf_counter() - begin
    return RunResult(
        settings,
        folder,
        plans,
        exported,
        job.failed,
        job.without_file,
        seconds,
        model.task.generates,
    )


def _completed(
    settings: RunSettings, model: LoadedModel, begun_with: int | None
) -> RunSettings:
    """With the numbers of windows: to calibrate, those of the run if it was begun, or what is cheap for all menus; to
    judge, few for a large model, because runtimes compute on the CPU."""
    judged = settings.evaluation_windows or (4 if _is_large(model) else 8)
    text = settings.calibration
    if (windows := text.windows or begun_with) is None:
        menus = [settings.menu_of(target, model.anatomy) for target in settings.wanted]
        recipes = [
            Recipe.parse(recipe)
            for recipe in dict.fromkeys(r for menu in menus for r in menu)
        ]
        length = text.window_length or model.task.window_length
        windows = windows_by_cost(
            model, find_candidates(model.anatomy, recipes)[0], length
        )
    return replace(
        settings, evaluation_windows=judged, calibration=replace(text, windows=windows)
    )


def _estimate(settings: RunSettings, model: LoadedModel, *, opened: float) -> JobEstimate:
    """No text is opened. `opened`: seconds so far."""
    if model.residency is not None or not model.task.generates:
        raise KLLensError("--estimate needs a language model that fits into memory")
    menus = {
        target: settings.menu_of(target, model.anatomy)
        for target in settings.wanted
        if get_target(target).unsupported(model.anatomy.model_type) is None
    }
    if not menus:
        raise KLLensError("--estimate needs a target that supports the model")
    calibration = settings.calibration
    found = estimate(
        model,
        menus,
        windows=calibration.windows or 0,
        length=calibration.window_length or model.task.window_length,
        held_out=settings.held_out.held_out_windows,
        judged=settings.evaluation_windows or 0,
        repeats=settings.repeats,
        exhaustive=settings.exhaustive,
        opened=opened,
    )
    without = {*settings.without}
    if "evaluate" in without:
        without.add("generate")
    stages = tuple(stage for stage in found.stages if stage.verb not in without)
    return replace(found, stages=stages)


class _Job:
    """One run: its stages, in the order in which `all_stages` calls them."""

    def __init__(
        self, settings: RunSettings, session: Session, journal: Run, model: LoadedModel
    ) -> None:
        self.settings = settings
        self.session = session
        self.journal = journal
        self.events = session.events
        self.folder = journal.folder
        self._opened = model
        self.failed: list[str] = []  # stages that others did not depend on
        self.without_file: dict[str, str] = {}  # target → why
        self.left_out: dict[str, str] = {}  # the same, of targets that nobody asked for
        self._ahead: Ahead | None = None
        self._apart: Aside | None = None  # quantizes ahead
        self._quantized: dict[str, Future[None]] = {}  # by target
        self._early: set[tuple[str, str]] = (
            set()
        )  # target and plan of files that were written ahead
        self._hire = partial(
            measure.workers_for,
            settings.processes,
            model,
            settings.opening,
            settings.weights,
            session.events,
        )

    @property
    def model(self) -> LoadedModel:
        """With the run's own weights and statistics."""
        return self.session.in_run(self._opened, self.folder)

    def all_stages(self) -> tuple[dict[str, list[str]], dict[str, Path]]:
        """Plans by target, the recommended one last; and where its file is."""
        settings = self.settings
        judges = "evaluate" not in settings.without
        generates = self.model.task.generates
        tokenizing = Thread(
            target=self._tokenize, daemon=True
        )  # does not hold up a command that ends
        if self.journal.text_identity(CALIBRATION) is None:
            # Runs the model, which an export beside the other thread changes for a while.
            self.model.beginning.settle(self.model, settings.calibration.text)
            tokenizing.start()
        self.do("inspect", lambda: self.model)
        self.plan_fp16()
        # The FP16 file first: it shows whether a target supports the model, and --budget is a share of its size.
        for name in settings.named:
            if name not in settings.wanted:
                self.events.tell(f"left out: {describe_target(name).lacks()}")
        usable = [
            target
            for target in settings.wanted
            if self.export(target, [UNIFORM_FP16]) and self.is_large_enough(target)
        ]
        if not usable:
            raise TargetError(self.refusal())
        unchecked = (
            usable if judges else []
        )  # a runtime that computes something else shows early
        if unchecked and self._ahead is None:
            self.evaluate([UNIFORM_FP16], unchecked)
            unchecked = []
        for name in unchecked:
            self.read_ahead(name, UNIFORM_FP16, whole=False)
        if tokenizing.is_alive():
            tokenizing.join()
        if settings.paper:
            self.reproduce_paper()
        aims = [*usable]
        exported: dict[str, Path] = {}
        self.calibrate(usable)
        self.begin_with_stock(usable)
        for target in list(aims):
            if self.settings.limits.use is not None:
                self.measure_caches(target)
            try:
                self.measure(target, self._menu(target), self._limits(target))
                if unchecked:
                    self.evaluate([UNIFORM_FP16], unchecked)
                    unchecked = []
                if target in self._quantized and not self._quantized[target].done():
                    self._end_apart()  # the plan needs the rest now, and has all processors
                self.plan(target)
            except (
                PlanError,
                TargetError,
            ) as error:  # for other targets it may be enough
                if len(aims) == 1:
                    raise
                self.give_up(target, f"plan --target {target}", str(error))
                aims.remove(target)
                continue
            # A file that can be used, at once: who stops here keeps it.
            if self.export(target, [settings.recommended(target)]):
                exported[target] = self.first_file(target)
                self.read_ahead(target, settings.recommended(target))
        self.session.drop_meters()
        plans = {target: self.compared(target) for target in aims}
        for target in exported:
            if rivals := [
                name for name in plans[target][1:-1] if (target, name) not in self._early
            ]:
                self.export(target, rivals)
            for name in sorted(self.deciding(target) - {settings.recommended(target)}):
                self.read_ahead(target, name)
        every = list(dict.fromkeys(name for names in plans.values() for name in names))
        if judges:
            self.evaluate(every, [*exported] or [evaluate.TORCH], whole=True)
        working = [t for t in exported if t not in self.without_file]
        if not generates:
            self.events.note(
                "no text samples and no timing: this model classifies images"
            )
        if generates and judges:
            self.write_samples([exported[target] for target in working])
        if generates and working and "benchmark" not in settings.without:
            self.benchmark(working)
        if "report" not in settings.without:
            self.do("report", lambda: write_report(self.journal))
        return plans, exported

    def do(
        self,
        verb: str,
        work: Callable[[], object],
        target: str | None = None,
        *,
        key: str = "",
        given: object = (),
        inputs: str = "",
        outputs: Sequence[str] = (),
        lost: bool = False,
        optional: bool = False,
    ) -> None:
        """Does the work of a verb, unless it was done with the same settings (`given`) and `inputs` (a digest).

        It is recorded under `key`; without one it is always done. `outputs`: patterns of the files it writes; if they
        change or it is `lost`, it is done again. `optional`: if it fails, the run goes on.
        """
        done = {"given": str(given), "inputs": inputs}
        known = (
            None
            if lost or self.settings.again or not key
            else self.journal.load("stage", key)
        )
        if known == done | {"outputs": self._files(*outputs)}:
            self.events.skipped(verb, target)
            return
        with self.events.stage(verb, target):
            try:
                result = work()
            except (
                KLLensError,
                RuntimeError,
                OSError,
            ) as error:  # runtimes raise their own
                if not optional:
                    raise
                self.events.tell(str(error))
                self.failed.append(verb)
                return
            self.events.result(result)
            if exit_code(result):
                self.failed.append(verb)
                self.note_failures(getattr(result, "failures", {}))
            elif key:
                self.journal.store(
                    "stage", key, done | {"outputs": self._files(*outputs)}
                )

    def give_up(self, target: str, command: str, reason: str) -> None:
        """A target gets no file; the others go on."""
        self.without_file[target] = reason
        self.failed.append(command)
        self.events.tell(f"{describe_target(target).title}: {reason}")

    def note_failures(self, failures: Mapping[str, str]) -> None:
        """Recommended files that failed in their runtime."""
        for subject, reason in failures.items():
            target, _, plan = subject.partition("/")
            if target in self.settings.wanted and plan == self.settings.recommended(
                target
            ):
                self.without_file[target] = reason

    def is_large_enough(self, target: str) -> bool:
        """Whether the limit allows any file, which is known before anything is measured."""
        why = self._too_small(target)
        if why is not None:
            self.give_up(target, f"plan --target {target}", why)
        return why is None

    def _too_small(self, target: str) -> str | None:
        limits = self._limits(target)
        if limits.bytes is None:
            return None
        least = self._planner(target, limits).smallest(self._menu(target))
        if least <= limits.bytes:
            return None
        share = self.settings.budget is not None
        flag = "--budget" if share else "--memory" if limits.memory else "--max-bytes"
        size = human_bytes(limits.bytes)
        return (
            f"{flag} {size} cannot be met: the smallest possible is {human_bytes(least)}"
        )

    def refusal(self) -> str:
        """Why no target can be served, and which would."""
        tried = self.left_out | self.without_file
        whole = "; ".join(f"{name}: {why}" for name, why in tried.items())
        others = [name for name in TARGETS if self._would_do(name)]
        advice = (
            f"--targets {','.join(others)} would do" if others else "no target would do"
        )
        told = whole or "no target is installed: pip install 'kl-lens[gguf]'"
        return f"no file can be written, so nothing was measured ({told}); {advice}"

    def _would_do(self, target: str) -> bool:
        known = describe_target(target)
        if target in self.left_out | self.without_file or known.lacks():
            return False
        if known.unsupported(self._opened.anatomy.model_type):
            return False
        limits = self._limits(target)
        with suppress(Exception):  # whatever its libraries raise, it would not do
            least = self._planner(target, limits).smallest(self._menu(target))
            return least <= (limits.bytes or math.inf)
        return False

    def _measurements(self, target: str | None, formats: Sequence[str] = ()) -> str:
        """A digest of the measurements for a target, of a staged search what it chose; or of those in `formats`. What
        was measured besides, for other limits or targets, is no reason to do a stage again."""
        role = self.journal.measured_role(target)
        chosen = (
            None if formats else (self.journal.load(SCREENED, role) or {}).get("chosen")
        )
        rows = [
            (m.component, m.format, m.windows, m.metrics[KL].value)
            for m in self.journal.measurements(role)
            if (not formats or m.format in formats)
            and (chosen is None or [m.component, m.format] in chosen)
        ]
        return _digest(json.dumps(sorted(rows)).encode())

    def _files(self, *patterns: str) -> str:
        """A digest of the matching files of the run."""
        paths = sorted(path for pattern in patterns for path in self.folder.glob(pattern))
        return _digest(
            *(
                str(path.relative_to(self.folder)).encode() + path.read_bytes()
                for path in paths
            )
        )

    # -- what stages need ---------------------------------------------------------------------------------------

    def _menu(self, target: str) -> Sequence[str]:
        return self.settings.menu_of(target, self._opened.anatomy)

    def _limits(self, target: str) -> Limits:
        asked = self.settings.limits
        share = self.settings.budget
        if share is None:
            instead = asked.max_drop is not None or asked.bytes is not None
            return replace(asked, max_loss=None) if instead else asked
        whole = sum(2 * c.parameters for c in self._opened.anatomy.components)
        place = self.folder / "artifacts" / target / UNIFORM_FP16
        if (artifact := earlier_artifact(place)) is not None:
            whole = artifact.realised_bytes
        return Limits(max_bytes=int(share * whole))

    def _planner(
        self, target: str | None = None, limits: Limits | None = None
    ) -> TargetPlanner:
        held_out = self.settings.held_out
        return TargetPlanner(
            self.session, self.journal, target, held_out, lambda: self.model, limits
        )

    def _plans(self) -> dict[str, Plan]:
        components = self.journal.components
        paths = sorted((self.folder / "plans").glob("*.json"))
        return {path.stem: planning.read_plan(path, components) for path in paths}

    # -- stages -------------------------------------------------------------------------------------------------

    def calibrate(self, targets: Sequence[str]) -> None:
        """Gathers statistics if any recipe of these targets, or any stock recipe, needs them."""
        recipes = {recipe for target in targets for recipe in self._menu(target)}
        if self.settings.rivals != NONE:
            for stock in (
                one
                for target in targets
                for one in get_target(target).stock_recipes(self.model)
            ):
                recipes |= set(stock.assignment.values())
        if not any(Recipe.parse(recipe).quantizer.learns for recipe in recipes):
            return
        stored = StoredStatistics.held_by(self.folder)
        text = self.settings.calibration
        # Not the sweep's seed: no method is measured on the text it learned from.
        seed = text.seed + 1
        learning = calibrate.LearningText(
            text=text.text, window_length=text.window_length, seed=seed
        )
        self.do(
            "calibrate",
            lambda: calibrate.gather_statistics(
                self.journal, self.model, learning, self.session
            ),
            key="calibrate",
            given=asdict(learning),
            lost=stored is None or not stored.covers(self.model),
        )

    def _tokenize(self) -> None:
        """While the FP16 file is written and tried, which needs one processor."""
        with suppress(Exception):  # a bad text is reported when it is used
            self._windows()

    def _windows(self) -> Windows:
        return self.session.calibration_windows(
            self.settings.calibration, self._opened.task
        )

    def measure(self, target: str | None, formats: Sequence[str], limits: Limits) -> None:
        exhaustive = self.settings.exhaustive
        self.do(
            "measure",
            lambda: measure.measure_recipes(
                self.session,
                Sweep(self.model, self.journal),
                formats,
                self._windows(),
                self._hire,
                target=target,
                limits=Limits() if exhaustive else limits,
                held_out=self.settings.held_out,
                exhaustive=exhaustive,
            ),
            target,
        )

    def measure_caches(self, target: str) -> None:
        """Keys and values in the target's formats, which a plan for a memory chooses from."""
        if not (formats := get_target(target).cache_formats) or not any(
            c.kind in CACHES for c in states_of(self.model)
        ):
            return
        text = replace(self.settings.calibration, windows=None, window_length=None)
        windows = self.session.calibration_windows(
            measure.states_text(text, self.model), self.model.task
        )
        sweep = Sweep(self.model, self.journal)
        how = (self.session, sweep, windows, self._hire, formats, measure.CACHES_ONLY)
        self.do(
            "measure",
            lambda: measure.measure_states(*how),
            target,
            key=f"states {target}",
            given=formats,
        )

    def plan_fp16(self) -> None:
        def work() -> plan.PlanResult:
            planner = self._planner()
            table = self.journal.table()
            return plan.finished(planner, table, [planning.uniform_plan(table, FP16)])

        self.do("plan", work, key="plan fp16", outputs=[f"plans/{UNIFORM_FP16}.json"])

    def plan(self, target: str) -> None:
        """Plans for a target and compares with stock recipes."""
        settings = self.settings
        limits = self._limits(target)
        name = self.settings.recommended(target)
        rivals = None if settings.rivals == NONE else settings.rivals
        planner = self._planner(target, limits)

        def work() -> plan.PlanResult:
            table = planner.table()
            best = plan.plan_within(planner, table, plan.Choosing(name=name))
            return plan.finished(
                planner, table, [best], rivals=rivals, verify=True, tune=settings.tune
            )

        self.do(
            "plan",
            work,
            target,
            key=f"plan {name}",
            given=(limits.given, rivals, settings.tune, asdict(settings.held_out)),
            inputs=self._measurements(target),
            outputs=[f"plans/{name}.json"],
        )
        self.journal.store(RECOMMENDED, recommended_name(target), name)
        # For the runtime's own quantizer too, unless that has no words for it.
        if (tool := get_target(target).recipe_tool) is not None:
            with suppress(PlanError):
                plan.handed_over(planner, self._plans()[name], tool)

    def reproduce_paper(self) -> None:
        """Measures weights alone, ranks metrics, makes the paper's points."""
        settings = self.settings
        self.measure(None, PAPER_FORMATS, Limits())
        inputs = self._measurements(None, PAPER_FORMATS)
        text = settings.evaluation_text
        if "rank" not in settings.without:
            windows = settings.evaluation_windows or 0
            self.do(
                "paper",
                lambda: paper.rank_metrics(
                    self.session,
                    self.journal,
                    self.model,
                    text,
                    windows,
                    self._hire,
                    formats=PAPER_FORMATS,
                ),
                key="rank",
                given=(text, windows),
                inputs=inputs,
            )

        def work() -> plan.PlanResult:
            planner = self._planner()
            table = self.journal.table()
            points = plan.published_points(planner, table, "cpu", plan.Choosing())
            return plan.finished(planner, table, points, verify=True)

        self.do(
            "plan",
            work,
            key="plan paper",
            given=asdict(settings.held_out),
            inputs=inputs,
            outputs=["plans/uniform_int?.json", "plans/*_point[0-9][0-9].json"],
        )

    def compared(self, target: str) -> list[str]:
        """The plans to export and compare for a target, the recommendation last."""
        plans = self._plans()
        name = self.settings.recommended(target)
        # What runs with other limits recommended stays as it is.
        of_runs = recommended_name(target)
        ours = (name, f"{name}.own")
        own = [p for p in plans.values() if p.target == target]
        own = [p for p in own if p.name in ours or not p.name.startswith(of_runs)]
        own.sort(key=lambda p: -(p.file_bytes or 0))
        names = [UNIFORM_FP16, *(p.name for p in own)]
        held = _held(get_target(target), PAPER_FORMATS)
        if self.settings.paper and len(held) == len(PAPER_FORMATS):
            points = [p for p in plans.values() if p.target in (None, target)]
            best = best_paper_point(points, plans[name])
            names += [
                *(f"uniform_{fmt}" for fmt in reversed(PAPER_FORMATS)),
                *([best.name] if best else []),
            ]
        return [*(n for n in dict.fromkeys(names) if n in plans and n != name), name]

    def deciding(self, target: str) -> set[str]:
        """The plans whose files prove the answer, so that only their runtime may judge them: the recommendation, of the
        stock files that are no larger the nearest and the best, the next larger one, our own plan if it lost to one of
        them, and what reproduces the paper."""
        sizes = self._sizes(target)
        losses = self._losses(target)
        own = self.settings.recommended(target)
        stock = [name for name in sizes if name in losses]
        ours = choosing.Contender(own, sizes[own], math.nan, None)
        rivals = [
            choosing.Contender(name, sizes[name], losses[name], None) for name in stock
        ]
        others = {name for name in sizes if name != UNIFORM_FP16 and name not in stock}
        return others | choosing.deciding(ours, rivals)

    def _losses(self, target: str) -> dict[str, float]:
        """What stock files lose on test text, where they were judged, or else their plans on held-out text."""
        plans = self._plans()
        stock = [plans[name] for name in self.compared(target)[:-1]]
        found = {
            p.name: p.measured.kl.value
            for p in stock
            if p.family == "stock" and p.measured
        }
        for score in judging.read_scores(self.journal, "divergence"):
            if score.subject.target == target and score.subject.plan in found:
                found[score.subject.plan] = score.values["kl_mean"].value
        return found

    def _sizes(self, target: str) -> dict[str, int]:
        """Bytes of the files to compare, of those that could be written."""
        folder = self.folder / "artifacts" / target
        found = {name: earlier_artifact(folder / name) for name in self.compared(target)}
        return {
            name: artifact.realised_bytes for name, artifact in found.items() if artifact
        }

    def export(self, target: str, plans: Sequence[str]) -> bool:
        """Whether the plans were exported. An architecture that the runtime does not support is not a failure."""
        folder = self.folder / "artifacts" / target
        # `fallback`: formats the runtime cannot hold are replaced; the export's table says which and why.
        files = export.Files(target, self.events, {"fallback": True})
        try:
            self.do(
                "export",
                lambda: files.of_plans(self.journal, self.model, plans),
                target,
                key=f"export {target} {plans[-1]}",
                given=plans,
                inputs=self._files(*(f"plans/{name}.json" for name in plans)),
                lost=not all(earlier_artifact(folder / name) for name in plans),
                # Runs with other limits write the files of stock recipes again; their weights are the same.
                outputs=[f"artifacts/{target}/{plans[-1]}/artifact.json"],
            )
        except (TargetError, RuntimeError) as error:
            self.events.tell(f"not exported to {target}: {error}")
            unasked = self.settings.targets is None and isinstance(
                error, UnsupportedError
            )
            if unasked:
                self.left_out[target] = str(error)
                return False
            self.failed.append(f"export --target {target}")
            if plans[-1] in (UNIFORM_FP16, self.settings.recommended(target)):
                self.without_file[target] = str(error)
            return False
        return True

    def first_file(self, target: str) -> Path:
        """Says where the recommended file is; what follows proves it."""
        name = self.settings.recommended(target)
        folder = self.folder / "artifacts" / target / name
        plan = self._plans()[name]
        size = human_bytes(read_artifact(folder).realised_bytes)
        loss = plan.measured
        told = "" if loss is None else f", KL about {loss.kl.value:.2g} on held-out text"
        self.events.tell(
            f"{folder}: {size}{told}; it can be used while what follows proves it"
        )
        return folder

    @contextmanager
    def working_ahead(self) -> Iterator[None]:
        if not _leaves_time(self._opened):
            yield
            return
        # Of a small model several files are read at once, because one does not keep all processors busy, and its stock
        # recipes are quantized before another process could start.
        large = _is_large(self._opened)
        self._ahead = Ahead(1 if large else AT_ONCE)
        if large:
            opening = replace(self.settings.opening, device="cpu")
            place = self._opened.source or self._opened.name
            self._apart = aside(
                max(1, processors() - SPARED), _begin_apart, place, opening, self.folder
            )
        try:
            yield
        finally:
            self._ahead.stop()
            self._end_apart()

    def _end_apart(self) -> None:
        if self._apart is not None:
            self._apart.end()
            self._apart = None

    def read_ahead(self, target: str, plan: str, *, whole: bool = True) -> None:
        """Begins to compute a file's logits for `evaluate`, where a GPU leaves the processors time."""
        compared = [
            result.subject for result in current_results(self.journal, "agreement")
        ]
        known = any(
            (subject.target, subject.plan) == (target, plan) for subject in compared
        )
        if self._ahead is None or known or "evaluate" in self.settings.without:
            return
        model = self.model
        place = self.folder / "artifacts" / target / plan
        get_target(target).prepare()  # here, not in a thread
        text = judging.prepare(
            self.settings.evaluation_text, model.task, **self._judging(whole=whole)
        )
        columns = model.anatomy.component(model.anatomy.head).shape[-2]
        self._ahead.read(
            place, of.Runtime(threads=self.settings.threads).session(), text, columns
        )

    def begin_with_stock(self, targets: Sequence[str]) -> None:
        """Begins what the usual stock recipes need of the processors, where a GPU leaves them time: quantizing them,
        and reading the largest, which nearly always is one of the files that decide."""
        new = [
            target
            for target in targets
            if self.settings.recommended(target) not in self._plans()
        ]
        if self._ahead is None or self.settings.rivals == NONE:
            return
        for target in new:
            planner = self._planner(target)
            table = self.journal.table()
            stock = planner.rivals(table, None, everything=False)
            parts = (part for each in stock for part in parsed(each.assignment).items())
            if self._apart is not None:
                with suppress(BrokenExecutor):  # it could not open the model, or died
                    self._quantized[target] = self._apart.submit(
                        _quantize_apart, [*dict.fromkeys(parts)]
                    )
            if stock and "evaluate" not in self.settings.without:
                largest = max(stock, key=lambda each: each.file_bytes or 0)
                self.do("plan", partial(plan.finished, planner, table, [largest]), target)
                if self.export(target, [largest.name]):
                    self._early.add((target, largest.name))
                    self.read_ahead(target, largest.name)

    def _judging(self, *, whole: bool) -> dict[str, int]:
        """The length and number of windows that files are judged on; not `whole`: compared with PyTorch alone."""
        windows = self.settings.evaluation_windows or COMPARED_WINDOWS
        length = self.settings.calibration.window_length or self.model.task.window_length
        return {"window": length, "limit": windows if whole else FIRST_LOOK}

    def evaluate(
        self, plans: Sequence[str], targets: Sequence[str], *, whole: bool = False
    ) -> None:
        """Sees whether files agree with PyTorch; on the whole text, what each loses."""
        settings = self.settings
        model = self.model
        how = self._judging(whole=whole)

        def work() -> evaluate.EvaluateResult:
            if settings.threads is not None:
                torch.set_num_threads(settings.threads)
            found = judging.run_subjects(
                self.journal,
                model,
                of.Runtime(threads=settings.threads).session(),
                plans=",".join(plans),
                targets=targets,
            )
            stock = {t: self._losses(t) for t in targets if whole and t != evaluate.TORCH}
            ahead: dict[str, Any] = (
                {} if self._ahead is None else {"ahead": self._ahead.take}
            )
            judge = evaluate.Judge(
                self.journal,
                self.session,
                found,
                model.task,
                model,
                again=settings.again and whole,
                others=_keys(
                    {target: [UNIFORM_FP16, *names] for target, names in stock.items()}
                ),
                deciding=lambda: _keys(
                    {target: self.deciding(target) for target in stock}
                ),
                **ahead,
            )
            judge.text(
                settings.evaluation_text, {PERPLEXITY, DIVERGENCE} if whole else (), **how
            )
            if whole:
                judge.tasks(settings.tasks, how["window"])
            return judge.result

        self.do("evaluate", work, optional=True)

    def write_samples(self, files: Sequence[Path]) -> None:
        """Text by the original and by the recommended files, for the report."""
        if self.model.residency is not None and not self.model.residency.cached:
            self.events.note(
                "no text samples: every token would read the whole model from disk"
            )
            return
        judged = [judging.JudgedArtifact(place, plan=place.name) for place in files]
        work = partial(store_continuations, self.journal, self.model, judged, PROMPTS)
        self.do("generate", work, optional=True)

    def benchmark(self, targets: Sequence[str]) -> None:
        """Times the files that decide, FP16, and the smallest, so that speeds between them can be predicted."""
        settings = self.settings
        runtime = of.Runtime(threads=self.settings.threads).session()
        use = UseSettings((32, 128), 32, settings.repeats, runtime, narrow=NARROW)
        files = []
        for target in targets:
            sizes = self._sizes(target)
            timed = self.deciding(target) | {
                UNIFORM_FP16,
                min(sizes, key=sizes.__getitem__),
            }
            files += [f"artifacts/{target}/{plan}" for plan in sizes if plan in timed]
        records = self._files(*(f"{file}/artifact.json" for file in files))
        versions = [
            get_target(t).version for t in targets
        ]  # another may have another speed
        self.do(
            "benchmark",
            lambda: benchmark.time_files(
                [self.folder / f for f in files], self.journal, self.session, use
            ),
            key=f"benchmark {files[-1]}",
            given=(files, settings.repeats, settings.threads),
            inputs=" ".join([records, *versions]),
            optional=True,
        )


_apart: LoadedModel  # in the process that quantizes ahead


def _begin_apart(place: str, opening: Opening, folder: Path) -> None:
    global _apart
    session = Session()
    _apart = session.in_run(session.model(place, opening, weights=of.DISK), folder)


def _quantize_apart(parts: Sequence[tuple[str, Recipe]]) -> None:
    """For the store on disk, which knows weights by their content. What needs statistics is left out: those of a GPU
    may differ in the last bit."""
    for component, recipe in parts:
        if recipe.quantizer.is_expensive(recipe.grid) and not recipe.quantizer.learns:
            _apart.weights.digest(component, recipe)


def _is_large(model: LoadedModel) -> bool:
    return (
        sum(component.parameters for component in model.anatomy.components)
        > LARGE * processors()
    )


def _leaves_time(model: LoadedModel) -> bool:
    """Whether a GPU measures. Without one, work beside measuring would only take turns with it; a model on disk has no
    memory to spare."""
    return model.device.type != "cpu" and model.residency is None


def _held(target: Target, recipes: Sequence[str]) -> list[str]:
    """Those that the target supports."""
    return [
        name
        for name in recipes
        if target.holds(Recipe.parse(name).grid, _ANY_SHAPE) is None
    ]


def _keys(files: Mapping[str, Iterable[str]]) -> list[str]:
    return [
        Subject(ARTIFACT, name, target).key
        for target, names in files.items()
        for name in names
    ]


def _digest(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:16]
