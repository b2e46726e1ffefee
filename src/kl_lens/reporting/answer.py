"""The answer first: which plan, how small, how good, how fast, and what to type to get it again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kl_lens.records import ORIGINAL, PLAN, Estimate, Profile, Score, Spread
from kl_lens.reporting.data import Command, RunView
from kl_lens.reporting.plans import PlanView

RECOMMENDED = "recommended"
# Of a run without a plan of that name, the smallest plan that loses no more than this is the answer.
TOLERATED = 0.02


@dataclass(frozen=True)
class Answer:
    plan: PlanView
    rule: str  # why this one, in words


def recommend(view: RunView) -> Answer | None:
    """The plan called "recommended"; else the smallest verified one that keeps perplexity within TOLERATED."""
    named = view.plan(RECOMMENDED)
    if named is not None:
        how = "refined by measured swaps" if named.family == "refined" else f"made by: {named.plan.made_by}"
        return Answer(named, f'It is the run\'s plan "{RECOMMENDED}" ({how}).')
    verified = [p for p in view.plans if p.kl is not None and p.bytes < view.fp16_bytes]
    if not verified:
        return None
    kept = [p for p in verified if _relative_loss(p) <= TOLERATED]
    if kept:
        rule = (
            f'The run has no plan called "{RECOMMENDED}"; this is the smallest verified plan whose held-out perplexity '
            f"stays within {100 * TOLERATED:g} % of the original's."
        )
        return Answer(min(kept, key=lambda p: p.bytes), rule)
    rule = (
        f"No verified plan keeps held-out perplexity within {100 * TOLERATED:g} % of the original's; this is the one "
        "with the least measured KL."
    )
    return Answer(min(verified, key=lambda p: p.kl.value if p.kl else math.inf), rule)


def _relative_loss(plan: PlanView) -> float:
    if plan.perplexity is None or not plan.original_perplexity:
        return math.inf
    return plan.perplexity.value / plan.original_perplexity - 1


def best_profiles(view: RunView, plan: PlanView) -> list[Profile]:
    """The plan's speed as a user feels it: one profile per target and device."""
    found = [p for p in view.profiles if p.subject.own_plan == plan.name]
    use = [p for p in found if p.protocol == "use"]
    return use or found


def speed_of(profile: Profile) -> tuple[str, Spread] | None:
    """The one timing that says it best, and its unit."""
    for name, unit in (("tokens_per_second", "tokens/s"), ("throughput_fps", "inferences/s")):
        if name in profile.timings:
            return unit, profile.timings[name]
    return None


def speed_ratio(profile: Profile) -> Spread | None:
    """Times the FP16 file of the same session, larger is faster; None where there was no such file."""
    if not profile.settings.get("ratios_to_fp16", True):
        return None
    for name in ("tokens_per_second", "seconds_per_token", "throughput_fps", "latency_ms"):
        if name in profile.ratios:
            return profile.ratios[name]
    return None


def quality_scores(view: RunView, plan: PlanView) -> list[tuple[Score, Estimate | None]]:
    """Perplexities of the plan, each with the original's under the same protocol; files before PyTorch."""
    found = []
    for score in view.scores:
        if (
            score.kind == "perplexity"
            and score.subject.own_plan == plan.name
            and "token_perplexity" in score.values
        ):
            original = next(
                (s for s in view.scores if s.subject.what == ORIGINAL and same_protocol(s, score)), None
            )
            found.append((score, original.values.get("token_perplexity") if original else None))
    return sorted(found, key=lambda pair: pair[0].subject.what == PLAN)


def same_protocol(one: Score, other: Score) -> bool:
    return (one.kind, one.what, one.protocol) == (other.kind, other.what, other.protocol)


def commands_for(view: RunView, plan: PlanView) -> list[str]:
    """What to type to get this plan again, in order, each line once."""
    whole = [c for c in view.commands if c.verb == "run"]
    if whole and plan.name == RECOMMENDED:
        return [whole[-1].line]
    lines: dict[str, None] = {}
    for command in [*_last(view.commands, ("measure", "import-legacy")), *_planning(view, plan)]:
        lines[command.line] = None
    return list(lines)


def _last(commands: Sequence[Command], verbs: Sequence[str]) -> list[Command]:
    """The last command with one of these verbs."""
    found = [c for c in commands if c.verb in verbs]
    return found[-1:]


def _planning(view: RunView, plan: PlanView) -> list[Command]:
    planned = [c for c in view.commands if c.verb == "plan"]
    wanted = [plan.name, plan.plan.refined_from or plan.name]
    named = [c for c in planned if any(name in c.words for name in wanted)]
    if not named and plan.family in ("paper", "uniform"):
        named = [c for c in planned if "--paper" in c.words]
    return named or [c for c in planned if not {"--paper", "--frontier"} & set(c.words)]
