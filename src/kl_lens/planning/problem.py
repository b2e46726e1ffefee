"""The choice that planning is about: one format for each group of components, with what each would cost."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kl_lens.errors import PlanError
from kl_lens.formats import get_format
from kl_lens.planning.cost import FP16, component_bytes, fp16_bytes, stored_format
from kl_lens.planning.predict import PREDICTED_METRIC, Predictor, require_measurements
from kl_lens.records import Component, SensitivityTable

# Seconds that one component takes in one format, measured on the target.
LatencyTable = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Choice:
    """One format for all members of a group."""

    format: str
    bytes: int
    kl: float
    seconds: float = 0.0


@dataclass(frozen=True)
class Group:
    """Components that must share a format; most groups have one member."""

    members: tuple[str, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Totals:
    bytes: int
    kl: float
    seconds: float


@dataclass(frozen=True)
class Problem:
    """Everything that a plan decides (groups) and everything that it does not (fixed)."""

    groups: tuple[Group, ...]
    fixed_bytes: int
    fixed_seconds: float
    parameters: int
    has_latency: bool = False

    def assignment(self, selection: Sequence[int]) -> dict[str, str]:
        return {
            member: group.choices[index].format
            for group, index in zip(self.groups, selection, strict=True)
            for member in group.members
        }

    def selection(self, assignment: Mapping[str, str]) -> list[int]:
        """The inverse of `assignment`; fails where a group's members disagree or a format is no choice."""
        indices = []
        free = {member for group in self.groups for member in group.members}
        for name, wanted in assignment.items():
            if name not in free and wanted != FP16:
                raise PlanError(f"{name}: {wanted} asked for, but it has no choice here and stays FP16")
        for group in self.groups:
            formats = {assignment.get(member, FP16) for member in group.members}
            if len(formats) > 1:
                raise PlanError(
                    f"{' and '.join(group.members)} are fused by runtimes but have {', '.join(sorted(formats))}; "
                    "give them one format or plan without keeping them together"
                )
            wanted = formats.pop()
            names = [choice.format for choice in group.choices]
            if wanted not in names:
                raise PlanError(
                    f"{group.members[0]}: {wanted} is not among its measured formats ({', '.join(names)}); "
                    "measure it first"
                )
            indices.append(names.index(wanted))
        return indices

    def totals(self, selection: Sequence[int]) -> Totals:
        chosen = [group.choices[index] for group, index in zip(self.groups, selection, strict=True)]
        return Totals(
            bytes=self.fixed_bytes + sum(c.bytes for c in chosen),
            kl=math.fsum(c.kl for c in chosen),
            seconds=math.fsum([self.fixed_seconds, *(c.seconds for c in chosen)]),
        )


def build_problem(
    table: SensitivityTable,
    *,
    formats: Sequence[str] | None = None,
    exclude: Collection[str] = (),
    keep_fused: bool = True,
    latency: LatencyTable | None = None,
    metric: str = PREDICTED_METRIC,
) -> Problem:
    """Groups and choices from a sensitivity table.

    A group's choices are FP16 and each of `formats` (default: all measured ones that a runtime can store)
    that all its members were measured in. Components in `exclude` stay FP16.
    """
    if formats is None:
        formats = [f for f in table.formats if f != FP16 and not f.endswith("-absmax")]
    else:
        formats = [get_format(f).name for f in formats if f != FP16]
        for name in formats:
            require_measurements(table, name)
    by_name = {c.name: c for c in table.components}
    if unknown := sorted(set(exclude) - set(by_name)):
        raise PlanError(f"cannot exclude {unknown[0]!r}: no such component; `kl-lens inspect` lists them all")
    free = [c for c in table.candidates if c.name not in exclude]
    fixed = [c for c in table.components if not c.quantizable or c.name in exclude]
    predictor = Predictor(table, metric)
    clusters = _clusters(free) if keep_fused else [(c,) for c in free]
    groups = tuple(
        Group(tuple(c.name for c in members), _choices(members, formats, predictor, latency))
        for members in clusters
    )
    return Problem(
        groups=groups,
        fixed_bytes=sum(fp16_bytes(c) for c in fixed),
        fixed_seconds=math.fsum(latency.get((c.name, FP16), 0.0) for c in fixed) if latency else 0.0,
        parameters=sum(c.parameters for c in table.components),
        has_latency=latency is not None,
    )


def _clusters(free: Sequence[Component]) -> list[tuple[Component, ...]]:
    """Fused siblings together, in the model's order; siblings of siblings belong to the same cluster."""
    leader = {c.name: c.name for c in free}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for component in free:
        for sibling in component.fused_with:
            if sibling in leader:
                leader[find(sibling)] = find(component.name)
    clusters: dict[str, list[Component]] = {}
    for component in free:
        clusters.setdefault(find(component.name), []).append(component)
    return [tuple(members) for members in clusters.values()]


def _choices(
    members: Sequence[Component], formats: Sequence[str], predictor: Predictor, latency: LatencyTable | None
) -> tuple[Choice, ...]:
    choices: dict[str, Choice] = {}
    for wanted in (FP16, *formats):
        stored = {stored_format(member, wanted)[0] for member in members}
        if len(stored) > 1:
            continue  # the siblings would fall back differently, and not share a format after all
        name = stored.pop()
        estimates = [predictor.estimate(member.name, name) for member in members]
        values = [e.value for e in estimates if e is not None and math.isfinite(e.value)]
        if name in choices or len(values) < len(members):
            continue
        choices[name] = Choice(
            format=name,
            bytes=sum(component_bytes(member, name) for member in members),
            kl=math.fsum(values),
            seconds=math.fsum(_seconds(member, name, latency) for member in members) if latency else 0.0,
        )
    return tuple(choices.values())


def _seconds(component: Component, format_name: str, latency: LatencyTable) -> float:
    try:
        return latency[component.name, format_name]
    except KeyError:
        raise PlanError(
            f"the latency profile has no time for {component.name} in {format_name}; "
            "profile it or leave the format out"
        ) from None
