"""What the report shows, read from a run folder once and handed on as plain values.

Everything comes from records that other stages wrote; nothing is measured here. Results about subjects are read as far
as they are current. `generation` is `{"prompt": str, "text": str}`; samples with the same prompt are put side by side.

A `Space` has every size that a target's file can have, from the smallest to FP16. Its plans are corners of the hull of
all plans: each is the optimum at its own size, as `kl-lens plan` finds it. `frontier` is the best known of each size.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kl_lens import planning
from kl_lens.base.errors import KLLensError, PlanError, RunError
from kl_lens.judging.ranking import Ranking
from kl_lens.planning.knapsack import hull_of
from kl_lens.reporting.names import UNITS, Unit, runtime_title
from kl_lens.run.autopsies import Autopsy
from kl_lens.run.folder import KERNELS, Run
from kl_lens.run.journal import checks_rows
from kl_lens.run.positions import PositionCurve
from kl_lens.run.records import (
    ARTIFACT,
    ORIGINAL,
    Artifact,
    Component,
    Estimate,
    Measurement,
    Plan,
    Profile,
    Record,
    Score,
    SensitivityTable,
    Subject,
)
from kl_lens.run.subjects import (
    AnyRecord,
    current_profiles,
    current_results,
    stored_record,
)
from kl_lens.targets import get_target
from kl_lens.weights.recipes import FP16, Recipe

KL = "kl_teacher_to_student"
MOST = 240  # positions of a slider
# Families of plans in the order in which legends list them.
FAMILIES = {
    "uniform": "one format for all",
    "paper": "paper's points",
    "exact": "KL Lens",
    "greedy": "greedy",
    "stock": "stock recipes",
    "other": "other plans",
}


def read_plans(folder: Path, components: tuple[Component, ...]) -> tuple[Plan, ...]:
    """All plans of a run: families in order, each from large to small."""
    plans = [planning.read_plan(path, components) for path in folder.glob("*.json")]
    order = list(FAMILIES)
    return tuple(
        sorted(plans, key=lambda p: (order.index(p.family), -(p.file_bytes or 0), p.name))
    )


@dataclass(frozen=True)
class Position:
    """A plan that can be made, or a file that was."""

    bytes: int
    kl: float  # predicted, or measured on the whole file
    stored: Mapping[str, Recipe]
    seconds: float | None = None  # per token, predicted
    file: Plan | None = None
    measured: Estimate | None = None  # of the file


@dataclass(frozen=True)
class Space:
    """All plans for one target, or for none (weights alone)."""

    target: str | None
    table: SensitivityTable
    problem: planning.Problem
    noise: float | None  # KL of the original against itself
    speed: planning.SpeedModel | None = None  # where the problem's seconds are from

    @property
    def title(self) -> str:
        return "weights alone" if self.target is None else runtime_title(self.target)

    def plans(self) -> list[Position]:
        """The best plans from small to large, evenly many."""
        groups = self.problem.groups
        kls = [np.array([c.kl for c in group.choices]) for group in groups]
        hull = hull_of(
            kls, [np.array([c.bytes for c in group.choices], float) for group in groups]
        )
        # The steps nearest to sizes that are equal factors apart.
        wanted = np.geomspace(max(hull.amounts[0], 1), max(hull.amounts[-1], 1), MOST)
        steps = sorted(
            {
                0,
                len(hull.steps),
                *np.searchsorted(hull.amounts, wanted).clip(0, len(hull.steps)).tolist(),
            }
        )
        positions = []
        for selection in map(hull.selection, steps):
            totals = self.problem.totals(selection)
            stored = self.problem.assignment(selection)
            seconds = totals.seconds if self.speed else None
            positions.append(Position(totals.bytes, totals.kl, stored, seconds))
        return positions


def frontier(space: Space, files: Sequence[Position]) -> list[Position]:
    """The best known at each size: a plan as predicted, or a file as measured. It never rises with size."""
    best: list[Position] = []
    for candidate in sorted(
        [*space.plans(), *files], key=lambda position: (position.bytes, position.kl)
    ):
        if not best or candidate.kl < best[-1].kl:
            best.append(candidate)
    return best


@dataclass(frozen=True)
class Generation(Record):
    subject: Subject
    prompt: str
    text: str


@dataclass(frozen=True)
class Judged:
    """What one text says of a plan or its file. Numbers of different texts are never set beside each other."""

    kl: Estimate | None = None
    perplexity: Estimate | None = None
    original: float | None = None  # its perplexity
    change_error: float = math.nan  # of the change in perplexity, paired
    same_top: Estimate | None = None
    circumstances: str = ""
    is_test: bool = False  # on test text; else on that which chose the plan
    stands_in: bool = False  # PyTorch was judged in place of the file


@dataclass(frozen=True)
class Command:
    line: str
    words: tuple[str, ...]
    started: float
    provenance: dict[str, Any]

    @property
    def verb(self) -> str:
        return self.words[1] if len(self.words) > 1 else ""


@dataclass(frozen=True)
class RunView:
    """One run, ready to be shown."""

    folder: str  # as the user typed it
    identity: dict[str, Any]
    table: SensitivityTable | None
    noise: float | None  # KL of the original against itself
    # Why transformers' own code computed, where our kernels should have.
    kernels: str | None
    ranking: Ranking | None
    plans: tuple[Plan, ...]
    # Plans that the last `kl-lens run` recommends, one for each target.
    recommended: frozenset[str]
    spaces: dict[str | None, Space]  # by target
    without_slider: tuple[str, ...]  # why there is none for a target, a line each
    artifacts: dict[str, Artifact]
    scores: tuple[Score, ...]
    profiles: tuple[Profile, ...]
    generations: tuple[Generation, ...]
    autopsies: tuple[Autopsy, ...]
    # (subject, text) → does the file agree with PyTorch?
    verdicts: dict[tuple[Subject, str], str]
    texts: dict[str, dict[str, Any]]
    commands: tuple[Command, ...]
    states: tuple[tuple[Component, Measurement, PositionCurve], ...] = ()  # and caches

    @property
    def model(self) -> str:
        return str(self.identity.get("model", "unknown model"))

    @property
    def components(self) -> tuple[Component, ...]:
        """Known as soon as the model is, also before anything is measured."""
        if self.table:
            return self.table.components
        return tuple(Component.from_json(c) for c in self.identity.get("components", ()))

    @property
    def fp16_bytes(self) -> int:
        return sum(2 * c.parameters for c in self.components)

    @property
    def unit(self) -> Unit:
        return UNITS.get(str(self.identity.get("task")), Unit())

    @property
    def nats(self) -> str:
        return f"nats per {self.unit.one}"

    def fp16_of(self, target: str | None) -> int:
        """Bytes of FP16: of the target's file where there is one, else of the weights."""
        artifact = self.artifacts.get(f"{target}/uniform_fp16")
        return self.fp16_bytes if artifact is None else artifact.realised_bytes

    def cost(self, plan: Plan) -> planning.Cost:
        return planning.cost_of(self.components, plan.assignment)

    def plan(self, name: str) -> Plan | None:
        return next((p for p in self.plans if p.name == name), None)

    def subject_bytes(self, subject: Subject) -> int | None:
        """The size of what a score or profile is about: on disk where it was exported, as planned otherwise."""
        if subject.what == ORIGINAL:
            return self.fp16_bytes or None
        if subject.own_plan is None:
            return _bytes_outside(subject)
        # PyTorch with the weights that a file holds is as large as that file.
        stored = f"{subject.target}/{subject.plan}"
        if stored in self.artifacts:
            return self.artifacts[stored].realised_bytes
        plan = self.plan(subject.own_plan)
        return plan.file_bytes if plan else None

    def score(self, subject: Subject, kind: str) -> Score | None:
        """The last of its kind: of this subject, or else of PyTorch that stands in for this file."""
        scores = [
            s
            for s in reversed(self.scores)
            if s.kind == kind and s.subject.file_key == subject.key
        ]
        return max(scores, key=lambda s: s.subject.key == subject.key, default=None)

    def plans_of(self, target: str | None) -> list[Plan]:
        """The target's own, and those without a target that were written as its files."""
        if target is None:
            return [p for p in self.plans if p.target is None]
        return [
            p
            for p in self.plans
            if p.target == target or f"{target}/{p.name}" in self.artifacts
        ]

    def bytes_of(self, plan: Plan, target: str | None = None) -> int:
        """Of the target's file where it was written; else as planned."""
        written = (
            self.subject_bytes(Subject(ARTIFACT, plan.name, target)) if target else None
        )
        return written or plan.file_bytes or 0

    def predicted_kl(self, plan: Plan) -> float | None:
        """With what the run knows now of how much more whole plans lose than their parts."""
        space = self.spaces.get(plan.target)
        if plan.predicted_kl is None or space is None:
            return plan.predicted_kl
        return plan.predicted_kl * space.problem.interaction / plan.interaction

    def judged(self, plan: Plan, target: str | None) -> Judged:
        """Of the target's file where it was evaluated, else of the plan in PyTorch."""
        file = Subject(ARTIFACT, plan.name, target)
        scores = (self.score(file, kind) for kind in ("divergence", "perplexity"))
        score = next(filter(None, scores), None) if target else None
        if score is None:
            if (held_out := plan.measured) is None:
                return Judged()
            perplexity = held_out.perplexity
            return Judged(
                held_out.kl,
                perplexity,
                held_out.original_perplexity,
                perplexity.standard_error,
                circumstances=f"in PyTorch, on {held_out.place}",
            )
        values = self._on_text_of(score, score.subject)
        original = self._on_text_of(score, Subject(ORIGINAL)).get("token_perplexity")
        judge = "files" if score.subject.what == ARTIFACT else "in PyTorch, as deployed"
        return Judged(
            values.get("kl_mean"),
            values.get("token_perplexity"),
            None if original is None else original.value,
            values.get("token_perplexity_change", Estimate(0.0)).standard_error,
            values.get("same_top"),
            f"{judge}, on {score.what}",
            True,
            score.subject.what != ARTIFACT,
        )

    def _on_text_of(self, score: Score, subject: Subject) -> dict[str, Estimate]:
        """All values of a subject on the same windows of the same text."""
        values = dict[str, Estimate]()
        for result in self.scores:
            is_same_text = (result.what, result.protocol) == (score.what, score.protocol)
            if is_same_text and result.subject.key == subject.key:
                values |= result.values
        return values


