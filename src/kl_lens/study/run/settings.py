"""What `run` is asked to do, the formats that follow from it, and what it made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kl_lens.base.errors import KLLensError, PlanError
from kl_lens.base.units import spell_bytes, spell_share
from kl_lens.model import Anatomy
from kl_lens.run.folder import recommended_name
from kl_lens.study import measure, plan, settings as of
from kl_lens.study.settings import (
    Calibration,
    HeldOut,
    Limits,
    Opening,
    Processes,
    Tasks,
    group,
    option,
    with_options,
)
from kl_lens.targets import (
    Target,
    describe_target,
    get_target,
    menu_of,
    usual_targets,
)
from kl_lens.weights.recipes import Recipe

MAX_LOSS = 0.01  # nats per token: about one percent of perplexity
OPTIONAL_STAGES = ("evaluate", "benchmark", "report")
SHORT = "short"
FULL = "full"
SMALL = "small"
NONE = "none"
_ANY_SHAPE = (1024, 1024)  # every format fits it
_proof = of.grouped("checking the result")


@with_options
class RunSettings(of.Settings):
    model: of.Model = of.of_model()
    opening: Opening = group(Opening)
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
    limits: Limits = group(
        Limits, max_loss=of.wanted(MAX_LOSS, "the smallest file with at most this KL")
    )
    budget: of.Share | None = of.wanted(
        None, "the best file of at most this share of the FP16 file's size"
    )
    exhaustive: bool = option(False, "measure every component in every format")
    gradients: bool = option(False, of.GRADIENTS)
    table: str | None = option(
        None,
        "measure nothing: plan from the sensitivities that kl-lens table --out wrote, or published ones",
        metavar="FILE|ORG/NAME",
    )
    target: of.Names | None = of.of_targets(
        "runtimes to make files for (default: openvino,gguf; mlx if only that is installed)"
    )
    rivals: str = _proof(
        plan.USUAL, "stock recipes to compare with", choices=(NONE, plan.USUAL, plan.ALL)
    )
    evaluation_text: of.Text = _proof("wikitext2:test", "text that files are scored on")
    evaluation_windows: of.Count | None = _proof(
        None,
        "number of windows (default: 8; 4 for a large model on few processors)",
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
        (), f"stages to skip, of {', '.join(OPTIONAL_STAGES)}", metavar="STAGES"
    )
    again: bool = _proof(False, "repeat stages that are already done")
    estimate: bool = option(
        False, "only estimate time, memory and disk (without --tune and tasks)"
    )

    @property
    def named(self) -> tuple[str, ...]:
        return self.target or usual_targets()

    @property
    def wanted(self) -> tuple[str, ...]:
        """The targets of --target, or the usual ones that are installed."""
        return (
            self.named
            if self.target
            else tuple(t for t in self.named if not describe_target(t).lacks())
        )

    def menu_of(self, target: str, anatomy: Anatomy) -> Sequence[str]:
        """The formats that a target's plans choose from; without `--menu`, the size asked of this model decides."""
        chosen = get_target(target)
        max_bytes = self.limits.max_bytes
        if self.formats is not None:
            return supported(chosen, self.formats)
        if self.menu is not None:
            full = self.menu == FULL
            return menu_of(chosen, anatomy.shapes, full=full, small=self.menu == SMALL)
        if self.budget is not None:  # without what a file has besides weights
            max_bytes = int(
                self.budget * sum(2 * c.parameters for c in anatomy.components)
            )
        return measure.menu_for(chosen, anatomy, max_bytes)

    def recommended(self, target: str) -> str:
        """Name of the plan for a target, with the limit if it is not the usual one: a run with another limit replaces
        nothing."""
        limits = self.limits
        if limits.max_bytes is not None:
            limit = spell_bytes(limits.max_bytes)
        elif (use := limits.use) is not None:
            limit = f"{spell_bytes(limits.memory or 0)}-{use.context}x{use.batch}"
        elif limits.max_drop is not None:
            limit = f"drop{spell_share(limits.max_drop)}"
        elif self.budget is not None:
            limit = spell_share(self.budget)
        else:
            limit = "" if limits.max_loss == MAX_LOSS else f"kl{limits.max_loss!r}"
        return recommended_name(target, limit.replace("%", "pct"))

    def check(self) -> None:
        super().check()
        if unknown := sorted(set(self.without) - set(OPTIONAL_STAGES)):
            raise KLLensError(
                f"--without {unknown[0]!r}: only {', '.join(OPTIONAL_STAGES)} can be skipped"
            )
        for target in map(get_target, self.wanted if self.formats else ()):
            if not supported(target, self.formats or ()):
                raise PlanError(
                    f"--formats {','.join(self.formats or ())}: {target.title} supports none of them; leave it out "
                    f"with --target, or add some of {', '.join(target.formats)}"
                )
        if self.table and (self.exhaustive or self.formats):
            raise KLLensError(
                "--table measures nothing: leave out --exhaustive and --formats, or --table"
            )
        self.limits.check()
        self.held_out.check(searches=self.limits.bytes is None and self.budget is None)
        self.tasks.check()
        if self.opening.weights == of.DISK and (why := self.needs_memory()):
            raise KLLensError(
                f"--weights disk does not work with {why}, which needs the model in memory"
            )

    def needs_memory(self) -> str | None:
        """What cannot work with weights on disk, of all that is asked for."""
        whole = [
            f"--target {name}"
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
    original: str = ""  # what the model is, if not the original

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0


def supported(target: Target, recipes: Sequence[str]) -> list[str]:
    """Those that the target supports."""
    return [
        name
        for name in recipes
        if target.holds(Recipe.parse(name).grid, _ANY_SHAPE) is None
    ]
