"""`Study`: one model, one run folder, one method per command. The command line uses it too.

Each command has its settings and its function in the module of its name, which loads on first use.
"""

from __future__ import annotations

import gc
import html
import importlib
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kl_lens.base.environment import quiet_libraries
from kl_lens.base.errors import KLLensError
from kl_lens.study import settings as of
from kl_lens.study.events import Bars, Events, Several
from kl_lens.study.keywords import Method, verb
from kl_lens.study.session import Session
from kl_lens.study.settings import DEFAULT_MODEL, OPENING_NAMES, Settings
from kl_lens.targets import describe_target

if TYPE_CHECKING:  # `generate` runs on small devices and loads no torch
    from typing import Unpack

    from kl_lens.judging.duel import Entrant
    from kl_lens.judging.ranking import Ranking
    from kl_lens.measuring.statistics import StoredStatistics
    from kl_lens.model import LoadedModel
    from kl_lens.reporting.notebook import PlottedFrontier, PlottedTable
    from kl_lens.run.autopsies import Autopsy
    from kl_lens.run.records import Plan, Profile, Rows, Score, SensitivityTable
    from kl_lens.study import typed
    from kl_lens.study.generate import GenerateResult
    from kl_lens.study.run import RunResult


T = TypeVar("T")


def settings_of(verb: str) -> type[Settings]:
    gc.disable()  # it takes an eighth of the time in which torch and transformers load
    try:
        home = importlib.import_module(f"kl_lens.study.{verb}")
    finally:
        gc.enable()
        gc.freeze()  # what stays is not looked through again
    return next(
        kind
        for kind in vars(home).values()
        if isinstance(kind, type)
        and issubclass(kind, Settings)
        and getattr(kind, "verb", None) == verb
    )


def _verb(name: str, *without: str) -> Callable[[Method], Method]:
    return lambda function: verb(function, partial(settings_of, name), *without)


def use_llama_cpp(path: Path) -> None:
    """The llama.cpp of all that follows: a libllama file, or a folder with one."""
    from kl_lens.targets.gguf.library import use_library

    use_library(path)