def _bytes_outside(subject: Subject) -> int | None:
    """Of a file from elsewhere, if it is still there."""
    path = Path(subject.settings.get("path", ""))
    if subject.target is None or not path.is_absolute() or not path.exists():
        return None
    return get_target(subject.target).loaded_bytes(path)


def runtime_of(subject: Subject) -> str:
    """What computed it, for titles and legends: `llama.cpp`, `PyTorch`."""
    if subject.what != ARTIFACT:
        return runtime_title(None)
    return runtime_title(subject.target) if subject.own_plan else "other files"


@checks_rows
def collect(run: Run) -> RunView:
    """Reads a run. What is not there is None or empty; what cannot be read is an error that names it."""
    identity = run.identity
    if not identity:
        raise RunError(
            f"{run.folder} has an empty journal; make a run with: kl-lens measure MODEL --run {run.folder}"
        )
    table = run.table() if "components" in identity else None
    if table is not None and not table.measurements:
        table = None
    noise = run.load("noise", run.measured_role()) or {}
    components = tuple(Component.from_json(c) for c in identity.get("components", []))
    if any(component.parameters < 1 for component in components):
        raise ValueError("a component without parameters")
    plans = read_plans(run.folder / "plans", components)
    artifacts = {
        name: stored_record(run, "artifact", name, value, Artifact)
        for name, value in run.load_all("artifact").items()
    }
    spaces, without_slider = read_spaces(run, plans)
    ranking = run.load("ranking", "latest")

    def read(kind: str, record: type[AnyRecord]) -> tuple[AnyRecord, ...]:
        return tuple(
            stored_record(
                run, kind, result.name, result.value, record, subject=result.subject
            )
            for result in current_results(run, kind)
        )

    return RunView(
        folder=str(run.folder),
        identity=identity,
        table=table,
        noise=noise.get(KL),
        kernels=run.load(KERNELS, run.measured_role()),
        ranking=stored_record(run, "ranking", "latest", ranking, Ranking)
        if ranking
        else None,
        plans=plans,
        recommended=frozenset(run.recommended(plan.target) for plan in plans),
        spaces=spaces,
        without_slider=without_slider,
        artifacts=artifacts,
        scores=read("score", Score),
        profiles=current_profiles(run),
        generations=read("generation", Generation),
        autopsies=read("autopsy", Autopsy),
        verdicts={
            (subject, str(value.get("what"))): str(value.get("verdict"))
            for subject, _, value in current_results(run, "agreement")
        },
        texts={
            role: (run.load("text", role) or {}) | (run.text_identity(role) or {})
            for role in run.roles()
        },
        commands=tuple(_command(entry) for entry in run.commands()),
        states=tuple(run.state_rows()),
    )


