"""The answer: for each target its size and loss, the nearest stock file, where the file is and how to run it."""

from __future__ import annotations

import math
from pathlib import PurePath

from kl_lens.reporting import answer
from kl_lens.reporting.data import RunView, runtime_of
from kl_lens.reporting.markup import Html, join, tag
from kl_lens.reporting.names import runtime_title
from kl_lens.reporting.numbers import number, percent, size, with_error
from kl_lens.reporting.plans import PlanView
from kl_lens.reporting.sections.words import Section, details, note, paragraph
from kl_lens.run.records import Estimate

TITLE = "The answer"


def section(view: RunView) -> Section | None:
    answers = answer.recommendations(view)
    if not answers:
        return None
    cards = [_card(view, each) for each in answers]
    commands = answer.commands_for(view, answers[0].plan)
    again = details("To make it again", tag("pre", tag("code", "\n".join(commands)))) if commands else None
    return Section("answer", TITLE, join([tag("div", *cards, class_="grid answers"), again]))


def _card(view: RunView, found: answer.Answer) -> Html:
    plan = found.plan
    stock = plan.plan.notes.get("taken_over")
    title = runtime_title(plan.target) if plan.target else plan.title
    base, bytes_ = view.fp16_of(plan.target), view.bytes_of(plan, plan.target)
    kl, where = view.measured_kl(plan, plan.target)
    first = [tag("b", title), f": {size(bytes_)}, {percent(bytes_ / base)} of FP16; "]
    if kl is not None:
        first += ["KL ", tag("b", with_error(kl)), f" {view.nats}"]
    else:
        first += [f"predicted KL {number(plan.plan.predicted_kl)} {view.nats}, not measured yet"]
    parts = [
        tag("p", *first, _perplexity(view, plan), ".", class_="lead"),
        paragraph(_nearest(view, plan, kl)),
        note(
            found.rule if plan.plan.contest or not plan.plan.limits else "",
            f" {answer.target_of(plan, view.unit)}{answer.measured_of(view, plan)}"
            if plan.plan.limits
            else "",
            f" Measured: {where}." if kl is not None else "",
            f" The file follows the stock recipe {stock}." if stock else "",
            _speed(view, plan),
        ),
    ]
    if artifact := view.artifacts.get(f"{plan.target}/{plan.name}"):
        place = PurePath(view.folder, "artifacts", artifact.target, plan.name)
        weights = next((f for f in artifact.files if f.endswith(".gguf")), "")
        does = f'generate {place} --prompt "The history of the city"'
        verb = f"evaluate {place}" if view.unit.one == "image" else does
        parts.append(tag("pre", tag("code", f"{place / weights}\n\nkl-lens {verb}")))
    return tag("article", *parts)


def _nearest(view: RunView, plan: PlanView, kl: Estimate | None) -> str:
    """The largest stock file that is no larger, and how much more it loses."""
    own = view.bytes_of(plan, plan.target)
    stock = [
        p for p in view.plans_of(plan.target) if p.family == "stock" and view.bytes_of(p, plan.target) <= own
    ]
    judged = [(p, loss) for p in stock if (loss := view.measured_kl(p, plan.target)[0]) is not None]
    if kl is None or not judged:
        return "No stock file that was measured is as small." if kl and plan.target else ""
    rival, loss = max(judged, key=lambda pair: view.bytes_of(pair[0], plan.target))
    words = (
        f"{rival.title}, the nearest stock file that is no larger ({size(view.bytes_of(rival, plan.target))})"
    )
    if not kl.value > 0 or not math.isfinite(loss.value):
        return f"{words}: KL {with_error(loss)}."
    ratio = loss.value / kl.value
    much = f"loses {number(ratio, 2)} times as much" if ratio >= 1 else f"loses less ({percent(ratio)} of it)"
    return f"{words}, {much}: KL {with_error(loss)}."


def _perplexity(view: RunView, plan: PlanView) -> str:
    """A change within twice its own error is called what it is."""
    if (known := answer.perplexities(view, plan)) is None:
        return ""
    value, original, error = known
    change = value - original
    bars = f" ± {percent(error / original, 1)}" if math.isfinite(error) else ""
    chance = ", which may be chance" if abs(change) < 2 * error else ""
    share = f"{'+' if change >= 0 else '−'}{percent(abs(change) / original, 1)}"
    return f"; perplexity {value:.2f}, original {original:.2f} ({share}{bars}{chance})"


def _speed(view: RunView, plan: PlanView) -> str:
    timed = [(p, r) for p in answer.best_profiles(view, plan) if (r := answer.speed_ratio(p)) is not None]
    if not timed:
        return ""
    said = [
        (r.words if r.obstacle else f"{r.brief} times")
        + ("" if plan.target else f" ({runtime_of(p.subject)})")
        for p, r in timed
    ]
    quick = ", by a quick timing" if any(p.settings.get("quick") for p, _ in timed) else ""
    return f" Speed against the FP16 file on {timed[0][0].device}: {' and '.join(said)}{quick}."