class Study:
    """One model, one run folder, one target.

    Each method does the same as the command of that name. It takes the command's flags as keywords, with underscores
    (`help(Study.measure)`, or `kl-lens measure --help-all`), and stores its results in the run folder. The folder and
    the target are filled in from the study.

    Args:
        model: a folder, a hub id, `reference:mamba`, or a model from `kl_lens.load`.
        target: the runtime to measure, plan and export for, such as `gguf` or `openvino`.
        folder: the run folder (default: runs/<model>). Work that is already done there is not repeated.
        events: receives notes, warnings and progress (default: a bar for long work, and warnings by `logging`).
        loading: how the model is opened: `device`, `dtype`, `tokenizer`, `trust_remote_code`, …

    Example:
        >>> study = Study("reference:mamba", target="gguf", folder="runs/mamba")
        >>> study.calibrate(); study.measure()
        >>> plan = study.plan(max_bytes="4.5MB")
        >>> file = study.export(plan)
        >>> study.evaluate(file); study.report()
        >>> study.table.to_pandas()
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = DEFAULT_MODEL,
        target: str | None = None,
        folder: str | Path | None = None,
        *,
        events: Events | None = None,
        **loading: Any,
    ) -> None:
        self._model = model
        self._folder = folder
        self.target = target
        self._loading = loading
        if target is not None:
            describe_target(target)
        opened = None if isinstance(model, str | Path) else model
        quiet_libraries()
        self.session = Session(events or Bars(), opened)  # what the commands share
        if unknown := sorted(set(loading) - set(OPENING_NAMES)):
            raise KLLensError(
                f"Study has no setting {unknown[0]!r}; it has model, target, folder, events, {', '.join(OPENING_NAMES)}"
            )

    def __repr__(self) -> str:
        name = self._model if isinstance(self._model, str | Path) else self._model.name
        return (
            f"Study({str(name)!r}, target={self.target!r}, folder={str(self._folder)!r})"
        )

    def _repr_html_(self) -> str:
        """The plans and files of the run, in a notebook."""
        from kl_lens.reporting.data import read_plans
        from kl_lens.run.folder import Run
        from kl_lens.run.records import Rows

        title = html.escape(repr(self))
        if self._folder is None or not self.folder.is_dir():
            return title
        with Run.open(self.folder) as run:
            plans = read_plans(self.folder / "plans", run.components)
        return f"{title}{Rows(plans)._repr_html_()}"

    @property
    def model(self) -> LoadedModel:
        """The opened model."""
        return self.session.model(
            str(self._model), of.Opening(**{"weights": None} | self._loading)
        )

    @cached_property
    def folder(self) -> Path:
        """The run folder."""
        return (
            Path(self._folder)
            if self._folder is not None
            else of.new_run_folder(None, self.model.name)
        )

    @property
    def table(self) -> PlottedTable:
        """The measurements for the target, one row for each component and recipe; `table.plot()` draws them."""
        from kl_lens.reporting.notebook import PlottedTable
        from kl_lens.run.folder import Run

        with Run.open(self.folder) as run:
            return PlottedTable(**vars(run.table(target=self.target)))

    # -- every verb goes through these --------------------------------------------------------------------

    def settings(self, verb: str, **given: Any) -> Settings:
        """The settings of a command: the given values, and model, target and folder from the study."""
        kind = settings_of(verb)
        name = (
            self._model
            if isinstance(self._model, str | Path)
            else self._model.source or self._model.name
        )
        from_study = {"model": str(name), **self._loading}
        if verb not in ("evaluate", "benchmark"):  # they take all files
            from_study["target"] = self.target
        names = {option.name for option in of.options_of(kind)}
        if "run" in names:
            from_study["run"] = (
                str(self.folder)
                if self._folder is None and verb != "run"
                else self._folder
            )
        defaults = {name: value for name, value in from_study.items() if name in names}
        return of.from_python(kind, defaults | given)

    def do(self, settings: Settings) -> Any:
        """Runs a command and returns its whole result; the methods below return the main part of it."""
        return self.session.do(settings)

    def _done(self, verb: str, **given: Any) -> Any:
        """Of several targets the last."""
        result = self.do(self.settings(verb, **given))
        return [*result.results.values()][-1] if isinstance(result, Several) else result

    # -- the verbs --------------------------------------------------------------------------------------------

    @_verb("run")
    def run(self, **flags: Unpack[typed.Run]) -> RunResult:
        """All stages in order, for the study's target or, without one, for all targets."""
        return self._done("run", **flags)

    @_verb("inspect")
    def inspect(self, **flags: Unpack[typed.Inspect]) -> LoadedModel:
        """The model, with its blocks and components (`anatomy`)."""
        return self._done("inspect", **flags)

    @_verb("calibrate")
    def calibrate(self, **flags: Unpack[typed.Calibrate]) -> StoredStatistics:
        """Gathers statistics of every component's inputs on a text. Recipes such as `q4_k+gptq` need them."""
        return self._done("calibrate", **flags).statistics

    @_verb("measure")
    def measure(self, **flags: Unpack[typed.Measure]) -> SensitivityTable:
        """How much each component suffers from each format of the target. An interrupted sweep is resumed."""
        _complete(self._done("measure", **flags))
        return self.table

    @_verb("paper")
    def rank(self, **flags: Unpack[typed.Rank]) -> Ranking:
        """Which metric predicts the damage on held-out text."""
        return self._done("paper", **flags)

    @_verb("plan", "frontier")
    def plan(self, **flags: Unpack[typed.Plan]) -> Plan:
        """The best plan within `max_bytes="4.5MB"`, `max_loss=0.01`, `max_drop="3%"`, …; the last of several."""
        return self._done("plan", **flags).plans[-1]

    @_verb("plan", "frontier")
    def frontier(self, **flags: Unpack[typed.Frontier]) -> PlottedFrontier:
        """The Pareto frontier of bytes and KL; `frontier.plot()` draws it."""
        from kl_lens.reporting.notebook import PlottedFrontier

        return PlottedFrontier(self._done("plan", frontier=True, **flags).frontier)

    @_verb("export")
    def export(
        self, plan: Plan | str | None = None, **flags: Unpack[typed.Export]
    ) -> Path:
        """Writes a plan, or with `format="q8_0"` the whole model, as files of the target. Returns their folder.

        A plan that was changed in Python is written to the run folder first.
        """
        name = plan if plan is None or isinstance(plan, str) else self._kept(plan)
        return self._done("export", plan=name, **flags)[-1].folder

    @_verb("evaluate")
    def evaluate(
        self, *files: Path | str, **flags: Unpack[typed.Evaluate]
    ) -> Rows[Score]:
        """Perplexity and KL from the original for these files, or for all files of the run; `tasks=` adds tasks."""
        return _rows(_complete(self._done("evaluate", artifact=files, **flags)).scores)

    @_verb("compare")
    def compare(
        self, *files: Path | str, **flags: Unpack[typed.Compare]
    ) -> Rows[Entrant]:
        """These files of the study's model side by side, whoever made them, small ones first."""
        return _rows(_complete(self._done("compare", files=files, **flags)).duel)

    @_verb("benchmark")
    def benchmark(
        self, *files: Path | str, **flags: Unpack[typed.Benchmark]
    ) -> Rows[Profile]:
        """Speed and memory of these files, or of all files of the run."""
        result = _complete(self._done("benchmark", artifacts=files, **flags))
        return _rows(result.profiles)

    @_verb("autopsy")
    def autopsy(self, file: Path | str, **flags: Unpack[typed.Autopsy]) -> Autopsy:
        """What is wrong with a file of this model, whoever made it."""
        has_run = (
            self._folder is not None and self.folder.is_dir()
        )  # a run is optional here
        return self._done(
            "autopsy", file=file, run=self._folder if has_run else None, **flags
        ).autopsy

    @_verb("generate")
    def generate(
        self, file: Path | str, prompt: str, **flags: Unpack[typed.Generate]
    ) -> GenerateResult:
        """Text from an exported model."""
        return self._done("generate", artifact=file, prompt=prompt, **flags)

    @_verb("report")
    def report(self, **flags: Unpack[typed.Report]) -> Path:
        """Writes the run as one HTML file and returns its path; a notebook shows the page."""
        from kl_lens.reporting.notebook import ReportFile

        return ReportFile(self._done("report", **flags))

    @_verb("publish")
    def publish(self, to: str, **flags: Unpack[typed.Publish]) -> Path:
        """Writes the target's file with its model card to a folder, and uploads it unless `dry_run`."""
        return self._done("publish", to=to, **flags).folder

    def _kept(self, plan: Plan) -> str:
        """Writes the plan to the run folder if it differs from the stored one; returns its name."""
        from kl_lens import planning
        from kl_lens.run.folder import Run

        path = planning.plan_path(self.folder / "plans", plan.name)
        with Run.open(self.folder) as run:
            components = run.components
        if not path.exists() or planning.read_plan(path, components) != plan:
            planning.write_plan(plan, path, components)
        return plan.name


