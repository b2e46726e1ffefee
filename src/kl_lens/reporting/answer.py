"""The answer first: for each target which plan, how small, how good, how fast, and what to type to get it again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath

from kl_lens.judging.choosing import (
    KEPT_PERPLEXITY,
    Contender,
    closest,
    nearest,
    smallest_that_keeps,
)
from kl_lens.reporting.data import Judged, RunView, runtime_of
from kl_lens.reporting.markup import Html, Section, details, join, note, tag
from kl_lens.reporting.names import (
    Unit,
    count,
    number,
    percent,
    plan_title,
    readable,
    runtime_title,
    size,
    with_error,
)
from kl_lens.run.folder import RECOMMENDED
from kl_lens.run.ratios import Ratio, ratio_of
from kl_lens.run.records import ARTIFACT, Estimate, Plan, Profile, Subject

_EXPORTED = "This is the plan that was exported last. "
_SMALLEST = (
    f'The run has no plan called "{RECOMMENDED}"; this is the smallest verified plan whose held-out perplexity stays '
    f"within {100 * KEPT_PERPLEXITY:g} % of the original's. "
)


def recommendations(view: RunView) -> list[Plan]:
    """One for each target: the plan that `kl-lens run` recommends, else the last one of the user's that was exported.
    Without either the run's recommended plan, or the smallest verified one that keeps perplexity."""
    named = [plan for plan in view.plans if plan.name in view.recommended]
    if named:
        return (
            sorted((p for p in named if p.target), key=lambda p: p.target or "")
            or named[:1]
        )
    exported = {
        plan.target: plan
        for artifact in view.artifacts.values()
        if (plan := view.plan(artifact.plan))
        and plan.target == artifact.target
        and plan.limits
    }
    if exported:
        return [exported[target] for target in sorted(exported, key=str)]
    measured = {p.name: p for p in view.plans if p.measured}
    rises = [
        (
            Contender(name, view.bytes_of(p), p.measured.kl.value, None),
            p.measured.rise.value,
        )
        for name, p in measured.items()
        if p.measured and view.bytes_of(p) < view.fp16_bytes
    ]
    smallest = smallest_that_keeps(rises)
    return [measured[smallest.name]] if smallest else []


def _rule(view: RunView, plan: Plan) -> str:
    """Why this one, where the run recommends none."""
    if plan.name in view.recommended:
        return ""
    return _EXPORTED if plan.target else _SMALLEST


def recommended_names(view: RunView) -> frozenset[str]:
    return frozenset(plan.name for plan in recommendations(view))


def target_of(plan: Plan, unit: Unit | None = None) -> str:
    """What the plan had to meet."""
    limits = plan.limits
    lost = plan.missed
    unit = unit or Unit()
    if "loss" in limits:
        missed = (
            ""
            if lost is None
            else f" Missed on held-out {unit.text}: {with_error(lost)}."
        )
        return f"Limit: KL ≤ {limits['loss']:g} nats per {unit.one} (--max-loss).{missed}"
    if "drop" in limits:
        missed = (
            ""
            if lost is None
            else f" Missed on held-out {unit.text}: {percent(lost.value, 2)}."
        )
        return f"Limit: perplexity rises by at most {percent(limits['drop'], 1)} (--max-drop).{missed}"
    if "memory" in limits:
        use = f"{limits.get('batch', 1):g} × {limits.get('context', 4096):g} tokens"
        return f"Limit: {size(limits['memory'])} of memory for {use}; predicted {size(plan.memory_bytes)} (--memory)."
    if "bytes" in limits:
        return f"Limit: at most {size(limits['bytes'])} (--max-bytes)."
    if "seconds" in limits:
        return f"Limit: at least {number(1 / limits['seconds'])} tokens per second (--min-speed)."
    return f"Made by: {plan.made_by}."


def measured_of(view: RunView, plan: Plan) -> str:
    """The KL of the file on test text, and whether that is above the target."""
    judged = view.judged(plan, plan.target)
    kl = judged.kl
    if kl is None or not judged.is_test:
        return ""
    above = " (above the target)" if kl.value > plan.limits.get("loss", math.inf) else ""
    return f" KL measured on test {view.unit.text}: {with_error(kl)} {view.nats}{above}."


