"""What the report shows, read from a run folder once and handed on as plain values.

Everything comes from records that other stages wrote; nothing is measured here. Kinds of record that are read:

- measurements, noise floor (`noise`), `text` and `ranking` of the run; plans in `RUN/plans`;
- `artifact`: what `export` wrote, for sizes on disk;
- `score` and `profile`: `Score` and `Profile` of records.py, whatever else their JSON holds; `agreement`, for the
  verdict on each file. A profile's settings say what its ratios are to (`ratios_to`, `ratios_to_fp16`) and whether
  it was `quick`;
- `generation`: one sample of text. The name is free (the subject when there is one sample each); the value is
  `{"subject": "original" | "torch/PLAN" | "openvino/PLAN" | "gguf/PLAN", "prompt": str, "text": str}`, where `text`
  does not repeat the prompt. Samples with the same prompt are put side by side; other keys (`tokens_per_second`,
  `runtime`, `seed`, …) are welcome and not shown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from kl_lens import planning
from kl_lens.errors import PlanError, RunError
from kl_lens.records import Artifact, Component, Estimate, Profile, Record, Score, SensitivityTable
from kl_lens.reporting.plans import PlanView, read_plans
from kl_lens.runs import CALIBRATION, Run
from kl_lens.sensitivity.ranking import Correlation, Point, Ranking, Reliability
from kl_lens.states import is_current
from kl_lens.targets import TARGETS

KL = "kl_teacher_to_student"
ORIGINAL = "original"
FRONTIER_POINTS = 160
_FRONTIER_STATES = 4_000  # enough for a line on paper, and quick on a large model

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class Subject:
    """`openvino/recommended (exact)` in its parts; a file from elsewhere has no target and is its own plan."""

    name: str
    target: str
    plan: str
    variant: str

    @property
    def stored(self) -> str:
        return f"{self.target}/{self.plan}"

    @property
    def runtime(self) -> str:
        """What computed it: openvino, gguf (exact), torch."""
        return f"{self.target} {self.variant}".strip() or "other files"


@dataclass(frozen=True)
class Generation:
    subject: str
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
    ranking: Ranking | None
    plans: tuple[PlanView, ...]
    frontier: tuple[tuple[int, float], ...]  # bytes, predicted KL
    artifacts: dict[str, Artifact]
    scores: tuple[Score, ...]
    profiles: tuple[Profile, ...]
    generations: tuple[Generation, ...]
    verdicts: dict[tuple[str, str], str]  # (subject, text) → does the file agree with PyTorch?
    texts: dict[str, dict[str, Any]]
    commands: tuple[Command, ...]

    @property
    def model(self) -> str:
        return str(self.identity.get("model", "unknown model"))

    @property
    def components(self) -> tuple[Component, ...]:
        return self.table.components if self.table else ()

    @property
    def fp16_bytes(self) -> int:
        return sum(2 * c.parameters for c in self.components)

    def plan(self, name: str) -> PlanView | None:
        return next((p for p in self.plans if p.name == name), None)

    def subject_bytes(self, subject: str) -> int | None:
        """The size of what a score or profile is about: on disk where it was exported, as planned otherwise."""
        if subject == ORIGINAL:
            return self.fp16_bytes or None
        found = self.split(subject)
        # PyTorch with the weights that a file holds is as large as that file.
        stand_in = re.match(r"as (\w+)", found.variant)
        stored = f"{stand_in[1]}/{found.plan}" if stand_in else found.stored
        if stored in self.artifacts:
            return self.artifacts[stored].realised_bytes
        plan = self.plan(found.plan)
        return plan.bytes if plan else None

    def split(self, subject: str) -> Subject:
        """A subject's parts; the longest plan name that fits, since both names and variants may hold blanks."""
        target, slash, rest = subject.partition("/")
        if target not in ("torch", *TARGETS) or not slash:
            return Subject(subject, "", subject, "")
        known = {p.name for p in self.plans} | {name.partition("/")[2] for name in self.artifacts}
        fitting = [name for name in known if rest == name or rest.startswith(f"{name} ")]
        plan = max(fitting, key=len, default=rest)
        return Subject(subject, target, plan, rest[len(plan) :].strip())

    def subjects(self, plan: PlanView) -> set[str]:
        """Every name under which scores and profiles of a plan are stored."""
        known = {s.subject for s in self.scores} | {p.subject for p in self.profiles}
        return {s for s in known if (found := self.split(s)).target and found.plan == plan.name}


