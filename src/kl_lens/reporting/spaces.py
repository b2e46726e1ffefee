"""What can be chosen for a target: the whole problem that planning solves, in bytes of its file, read from the run.

The page solves it again for whatever budget its reader sets, so it must be the very problem that `kl-lens plan` has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kl_lens import planning
from kl_lens.errors import KLLensError, PlanError
from kl_lens.planning.cost import FP16, recipe_of
from kl_lens.planning.hull import hull_of
from kl_lens.records import Artifact, SensitivityTable
from kl_lens.reporting.plans import PlanView
from kl_lens.runs import Run
from kl_lens.targets import get_target

Line = tuple[tuple[int, float], ...]  # bytes, predicted KL


@dataclass(frozen=True)
class Space:
    """All plans for one target, or for nobody in particular (weights alone)."""

    target: str | None
    table: SensitivityTable
    problem: planning.Problem
    factor: float  # by which whole plans were seen to lose more than their parts
    frontier: Line  # plans that are proven best at their own size; predicted, the factor in it
    windows: Mapping[tuple[str, str], list[float]]  # (component, format) → KL on each window
    latency: str | None = None  # the profile that the problem's seconds are from

    @property
    def title(self) -> str:
        return "weights alone" if self.target is None else get_target(self.target).title


def read_spaces(
    run: Run, plans: Sequence[PlanView], artifacts: Mapping[str, Artifact]
) -> dict[str | None, Space]:
    """One for each target that the run has plans for, and one for plans that are nobody's in particular."""
    targets: list[str | None] = [*sorted({p.target for p in plans if p.target})]
    if "components" not in run.identity:
        return {}
    if not targets or any(p.target is None and set(p.stored.values()) != {FP16} for p in plans):
        targets.append(None)
    spaces = {target: _space(run, target, plans, artifacts) for target in targets}
    return {target: space for target, space in spaces.items() if space is not None}


def _space(
    run: Run, name: str | None, plans: Sequence[PlanView], artifacts: Mapping[str, Artifact]
) -> Space | None:
    table = run.table(target=name)
    ours = next((p.plan for p in plans if p.target == name and p.family != "stock"), None)
    factor = float(ours.notes.get("interaction", 1.0)) if ours else 1.0
    try:
        target = get_target(name) if name else None
        besides = 0
        if target is not None:
            weights = sum(2 * c.parameters for c in table.components)
            fp16 = artifacts.get(f"{name}/uniform_fp16")
            if fp16 is not None:
                besides = fp16.realised_bytes - weights
            elif ours is not None:
                besides = ours.fixed_bytes - sum(
                    target.overhead(recipe_of(r).grid) for r in ours.assignment.values()
                )
        choice = {"fixed_bytes": besides, **planning.holding(target)}
        problem = planning.build_problem(table, **choice)
    except KLLensError:  # too little was measured to plan with, or the target is no longer there
        return None
    timed = [n for n in run.load_all("latency") if name and n.startswith(f"{name}-")][-1:]
    for profile in timed:
        stored = run.load("latency", profile) or {}
        seconds = {(c, f): float(s) for c, row in stored.items() for f, s in row.items()}
        try:
            problem = planning.build_problem(table, latency=seconds, **choice)
        except PlanError:  # a format has no time
            timed = []
    windows = run.window_kl(run.measured_role(name))
    return Space(name, table, problem, factor, _line(problem, factor), windows, *timed)


def _line(problem: planning.Problem, factor: float) -> Line:
    kls = [np.array([c.kl for c in g.choices]) for g in problem.groups]
    sizes = [np.array([c.bytes for c in g.choices], float) for g in problem.groups]
    hull = hull_of(kls, sizes)
    return tuple(
        (problem.fixed_bytes + int(b), factor * kl) for b, kl in zip(hull.amounts, hull.costs, strict=True)
    )