def speed_ratio(profile: Profile) -> Ratio | None:
    """Times the FP16 file of the same session, larger is faster; None where there was no such file."""
    if "ratios_to" not in profile.settings or not profile.settings.get(
        "ratios_to_fp16", True
    ):
        return None
    return ratio_of(profile, "tokens_per_second")


def unmeasurable(profiles: Sequence[Profile]) -> list[str]:
    """A line for each reason why a speed cannot be compared; tables show for which files."""
    ratios = [
        ratio for profile in profiles if (ratio := speed_ratio(profile)) is not None
    ]
    return list(
        dict.fromkeys(
            f"Speed against FP16 {ratio.words}." for ratio in ratios if ratio.obstacle
        )
    )


def commands_for(view: RunView, plan: Plan) -> list[str]:
    """What to type to get this plan again, in order, each line once."""
    whole = [c for c in view.commands if c.verb == "run"]
    if whole and plan.name in view.recommended:
        return [whole[-1].line]
    measured = [c for c in view.commands if c.verb == "measure"][-1:]
    planned = [
        c for c in view.commands if c.verb == "plan" and "--frontier" not in c.words
    ]
    named = [c for c in planned if plan.name in c.words] or planned
    return list(dict.fromkeys(command.line for command in (*measured, *named)))


def libraries(profiles: Sequence[Profile]) -> list[str]:
    """What ran them, where that may be one of several libraries."""
    lines = (
        f"{r['runtime']} here is {r['library']} from {r['found']} ({r['version']}), {count(r['threads'], 'thread')}, "
        f"weights loaded by {r['load_mode']}."
        for r in (profile.runtime for profile in profiles)
        if "found" in r
    )
    return list(dict.fromkeys(lines))


def stood_in(view: RunView, subject: Subject) -> bool:
    """Whether PyTorch was judged in place of this file."""
    score = view.score(subject, "divergence")
    return score is not None and score.subject.key != subject.key


def closest_files(
    view: RunView, names: Sequence[str], target: str, count: int
) -> list[str]:
    """The recommendation, which is the last name, and the rivals whose files are nearest in size, those first that
    their own runtime has judged."""
    files = []
    for name in names:
        subject = Subject(ARTIFACT, name, target)
        score = None if stood_in(view, subject) else view.score(subject, "divergence")
        kl = math.nan if score is None else score.values["kl_mean"].value
        files.append(Contender(name, view.subject_bytes(subject) or 0, kl, None))
    return [file.name for file in closest(files[-1], files[:-1], count)]


# -- the section ----------------------------------------------------------------------------------------------


def section(view: RunView) -> Section | None:
    answers = recommendations(view)
    if not answers:
        return None
    cards = [_card(view, plan) for plan in answers]
    commands = commands_for(view, answers[0])
    again = (
        details("To make it again", tag("pre", tag("code", "\n".join(commands))))
        if commands
        else None
    )
    return Section(
        "answer", "The answer", join([tag("div", *cards, class_="grid answers"), again])
    )


def _card(view: RunView, plan: Plan) -> Html:
    stock = plan.notes.get("taken_over")
    contest = plan.contest
    judged = view.judged(plan, plan.target)
    kl = judged.kl
    numbers = [
        f"predicted KL {number(view.predicted_kl(plan))} {view.nats}, not measured yet"
    ]
    if kl is not None:
        numbers = ["KL ", tag("b", with_error(kl)), f" {view.nats}"]
    parts = [
        tag("p", plainly(view, plan), class_="lead"),
        tag("p", *numbers, _perplexity(judged), ". ", _nearest(view, plan, kl)),
        note(
            _rule(view, plan),
            f"Against stock recipes: {readable(contest)}. " if contest else "",
            target_of(plan, view.unit),
            " The file is above it."
            if kl and kl.value > plan.limits.get("loss", math.inf)
            else "",
            f" Measured: {judged.circumstances}." if kl is not None else "",
            f" The file follows the stock recipe {stock}." if stock else "",
            _speed(view, plan),
        ),
    ]
    if artifact := view.artifacts.get(f"{plan.target}/{plan.name}"):
        folder = PurePath(view.folder, "artifacts", artifact.target, plan.name)
        weights = next((f for f in artifact.files if f.endswith(".gguf")), "")
        does = f'generate {folder} --prompt "The history of the city"'
        verb = f"evaluate {folder}" if view.unit.one == "image" else does
        parts.append(tag("pre", tag("code", f"{folder / weights}\n\nkl-lens {verb}")))
    return tag("article", *parts)