def collect(run: Run) -> RunView:
    """Reads a run. What is not there is None or empty; what cannot be read is an error that names it."""
    identity = run.identity
    table = run.table() if "components" in identity else None
    if table is not None and not table.measurements:
        table = None
    noise = run.load("noise", CALIBRATION) or {}
    plans = read_plans(
        run.folder / "plans", tuple(Component.from_json(c) for c in identity.get("components", []))
    )
    return RunView(
        folder=str(run.folder),
        identity=identity,
        table=table,
        noise=noise.get(KL),
        ranking=_ranking(run),
        plans=plans,
        frontier=_frontier(table),
        artifacts=dict(_records(run, "artifact", Artifact)),
        scores=tuple(score for _, score in _records(run, "score", Score)),
        profiles=_profiles(run),
        generations=tuple(
            _generation(run, n, v)
            for n, v in run.load_all("generation").items()
            if not isinstance(v, Mapping) or is_current(run, v)
        ),
        verdicts=_verdicts(run),
        texts={role: _text(run, role) for role in run.roles()},
        commands=tuple(_command(entry) for entry in run.commands()),
    )


def _records(run: Run, kind: str, record: type[AnyRecord]) -> list[tuple[str, AnyRecord]]:
    known = {f.name for f in fields(record)}  # type: ignore[arg-type]
    found = []
    for name, value in run.load_all(kind).items():
        if not is_current(run, value):  # of a plan or file that has changed since
            continue
        try:
            found.append((name, record.from_json({k: v for k, v in value.items() if k in known})))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{run.folder}: {kind} {name!r} cannot be read ({error}); repeat what made it"
            ) from error
    return found


def _profiles(run: Run) -> tuple[Profile, ...]:
    """One for each subject, protocol and device: a whole one before one in progress, before a quick one."""
    found: dict[tuple[str, str, str], tuple[int, Profile]] = {}
    for name, profile in _records(run, "profile", Profile):
        # Reports still split names.
        profile = replace(profile, subject=profile.subject.label)  # type: ignore[arg-type]
        key = (profile.subject, profile.protocol, profile.device)
        rank = 2 * bool(profile.settings.get("quick")) + name.endswith("|partial")
        if key not in found or rank <= found[key][0]:
            found[key] = (rank, profile)
    return tuple(profile for _, profile in found.values())


def _generation(run: Run, name: str, value: Any) -> Generation:
    if not isinstance(value, Mapping) or not {"prompt", "text"} <= set(value):
        raise RunError(f"{run.folder}: generation {name!r} has no prompt and text; repeat what made it")
    return Generation(str(value.get("subject", name)), str(value["prompt"]), str(value["text"]))


def _verdicts(run: Run) -> dict[tuple[str, str], str]:
    found = [v for v in run.load_all("agreement").values() if isinstance(v, Mapping)]
    return {(str(v.get("subject")), str(v.get("what"))): str(v.get("verdict")) for v in found}


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
        raise RunError(f"{run.folder}: the ranking cannot be read ({error}); repeat kl-lens rank") from error


def _point(value: Mapping[str, Any]) -> Point:
    return Point(
        component=value["component"],
        format=value["format"],
        is_head=value["is_head"],
        metrics={name: Estimate(**estimate) for name, estimate in value["metrics"].items()},
        damage=Estimate(**value["damage"]),
        delta_perplexity=Estimate(**value["delta_perplexity"]),
    )


def _frontier(table: SensitivityTable | None) -> tuple[tuple[int, float], ...]:
    if table is None:
        return ()
    try:
        problem = planning.build_problem(table)
    except PlanError:  # too little was measured to plan with
        return ()
    frontier = planning.pareto_frontier(problem, _FRONTIER_STATES)
    return tuple((point.bytes, point.kl) for point in frontier.thinned(FRONTIER_POINTS))
