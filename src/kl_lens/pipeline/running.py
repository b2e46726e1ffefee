"""`run`: every stage in order, on the embedded model unless another is named.

Each stage is the verb of its own name with the settings shown; each can be repeated alone, and what is done already is
not done again. All share one workbench: the checkpoint is opened once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kl_lens import planning
from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import KLLensError, TargetError, UnsupportedError
from kl_lens.evaluation import JudgedArtifact
from kl_lens.evaluation.continuations import store_continuations
from kl_lens.evaluation.tasks import require_lm_eval
from kl_lens.paper import best_paper_point
from kl_lens.pipeline.benchmarking import BenchmarkSettings
from kl_lens.pipeline.evaluating import TORCH, EvaluateSettings
from kl_lens.pipeline.events import Events, going_on
from kl_lens.pipeline.exporting import ExportSettings
from kl_lens.pipeline.inspecting import InspectSettings
from kl_lens.pipeline.measuring import Calibration, MeasureSettings, calibration_text
from kl_lens.pipeline.planning import PlanSettings
from kl_lens.pipeline.ranking import RankSettings
from kl_lens.pipeline.reporting import ReportSettings
from kl_lens.pipeline.settings import (
    COUNT,
    NAMES,
    SHARE,
    SIZE,
    HeldOut,
    OfModel,
    chosen_targets,
    command_of,
    grouped,
    new_run_folder,
    option,
)
from kl_lens.pipeline.stages import Stages
from kl_lens.pipeline.workbench import Workbench
from kl_lens.recipes import Recipe, spelled
from kl_lens.runs import Run
from kl_lens.targets import describe_target, read_artifact

UNIFORM_FP16, RECOMMENDED = "uniform_fp16", "recommended"
PROMPTS = ("The history of the city", "In the early years of the war ,")
OPTIONAL_STAGES = ("rank", "evaluate", "benchmark", "report")
_wanted, _proof = grouped("the recommended plan (one of them)"), grouped("proof")


@dataclass(frozen=True, kw_only=True)
class RunSettings(HeldOut, Calibration, OfModel):
    verb: ClassVar[str] = "run"

    run: str | None = option(None, "the run folder (default: runs/<model>)", metavar="DIR")
    windows: int = calibration_text(8, "how many windows", kind=COUNT)
    formats: tuple[str, ...] = option(("int4", "int8"), "comma-separated", kind=NAMES)
    budget: float = _wanted(0.45, "its size, of the FP16 model's", kind=SHARE)
    max_bytes: int | None = _wanted(None, "its size, as a number", kind=SIZE)
    max_drop: float | None = _wanted(
        None, "the smallest whose held-out perplexity rises by no more, e.g. 3%", kind=SHARE
    )
    targets: tuple[str, ...] | None = _proof(None, "where to export to (default: to all)", kind=NAMES)
    evaluation_text: str = _proof("wikitext2:test", metavar="TEXT")
    evaluation_windows: int = _proof(8, "windows of the evaluation text for rank and evaluate", kind=COUNT)
    held_out: str = _proof("wikitext2:valid", metavar="TEXT")
    held_out_windows: int = _proof(8, kind=COUNT)
    tasks: tuple[str, ...] | None = _proof(None, "lm-eval tasks too (needs kl-lens[eval])", kind=NAMES)
    task_data: Path | None = _proof(None, "local task files, instead of the hub", metavar="DIR")
    task_limit: int | None = _proof(None, "examples of each task", kind=COUNT)
    repeats: int = _proof(3, "of timings", kind=COUNT)
    threads: int | None = _proof(None, "of the runtimes (default: all)", kind=COUNT)
    prompt: str | None = _proof(None, "for the samples of text (default: two of our own)")
    without: tuple[str, ...] = _proof(
        (), "of rank, evaluate, benchmark, report", kind=NAMES, metavar="STAGES"
    )
    again: bool = _proof(False, "do again what is done already")

    def check(self) -> None:
        """What would fail after minutes is refused at once."""
        if unknown := sorted(set(self.without) - set(OPTIONAL_STAGES)):
            raise KLLensError(f"--without {unknown[0]!r}: only {', '.join(OPTIONAL_STAGES)} can be left out")
        chosen_targets(self.targets)
        if self.max_drop is not None and self.max_bytes is not None:
            raise KLLensError("--max-drop and --max-bytes: give one of them; each sets the size of the plan")
        if self.tasks is not None:
            require_lm_eval()


@dataclass(frozen=True)
class RunResult:
    settings: RunSettings
    folder: Path
    plans: list[str]  # those set side by side, the recommendation last
    exported: dict[str, Path]  # target → folder of the recommendation there
    stage_seconds: dict[str, float]
    failed: list[str]  # commands whose results nothing else needed
    seconds: float

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0


def run(settings: RunSettings, bench: Workbench, events: Events) -> RunResult:
    begin = time.perf_counter()
    settings.check()
    model = bench.model(settings)
    folder = new_run_folder(settings.run, model.name)
    with Run.create(folder) as journal:
        journal.note_command(["kl-lens", *command_of(settings)])
    stages = Stages(folder, bench, events, again=settings.again)
    with going_on(folder):
        plans, exported = _Course(settings, model, stages, events).run()
    seconds = time.perf_counter() - begin
    return RunResult(settings, folder, plans, exported, stages.seconds, stages.failures, seconds)


class _Course:
    """The stages of one run, in order."""

    def __init__(self, settings: RunSettings, model: LoadedModel, stages: Stages, events: Events) -> None:
        self.settings, self.model, self.stages, self.events = settings, model, stages, events
        self.folder = stages.folder
        # What every stage that opens the run's model is told.
        self.of_run: dict[str, Any] = {"run": str(self.folder), **settings.how}
        formats = dict.fromkeys(map(spelled, settings.formats))
        self.formats = sorted(formats, key=lambda name: -Recipe.parse(name).grid.bits)

    def run(self) -> tuple[list[str], dict[str, Path]]:
        settings = self.settings
        self.stages.do(InspectSettings(model=settings.model, **settings.how))
        self._measure()
        self._plan()
        plans = self._compared()
        exported = {
            target: self.folder / "artifacts" / target / RECOMMENDED
            for target in chosen_targets(settings.targets)
            if self._export(target, plans)
        }
        if "evaluate" not in settings.without:
            self._evaluate(plans, tuple(exported))
            self._write_samples(exported)
        if "benchmark" not in settings.without and exported:
            self._benchmark(plans, tuple(exported))
        if "report" not in settings.without:
            self.stages.do(ReportSettings(run=str(self.folder)))
        return plans, exported

    def _measure(self) -> None:
        settings = self.settings
        shared = ("model", "formats", "text", "windows", "window_length", "seed")
        self.stages.do(MeasureSettings(**{n: getattr(settings, n) for n in shared}, **self.of_run))
        if "rank" not in settings.without:
            self.stages.do(
                RankSettings(
                    evaluation_text=settings.evaluation_text,
                    evaluation_windows=settings.evaluation_windows,
                    **self.of_run,
                ),
                key="rank",
                inputs=self.stages.measurements(),
            )

    def _plan(self) -> None:
        """The paper's points, and the exact plan: the recommendation."""
        held_out: dict[str, Any] = {
            "held_out": self.settings.held_out,
            "held_out_windows": self.settings.held_out_windows,
            "verify": True,
        }
        inputs = self.stages.measurements()
        # The paper's points mix INT4 and INT8; with other formats there are only the uniform plans to compare with.
        paper = {"int4", "int8"} <= set(self.formats)
        others = [name for name in self.formats if not paper or name not in ("int4", "int8")]
        self.stages.do(
            PlanSettings(uniform=("fp16", *others), paper=paper, **held_out, **self.of_run),
            key="plan uniform",
            inputs=inputs,
            outputs=["plans/uniform_*.json", "plans/*_point[0-9][0-9].json"],
        )
        self.stages.do(
            PlanSettings(name=RECOMMENDED, **self._limit(), **held_out, **self.of_run),
            key="plan exact",
            inputs=inputs,
            outputs=[f"plans/{RECOMMENDED}.json"],
        )

    def _limit(self) -> dict[str, Any]:
        if self.settings.max_drop is not None:
            return {"max_drop": self.settings.max_drop}
        whole = sum(2 * c.parameters for c in self.model.anatomy.components)
        return {"max_bytes": self.settings.max_bytes or int(self.settings.budget * whole)}

    def _compared(self) -> list[str]:
        """The plans that are exported and set side by side, the recommendation last."""
        with Run.open(self.folder) as journal:
            components = journal.table().components
        paths = sorted((self.folder / "plans").glob("*.json"))
        found = {path.stem: planning.read_plan(path, components) for path in paths}
        best = best_paper_point(list(found.values()), found[RECOMMENDED])
        uniform = [f"uniform_{name.replace('+', '.')}" for name in self.formats]
        names = [UNIFORM_FP16, *uniform, best.name if best else "", RECOMMENDED]
        return [name for name in names if name in found]

    def _export(self, target: str, plans: Sequence[str]) -> bool:
        """Whether the plans are there as files. An architecture that a runtime does not have is no failure."""
        # What a runtime cannot hold is lowered, visibly: the table of the export says which and why.
        extra: dict[str, Any] = {"options": {"fallback": True}}
        if describe_target(target).translations:
            extra |= {"map": True, "held_out": self.settings.held_out, "held_out_windows": 2}
        folder = self.folder / "artifacts" / target
        try:
            self.stages.do(
                ExportSettings(target=target, plan=",".join(plans), **extra, **self.of_run),
                key=f"export {target}",
                inputs=self.stages.files(*(f"plans/{name}.json" for name in plans)),
                lost=not all(_is_whole(folder / name) for name in plans),
                outputs=[f"artifacts/{target}/{name}/artifact.json" for name in plans],
            )
        except UnsupportedError as error:
            self.events.warn(f"not exported to {target}: {error}")
            return False
        except TargetError as error:
            self.events.warn(str(error))
            self.stages.failures.append(f"export --target {target}")
            return False
        return True

    def _evaluate(self, plans: Sequence[str], targets: tuple[str, ...]) -> None:
        settings = self.settings
        # Its --device is a runtime's; PyTorch computes where the run does.
        shared = ("threads", "again", "tasks", "task_data", "task_limit")
        self.stages.do(
            EvaluateSettings(
                plan=",".join(plans),
                targets=(TORCH, *targets),
                perplexity=settings.evaluation_text,
                divergence="",
                window=settings.window_length,
                limit=settings.evaluation_windows,
                **{name: getattr(settings, name) for name in shared},
                **self.of_run,
            ),
            optional=True,
        )

    def _write_samples(self, exported: dict[str, Path]) -> None:
        """What the original and the recommendation write, side by side, for the report."""
        prompts = (self.settings.prompt,) if self.settings.prompt else PROMPTS
        self.events.heading("samples of text")
        begin = time.perf_counter()
        try:
            with Run.open(self.folder) as journal:
                files = [JudgedArtifact(place, plan=RECOMMENDED) for place in exported.values()]
                store_continuations(journal, self.model, files, prompts)
        except (KLLensError, RuntimeError, OSError) as error:
            self.events.warn(f"no samples of text: {error}")
            self.stages.failures.append("generate")
        self.stages.seconds["samples"] = time.perf_counter() - begin

    def _benchmark(self, plans: Sequence[str], targets: tuple[str, ...]) -> None:
        artifacts = [f"artifacts/{target}/{plan}/artifact.json" for target in targets for plan in plans]
        self.stages.do(
            BenchmarkSettings(
                run=str(self.folder),
                plan=",".join(plans),
                targets=targets,
                repeats=self.settings.repeats,
                prompt_lengths=(32, 128),
                new_tokens=32,
                threads=self.settings.threads,
            ),
            key="benchmark",
            inputs=self.stages.files(*artifacts),
            optional=True,
        )


def _is_whole(folder: Path) -> bool:
    try:
        read_artifact(folder)
    except TargetError:
        return False
    return True
