"""What can be chosen for a target: the whole problem that planning solves, in bytes of its file, read from the run.

The page solves it again for whatever budget its reader sets, so it must be the very problem that `kl-lens plan` has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kl_lens import planning
from kl_lens.base.errors import KLLensError, PlanError
from kl_lens.planning.hull import hull_of
from kl_lens.reporting.names import runtime_title
from kl_lens.reporting.plans import PlanView
from kl_lens.run.folder import SCREENED, Run
from kl_lens.run.records import SensitivityTable
from kl_lens.targets import get_target
from kl_lens.weights.recipes import FP16

Line = tuple[tuple[int, float], ...]  # bytes, predicted KL


@dataclass(frozen=True)
class Space:
    """All plans for one target, or for none (weights alone)."""

    target: str | None
    table: SensitivityTable
    problem: planning.Problem
    factor: float  # by which whole plans were seen to lose more than their parts
    frontier: Line  # plans that are proven best at their own size; predicted, the factor in it
    windows: Mapping[tuple[str, str], list[float]]  # (component, format) → KL on each window
    noise: float | None  # KL of the original against itself
    speed: planning.SpeedModel | None = None  # where the problem's seconds are from
    no_speed: str = ""  # why there is none

    @property
    def title(self) -> str:
        return "weights alone" if self.target is None else runtime_title(self.target)


def read_spaces(run: Run, plans: Sequence[PlanView]) -> tuple[dict[str | None, Space], tuple[str, ...]]:
    """One for each target that the run has plans for, one for plans without a target; and what to know about them."""
    targets: list[str | None] = [*sorted({p.target for p in plans if p.target})]
    if "components" not in run.identity:
        return {}, ()
    if not targets or any(p.target is None and set(p.stored.values()) != {FP16} for p in plans):
        targets.append(None)
    spaces, missing = dict[str | None, Space](), []
    for target in targets:
        try:
            spaces[target], why = _space(run, target, plans)
            missing += why
        except KLLensError as error:
            whose = runtime_title(target) if target else "weights alone"
            missing.append(f"No slider for {whose}: {error}.")
    return spaces, tuple(missing)


def _space(run: Run, name: str | None, plans: Sequence[PlanView]) -> tuple[Space, list[str]]:
    table, target = run.table(target=name), get_target(name) if name else None
    ours = next((p.plan for p in plans if p.target == name and p.family != "stock"), None)
    factor = ours.interaction if ours else 1.0
    fixed_bytes, speed, no_speed, missing = planning.stored_fixed_bytes(run, target), None, "", []
    try:
        speed = planning.speed_model(run, table, target) if target else None
    except PlanError as error:
        no_speed = str(error)
    problem = planning.build_problem(table, speed=speed, target=target, fixed_bytes=fixed_bytes)
    if screened := run.load(SCREENED, run.measured_role(name)):
        missing.append(
            f"{runtime_title(name)}: {screened['measured']} of {screened['of']} candidates were measured, those that "
            "plans near the limit can use. At other sizes the slider's plans may not be the best; kl-lens measure "
            "--exhaustive measures everything."
        )
    windows = run.window_kl(run.measured_role(name))
    noise = (run.load("noise", run.measured_role(name)) or {}).get("kl_teacher_to_student")
    line = _line(problem, factor)
    return Space(name, table, problem, factor, line, windows, noise, speed, no_speed), missing


def _line(problem: planning.Problem, factor: float) -> Line:
    kls = [np.array([c.kl for c in g.choices]) for g in problem.groups]
    sizes = [np.array([c.bytes for c in g.choices], float) for g in problem.groups]
    hull = hull_of(kls, sizes)
    return tuple(
        (problem.fixed_bytes + int(b), factor * kl) for b, kl in zip(hull.amounts, hull.costs, strict=True)
    )