def plainly(view: RunView, plan: Plan) -> str:
    """The answer for somebody who knows no KL: size, and how often the model's first choice stays the same."""
    title = runtime_title(plan.target) if plan.target else plan_title(plan.name)
    bytes_ = view.bytes_of(plan, plan.target)
    share = percent(bytes_ / view.fp16_of(plan.target))
    words = f"{title}: {size(bytes_)}, {share} of the size of FP16."
    agreement = view.judged(plan, plan.target).same_top
    if agreement is None:
        return words
    words += f" The likeliest {view.unit.guess} stays the same {_in_hundred(agreement)}"
    rival = nearest_stock(view, plan)
    rival_agreement = view.judged(rival, plan.target).same_top if rival else None
    if rival and rival_agreement:
        rival_size = size(view.bytes_of(rival, plan.target))
        words += f"; with {plan_title(rival.name)} ({rival_size}), {_in_hundred(rival_agreement)}"
    return f"{words}."


def _in_hundred(share: Estimate) -> str:
    """Rounded down, so that 100 means always."""
    return f"{math.floor(100 * share.value)} times in 100"


def nearest_stock(view: RunView, plan: Plan) -> Plan | None:
    """Of the stock files that were measured the largest that is no larger; of two of one size, the better."""
    kl = view.judged(plan, plan.target).kl
    stock = {p.name: p for p in view.plans_of(plan.target) if p.family == "stock"}
    rivals = [
        Contender(name, view.bytes_of(p, plan.target), loss.value, None)
        for name, p in stock.items()
        if (loss := view.judged(p, plan.target).kl) is not None
    ]
    contender = Contender(
        plan.name,
        view.bytes_of(plan, plan.target),
        math.nan if kl is None else kl.value,
        None,
    )
    chosen = nearest(contender, rivals)
    return stock[chosen.name] if chosen else None


def _nearest(view: RunView, plan: Plan, kl: Estimate | None) -> str:
    """How much more the nearest stock file loses."""
    rival = nearest_stock(view, plan)
    loss = view.judged(rival, plan.target).kl if rival else None
    if kl is None or rival is None or loss is None:
        return (
            "No stock file that was measured is as small." if kl and plan.target else ""
        )
    words = f"{plan_title(rival.name)}, the nearest stock file that is no larger "
    words += f"({size(view.bytes_of(rival, plan.target))})"
    if not kl.value > 0 or not math.isfinite(loss.value):
        return f"{words}: KL {with_error(loss)}."
    ratio = loss.value / kl.value
    comparison = (
        f"loses {number(ratio, 2)} times as much"
        if ratio >= 1
        else f"loses less ({percent(ratio)} of it)"
    )
    return f"{words}, {comparison}: KL {with_error(loss)}."


def _perplexity(judged: Judged) -> str:
    """Beside the original's on the same text. A change within twice its own error is called what it is."""
    original = judged.original
    if judged.perplexity is None or original is None:
        return ""
    change = judged.perplexity.value - original
    error = judged.change_error
    bars = f" ± {percent(error / original, 1)}" if math.isfinite(error) else ""
    chance = ", which may be chance" if abs(change) < 2 * error else ""
    share = f"{'+' if change >= 0 else '−'}{percent(abs(change) / original, 1)}"
    value = judged.perplexity.value
    return f"; perplexity {value:.2f}, original {original:.2f} ({share}{bars}{chance})"


def _speed(view: RunView, plan: Plan) -> str:
    profiles = [p for p in view.profiles if p.subject.own_plan == plan.name]
    timed = [(p, r) for p in profiles if (r := speed_ratio(p)) is not None]
    if not timed:
        return ""
    ratios = [
        (r.words if r.obstacle else f"{r.brief} times")
        + ("" if plan.target else f" ({runtime_of(p.subject)})")
        for p, r in timed
    ]
    quick = (
        ", by a quick timing" if any(p.settings.get("quick") for p, _ in timed) else ""
    )
    return f" Speed against the FP16 file on {timed[0][0].device}: {' and '.join(ratios)}{quick}."