def _command(entry: Mapping[str, Any]) -> Command:
    words = tuple(str(word) for word in entry["command"])
    return Command(
        shlex.join(words), words, float(entry["started"]), dict(entry["provenance"])
    )


def read_spaces(
    run: Run, plans: Sequence[Plan]
) -> tuple[dict[str | None, Space], tuple[str, ...]]:
    """One for each target that the run has plans for, one for plans without a target; and why there is none."""
    targets: list[str | None] = [*sorted({p.target for p in plans if p.target})]
    if "components" not in run.identity:
        return {}, ()
    if not targets or any(
        p.target is None and set(p.assignment.values()) != {FP16} for p in plans
    ):
        targets.append(None)
    spaces = dict[str | None, Space]()
    missing = []
    for target in targets:
        try:
            spaces[target] = _space(run, target)
        except KLLensError as error:
            title = runtime_title(target) if target else "weights alone"
            missing.append(f"No slider for {title}: {error}.")
    return spaces, tuple(missing)


def _space(run: Run, name: str | None) -> Space:
    table = run.table(target=name, predicted=True)
    target = get_target(name) if name else None
    speed = None
    with suppress(PlanError):  # nothing was timed
        speed = planning.speed_model(run, table, target) if target else None
    fixed_bytes = planning.stored_fixed_bytes(run, target)
    problem = planning.build_problem(
        table,
        speed=speed,
        target=target,
        fixed_bytes=fixed_bytes,
        interaction=run.interaction(name),
    )
    noise = (run.load("noise", run.measured_role(name)) or {}).get(
        "kl_teacher_to_student"
    )
    return Space(name, table, problem, noise, speed)
