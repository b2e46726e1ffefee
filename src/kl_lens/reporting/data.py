"""What the report shows, read from a run folder once and handed on as plain values.

Everything comes from records that other stages wrote; nothing is measured here. Kinds of record that are read:

- measurements, noise floor (`noise`), `text` and `ranking` of the run; plans in `RUN/plans`;
- `artifact`: what `export` wrote, for sizes on disk;
- results about subjects, those that are current: `score` and `profile`, `Score` and `Profile` of records.py, whatever
  else their JSON holds; `agreement`, for the verdict on each file. A profile's settings say what its ratios are to
  (`ratios_to`, `ratios_to_fp16`) and whether it was `quick`;
- `autopsy`: what `kl-lens autopsy` found in a file;
- `generation`, another such result: one sample of text, `{"prompt": str, "text": str}`, where `text` does not repeat
  the prompt. Samples with the same prompt are put side by side; other keys (`runtime`, `seed`, …) are not shown.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from kl_lens.base.errors import RunError
from kl_lens.evaluation.autopsy import Autopsy
from kl_lens.measuring.correlation import Correlation, Point, Ranking, Reliability
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.reporting.names import runtime_title
from kl_lens.reporting.plans import PlanView, read_plans
from kl_lens.reporting.spaces import Line, Space, read_spaces
from kl_lens.run.folder import KERNELS, Result, Run
from kl_lens.run.journal import checks_rows
from kl_lens.run.records import (
    ARTIFACT,
    ORIGINAL,
    Artifact,
    Component,
    Estimate,
    Profile,
    Record,
    Score,
    SensitivityTable,
    Subject,
)
from kl_lens.run.subjects import current_profiles, current_results

KL = "kl_teacher_to_student"

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class Generation:
    subject: Subject
    prompt: str
    text: str


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
    kernels: str | None  # why transformers' own code computed, where our kernels should have
    ranking: Ranking | None
    plans: tuple[PlanView, ...]
    recommended: frozenset[str]  # plans that the last `kl-lens run` recommends, one for each target
    spaces: dict[str | None, Space]  # by target
    without_slider: tuple[str, ...]  # why there is none for a target, a line each
    artifacts: dict[str, Artifact]
    scores: tuple[Score, ...]
    profiles: tuple[Profile, ...]
    generations: tuple[Generation, ...]
    autopsies: tuple[Autopsy, ...]
    verdicts: dict[tuple[Subject, str], str]  # (subject, text) → does the file agree with PyTorch?
    texts: dict[str, dict[str, Any]]
    measured: tuple[str, ...]  # what was measured: weights alone, or as which targets compute
    commands: tuple[Command, ...]
    seen: dict[str, dict[str, Any]]  # component → its weights' spread, its inputs' largest columns

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

    def frontier(self, target: str | None) -> Line:
        """The target's own; of what it has none, that of weights alone."""
        space = self.spaces.get(target) or self.spaces.get(None)
        return space.frontier if space else ()

    def fp16_of(self, target: str | None) -> int:
        """Bytes of FP16: of the target's file where there is one, else of the weights."""
        artifact = self.artifacts.get(f"{target}/uniform_fp16")
        return self.fp16_bytes if artifact is None else artifact.realised_bytes

    def plan(self, name: str) -> PlanView | None:
        return next((p for p in self.plans if p.name == name), None)

    def subject_bytes(self, subject: Subject) -> int | None:
        """The size of what a score or profile is about: on disk where it was exported, as planned otherwise."""
        if subject.what == ORIGINAL:
            return self.fp16_bytes or None
        if subject.own_plan is None:
            return None
        # PyTorch with the weights that a file holds is as large as that file.
        stored = f"{subject.target}/{subject.plan}"
        if stored in self.artifacts:
            return self.artifacts[stored].realised_bytes
        plan = self.plan(subject.own_plan)
        return plan.bytes if plan else None


def runtime_of(subject: Subject) -> str:
    """What computed it, for titles and legends: `llama.cpp`, `PyTorch`."""
    if subject.what != ARTIFACT:
        return runtime_title(None)
    return runtime_title(subject.target) if subject.own_plan else "other files"


def plan_or_file(subject: Subject) -> str:
    """What a subject is called beside others of its runtime."""
    return subject.own_plan or subject.label


