"""The settings of `plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kl_lens.base.errors import PlanError
from kl_lens.paper import PUBLISHED_METRIC
from kl_lens.planning.handover import TOOLS
from kl_lens.run.records import checked_plan_name
from kl_lens.study.settings import (
    COUNT,
    NAMES,
    SHARE,
    SIZE,
    FromDisk,
    HeldOut,
    OfRun,
    grouped,
    option,
)
from kl_lens.targets import TARGETS

_paper = grouped("the paper's points")
_quality = grouped("greedy under a quality budget")
_budget = grouped("exact budgets (any two together; one is minimised under the other)")
_proof = grouped("measuring on held-out text")
KL = "kl_teacher_to_student"
ALL, USUAL = "all", "usual"  # values of --rivals
TUNING_WINDOWS = 2048
_LOSSES, _GAMMAS = ("max_loss", "max_drop"), ("gamma", "gamma_exhaustive")
# Flags that make no new plan, and why.
_LOOKS = {
    "--frontier": "shows every size, so it takes no limit",
    "--plan": "names an existing plan and makes none",
    "--compare": "shows existing plans and makes none",
}


def check_held_out(windows: int, *, searches: bool) -> None:
    """`searches`: plans are measured until mean + standard error of the loss fits."""
    if searches and windows < 3:
        raise PlanError(
            f"--held-out-windows {windows}: --max-loss and --max-drop need at least 3; "
            "the first half is used for the search and needs two windows for a standard error"
        )
    if windows < 2:
        raise PlanError("--held-out-windows must be at least 2: one half decides, the other confirms")


@dataclass(frozen=True, kw_only=True)
class PlanSettings(HeldOut, FromDisk, OfRun):
    verb: ClassVar[str] = "plan"

    paper: bool = _paper(False, "uniform INT8 and INT4, and points 01 to 10")
    gpu: bool = _paper(False, "the GPU pipeline: INT8 or FP16", excludes="pipeline")
    gpu_int4: bool = _paper(False, "the GPU pipeline with INT4", excludes="pipeline")
    metric: str | None = _paper(
        None,
        f"minimise this (default: {PUBLISHED_METRIC} for the paper's points, otherwise {KL}): mse, "
        "delta_cross_entropy, another objective that was measured, or for the paper's points sqnr",
        metavar="NAME",
    )
    no_head: bool = option(False, "keep the head in FP16, as the published models do")
    uniform: tuple[str, ...] = option(
        (),
        "one plan per format, the same for all components; for example fp16,int8",
        kind=NAMES,
        metavar="FORMATS",
    )
    gamma: float | None = _quality(
        None, "quantize while held-out perplexity ≤ G × the original's", metavar="G", excludes="gamma"
    )
    gamma_exhaustive: float | None = _quality(
        None, "the same, one component at a time, as in the paper", metavar="G", excludes="gamma"
    )
    max_bytes: int | None = _budget(None, "for example 90MB; with --target, the size of its file", kind=SIZE)
    max_bpw: float | None = _budget(None, "bits per weight, over all weights", metavar="BITS")
    max_kl: float | None = _budget(None, "predicted KL per token", metavar="NATS")
    max_loss: float | None = _budget(
        None,
        "the smallest plan with a measured held-out KL of at most this, for example 0.01",
        metavar="NATS",
        excludes="loss",
    )
    max_drop: float | None = _budget(
        None,
        "the smallest plan with a measured rise of held-out perplexity of at most this, for example 3%",
        kind=SHARE,
        excludes="loss",
    )
    min_speed: float | None = _budget(
        None,
        "predicted tokens per second of the --target's file, for example 30; run kl-lens benchmark first",
        metavar="TOKENS",
    )
    minimise: str | None = _budget(
        None,
        "default: the one without a limit (seconds: per token)",
        choices=("bytes", "kl", "seconds"),
    )
    formats: tuple[str, ...] = _budget((), "comma-separated (default: all measured formats)", kind=NAMES)
    frontier: bool = _budget(False, "print the Pareto frontier of bytes and KL")
    verify: bool = _proof(False, "measure the whole plan")
    rivals: str | None = _proof(
        None,
        "also measure the target's stock recipes, such as Q4_K_M; one that is no larger and not worse replaces the "
        "plan (usual: a few of them; without a value: all)",
        choices=(USUAL, ALL),
        nargs="?",
        bare=ALL,
    )
    tune: int | None = _proof(
        None,
        "also tune the scales with gradients, so that the KL on calibration text falls; kept if it falls on held-out "
        f"text too (default: {TUNING_WINDOWS} windows)",
        kind=COUNT,
        nargs="?",
        bare=TUNING_WINDOWS,
        metavar="WINDOWS",
    )
    held_out: str = _proof("wikitext2:valid", "text that plans are measured on", metavar="TEXT")
    held_out_windows: int = _proof(32, "number of windows", kind=COUNT)
    target: str | None = option(
        None,
        "plan for this target: its formats, its measurements, the size of its files",
        choices=TARGETS,
    )
    plan: str | None = option(
        None, "a plan of the run to --verify or to compare with --rivals", metavar="NAME"
    )
    compare: tuple[str, ...] = option((), "show plans side by side", nargs="+", metavar="NAME")
    name: str | None = option(None, "name of the new plan")
    write_recipe: str | None = option(
        None,
        f"also write the plan for another tool, to RUN/recipes: {', '.join(TOOLS)}",
        choices=tuple(TOOLS),
        metavar="TOOL",
    )
    dry_run: bool = option(False, "print without writing")

    @property
    def budgets(self) -> dict[str, Any]:
        names = ("max_bytes", "max_bpw", "max_kl", "min_speed")
        return {name: getattr(self, name) for name in names}

    @property
    def needs_speeds(self) -> bool:
        return self.min_speed is not None or self.minimise == "seconds"

    @property
    def limits(self) -> list[str]:
        return self._given(*self.budgets, *_LOSSES, *_GAMMAS)

    def _given(self, *names: str) -> list[str]:
        """The flags among these that are set. (A limit of 0 counts.)"""
        values = {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}
        return [flag for flag, value in values.items() if value is not False and value not in (None, ())]

    def check(self) -> None:
        super().check()
        losses, budgets, gammas = self._given(*_LOSSES), self._given(*self.budgets), self._given(*_GAMMAS)
        new = [*self._given("paper", "gpu", "gpu_int4", "uniform"), *self.limits]
        looks = self._given("frontier", "plan", "compare")
        if len(looks) > 1:
            raise PlanError(f"{' and '.join(looks)}: give only one of them")
        if looks and new:
            raise PlanError(f"{looks[0]} {_LOOKS[looks[0]]}: leave out {', '.join(new)}, or {looks[0]}")
        if not looks and not new and not self.rivals:
            raise PlanError(
                "say what to plan: --paper, --uniform, --gamma, --max-bytes, --max-bpw, --max-kl, --max-loss, "
                "--max-drop, --min-speed, --rivals or --frontier; or name a plan with --plan to --verify it"
            )
        if losses and budgets:
            raise PlanError(
                f"{losses[0]} searches for the smallest plan by itself: leave out {', '.join(budgets)}, or {losses[0]}"
            )
        if self.name is not None:
            checked_plan_name(self.name)
            if bool(gammas) + bool(losses or budgets) != 1:
                raise PlanError(
                    f"--name {self.name} names one plan made by a limit: give it with --max-bytes, --max-loss, "
                    "--gamma or another limit"
                )
        if self.write_recipe and (silent := self._given("frontier", "compare", "dry_run")):
            raise PlanError(
                f"--write-recipe writes a plan, and {silent[0]} writes none: leave one of them out"
            )
        if self.needs_speeds and self.target is None:
            raise PlanError(
                "--min-speed and --minimise seconds are about a target's files: name it with --target"
            )
        if self.rivals and self.target is None:
            raise PlanError("--rivals compares with the stock recipes of a target: name it with --target")
        if self.tune and (silent := self._given("frontier", "compare", "dry_run")):
            raise PlanError(f"--tune changes a plan's weights, and {silent[0]} writes none: leave one out")
        if losses or gammas or self.verify or self.rivals or self.tune:
            check_held_out(self.held_out_windows, searches=bool(losses))

    @property
    def choice(self) -> dict[str, Any]:
        """Arguments of every planner."""
        return {"recipes": self.formats or None, "no_head": self.no_head}
