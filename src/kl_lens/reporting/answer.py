"""The answer first: which plan, how small, how good, how fast, and what to type to get it again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kl_lens.profiling import Ratio, ratio_of
from kl_lens.reporting.data import RunView
from kl_lens.reporting.names import Unit, readable
from kl_lens.reporting.numbers import count, number, percent, size, with_error
from kl_lens.reporting.plans import PlanView
from kl_lens.run.folder import RECOMMENDED
from kl_lens.run.records import ARTIFACT, ORIGINAL, PLAN, Estimate, Profile, Quartiles, Subject

# Of a run without a plan of that name, the smallest plan that loses no more than this is the answer.
TOLERATED = 0.02


@dataclass(frozen=True)
class Answer:
    plan: PlanView
    rule: str  # why this one, in words


def recommendations(view: RunView) -> list[Answer]:
    """One for each target that the run has one for; else the one for the run as a whole, if any: its recommended plan,
    or the smallest verified one that keeps perplexity."""
    named = [plan for plan in view.plans if plan.name in view.recommended]
    named = sorted((p for p in named if p.target), key=lambda p: p.target or "") or named[:1]
    if named:
        return [Answer(plan, _why(plan)) for plan in named]
    verified = [p for p in view.plans if p.kl is not None and p.bytes < view.fp16_bytes]
    kept = [p for p in verified if _relative_loss(p) <= TOLERATED]
    if kept:
        rule = (
            f'The run has no plan called "{RECOMMENDED}"; this is the smallest verified plan whose held-out perplexity '
            f"stays within {100 * TOLERATED:g} % of the original's."
        )
        return [Answer(min(kept, key=lambda p: p.bytes), rule)]
    rule = (
        f"No verified plan keeps held-out perplexity within {100 * TOLERATED:g} % of the original's; this is the one "
        "with the least measured KL."
    )
    return [Answer(min(verified, key=lambda p: p.kl.value if p.kl else math.inf), rule)] if verified else []


def recommended_names(view: RunView) -> frozenset[str]:
    return frozenset(each.plan.name for each in recommendations(view))


def _why(plan: PlanView) -> str:
    contest = plan.plan.contest
    return f"Against stock recipes: {readable(contest)}." if contest else target_of(plan)


def target_of(plan: PlanView, unit: Unit | None = None) -> str:
    """What the plan had to meet."""
    limits, lost, unit = plan.plan.limits, plan.plan.missed, unit or Unit()
    if "loss" in limits:
        missed = "" if lost is None else f" Missed on held-out {unit.text}: {with_error(lost)}."
        return f"Target: KL ≤ {limits['loss']:g} nats per {unit.one} (--max-loss).{missed}"
    if "drop" in limits:
        missed = "" if lost is None else f" Missed on held-out {unit.text}: {percent(lost.value, 2)}."
        return f"Target: perplexity rises by at most {percent(limits['drop'], 1)} (--max-drop).{missed}"
    if "bytes" in limits:
        return f"Target: at most {size(limits['bytes'])} (--max-bytes)."
    if "seconds" in limits:
        return f"Target: at least {number(1 / limits['seconds'])} tokens per second (--min-speed)."
    return f"Made by: {plan.plan.made_by}."


def measured_of(view: RunView, plan: PlanView) -> str:
    """What the file loses on test text, in the target's own unit."""
    subject = Subject(ARTIFACT, plan.name, plan.target) if plan.target else Subject(PLAN, plan.name)
    limits = plan.plan.limits
    if "drop" in limits:
        original = value_of(view, Subject(ORIGINAL), "perplexity", "token_perplexity")
        change = value_of(view, subject, "perplexity", "token_perplexity_change")
        if change is None or original is None:
            return ""
        rise, error = (percent(v / original.value, 2) for v in (change.value, change.standard_error))
        missed = change.value / original.value > limits["drop"]
        return (
            f" Measured on test {view.unit.text}: {rise} ± {error}{' (above the target)' if missed else ''}."
        )
    kl = value_of(view, subject, "divergence", "kl_mean")
    if kl is None:
        return ""
    name = "Measured" if "loss" in limits else "KL measured"
    unit = "" if "loss" in limits else f" {view.nats}"
    missed = kl.value > limits.get("loss", math.inf)
    return (
        f" {name} on test {view.unit.text}: {with_error(kl)}{unit}{' (above the target)' if missed else ''}."
    )