@checks_rows
def collect(run: Run) -> RunView:
    """Reads a run. What is not there is None or empty; what cannot be read is an error that names it."""
    identity = run.identity
    table = run.table() if "components" in identity else None
    if table is not None and not table.measurements:
        table = None
    noise = run.load("noise", run.measured_role()) or {}
    components = tuple(Component.from_json(c) for c in identity.get("components", []))
    if any(component.parameters < 1 for component in components):
        raise ValueError("a component without parameters")
    plans = read_plans(run.folder / "plans", components)
    artifacts = {
        name: _record(run, "artifact", name, value, Artifact)
        for name, value in run.load_all("artifact").items()
    }
    spaces, without_slider = read_spaces(run, plans)
    return RunView(
        folder=str(run.folder),
        identity=identity,
        table=table,
        noise=noise.get(KL),
        kernels=run.load(KERNELS, run.measured_role()),
        ranking=_ranking(run),
        plans=plans,
        recommended=frozenset(run.recommended(plan.target) for plan in plans),
        spaces=spaces,
        without_slider=without_slider,
        artifacts=artifacts,
        scores=tuple(_record(run, "score", r.name, r.value, Score) for r in current_results(run, "score")),
        profiles=current_profiles(run),
        generations=tuple(_generation(run, result) for result in current_results(run, "generation")),
        autopsies=tuple(
            _record(run, "autopsy", r.name, r.value, Autopsy) for r in current_results(run, "autopsy")
        ),
        verdicts=_verdicts(run),
        measured=run.kinds(),
        texts={role: _text(run, role) for role in run.roles()},
        commands=tuple(_command(entry) for entry in run.commands()),
        seen=held.shown() if (held := StoredStatistics.held_by(run.folder)) else {},
    )


def _record(run: Run, kind: str, name: str, value: Mapping[str, Any], record: type[AnyRecord]) -> AnyRecord:
    known = {f.name for f in fields(record)}  # type: ignore[arg-type]
    try:
        return record.from_json({k: v for k, v in value.items() if k in known})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{run.folder}: {kind} {name!r} cannot be read ({error}); repeat what made it"
        ) from error


def _generation(run: Run, result: Result) -> Generation:
    if not isinstance(result.value, Mapping) or not {"prompt", "text"} <= set(result.value):
        raise RunError(
            f"{run.folder}: generation {result.name!r} has no prompt and text; repeat what made it"
        )
    return Generation(result.subject, str(result.value["prompt"]), str(result.value["text"]))


def _verdicts(run: Run) -> dict[tuple[Subject, str], str]:
    return {
        (subject, str(value.get("what"))): str(value.get("verdict"))
        for subject, _, value in current_results(run, "agreement")
    }


def _text(run: Run, role: str) -> dict[str, Any]:
    return (run.load("text", role) or {}) | (run.text_identity(role) or {})


def _command(entry: Mapping[str, Any]) -> Command:
    words = [str(word) for word in entry["command"]]
    program = Path(words[0]).name if words else ""
    # However it was started, this is what to type; the place of the program is nobody's business.
    typed = ["kl-lens" if program in ("kl-lens", "main.py", "__main__.py") else program, *words[1:]]
    return Command(shlex.join(typed), tuple(typed), float(entry["started"]), dict(entry["provenance"]))


def _ranking(run: Run) -> Ranking | None:
    stored = run.load("ranking", "latest")
    if stored is None:
        return None
    try:
        return Ranking(
            perplexity=stored["perplexity"],
            evaluation_tokens=stored["evaluation_tokens"],
            points=tuple(_point(p) for p in stored["points"]),
            correlations=tuple(Correlation(**c) for c in stored["correlations"]),
            reliabilities=tuple(Reliability(**r) for r in stored["reliabilities"]),
        )
    except (KeyError, TypeError) as error:
        raise RunError(
            f"{run.folder}: the ranking cannot be read ({error}); repeat kl-lens paper rank"
        ) from error


def _point(value: Mapping[str, Any]) -> Point:
    return Point(
        component=value["component"],
        format=value["format"],
        is_head=value["is_head"],
        metrics={name: Estimate(**estimate) for name, estimate in value["metrics"].items()},
        damage=Estimate(**value["damage"]),
        delta_perplexity=Estimate(**value["delta_perplexity"]),
    )