# -- files without a run folder --------------------------------------------------------------------------


@_verb("evaluate")
def evaluate(*files: Path | str, **flags: Unpack[typed.EvaluateAlone]) -> Rows[Score]:
    """Scores of exported folders or `.gguf` files; with `model=…` also their KL from the original."""
    return _rows(_alone("evaluate", artifact=files, **flags).scores)


@_verb("compare")
def compare(
    *files: Path | str, model: str, **flags: Unpack[typed.CompareAlone]
) -> Rows[Entrant]:
    """Files of one model side by side, whoever made them, small ones first."""
    return _rows(_alone("compare", files=files, model=model, **flags).duel)


@_verb("benchmark")
def benchmark(*files: Path | str, **flags: Unpack[typed.BenchmarkAlone]) -> Rows[Profile]:
    """Speed and memory of exported folders or `.gguf` files."""
    return _rows(_alone("benchmark", artifacts=files, **flags).profiles)


@_verb("generate")
def generate(
    file: Path | str, prompt: str, **flags: Unpack[typed.GenerateAlone]
) -> GenerateResult:
    """Text from an exported folder or a `.gguf` file; with `chat=True` an answer by its chat template."""
    return _alone("generate", artifact=file, prompt=prompt, **flags)


def _rows(records: list[T]) -> Rows[T]:
    from kl_lens.run.records import Rows

    return Rows(records)


def _alone(verb: str, **given: Any) -> Any:
    return _complete(Study().do(of.from_python(settings_of(verb), given)))


def _complete(result: Any) -> Any:
    """Raises if part of the work failed (the command line would return exit code 1)."""
    if failures := getattr(result, "failures", None):
        subject, reason = next(iter(failures.items()))
        raise KLLensError(
            reason if reason.startswith(subject) else f"{subject}: {reason}"
        )
    return result