def value_of(view: RunView, subject: Subject, kind: str, name: str) -> Estimate | None:
    """The last score of its kind."""
    scores = [s for s in view.scores if s.subject.key == subject.key and s.kind == kind]
    return scores[-1].values.get(name) if scores else None


def _relative_loss(plan: PlanView) -> float:
    if plan.perplexity is None or not plan.original_perplexity:
        return math.inf
    return plan.perplexity.value / plan.original_perplexity - 1


def best_profiles(view: RunView, plan: PlanView) -> list[Profile]:
    """The plan's speed as a user feels it: one profile per target and device."""
    profiles = [p for p in view.profiles if p.subject.own_plan == plan.name]
    use = [p for p in profiles if p.protocol == "use"]
    return use or profiles


def speed_of(profile: Profile) -> tuple[str, Quartiles] | None:
    """The one timing that says it best, and its unit."""
    for name, unit in (("tokens_per_second", "tokens/s"), ("throughput_fps", "inferences/s")):
        if name in profile.timings:
            return unit, profile.timings[name]
    return None


def speed_ratio(profile: Profile) -> Ratio | None:
    """Times the FP16 file of the same session, larger is faster; None where there was no such file."""
    if "ratios_to" not in profile.settings or not profile.settings.get("ratios_to_fp16", True):
        return None
    return ratio_of(profile, "tokens_per_second" if profile.protocol == "use" else "latency_ms")


def unmeasurable(profiles: Sequence[Profile]) -> list[str]:
    """A line for each reason why a speed cannot be compared; tables show for which files."""
    ratios = [ratio for profile in profiles if (ratio := speed_ratio(profile)) is not None]
    return list(dict.fromkeys(f"Speed against FP16 {ratio.words}." for ratio in ratios if ratio.obstacle))


def perplexities(view: RunView, plan: PlanView) -> tuple[float, float, float] | None:
    """Of the plan (its file before PyTorch), of the original by the same protocol, and the error of the difference."""
    ours = [s for s in view.scores if s.kind == "perplexity" and s.subject.own_plan == plan.name]
    originals = [s for s in view.scores if s.kind == "perplexity" and s.subject.what == ORIGINAL]
    for score in sorted(ours, key=lambda s: s.subject.what == PLAN):
        same = [s for s in originals if (s.what, s.protocol) == (score.what, score.protocol)]
        value, change = score.values.get("token_perplexity"), score.values.get("token_perplexity_change")
        if same and value:
            error = change.standard_error if change else math.nan
            return value.value, same[0].values["token_perplexity"].value, error
    if plan.perplexity is not None and plan.original_perplexity:
        return plan.perplexity.value, plan.original_perplexity, plan.perplexity.standard_error
    return None


def commands_for(view: RunView, plan: PlanView) -> list[str]:
    """What to type to get this plan again, in order, each line once."""
    whole = [c for c in view.commands if c.verb == "run"]
    if whole and plan.name in view.recommended:
        return [whole[-1].line]
    measured = [c for c in view.commands if c.verb == "measure" or c.words[1:3] == ("paper", "import")][-1:]
    planned = [c for c in view.commands if c.verb == "plan"]
    named = [c for c in planned if plan.name in c.words]
    if not named and plan.family in ("paper", "uniform"):
        named = [c for c in planned if "--paper" in c.words]
    named = named or [c for c in planned if not {"--paper", "--frontier"} & set(c.words)]
    return list(dict.fromkeys(command.line for command in (*measured, *named)))


def libraries(profiles: Sequence[Profile]) -> list[str]:
    """What ran them, where that may be one of several libraries."""
    runtimes = [profile.runtime for profile in profiles if "found" in profile.runtime]
    lines = (
        f"{r['runtime']} here is {r['library']} from {r['found']} ({r['version']}), {count(r['threads'], 'thread')}, "
        f"weights loaded by {r['load_mode']}."
        for r in runtimes
    )
    return list(dict.fromkeys(lines))
