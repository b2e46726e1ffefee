"""The answer: which file, how small, how good, how fast, and what to type."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kl_lens.profiling import Ratio
from kl_lens.reporting import answer, explorer
from kl_lens.reporting.data import RunView, runtime_of
from kl_lens.reporting.figures.sizes import SizePoint, size_plot
from kl_lens.reporting.markup import Html, join, tag
from kl_lens.reporting.names import runtime_title
from kl_lens.reporting.numbers import fixed_with_error, number, percent, size, with_error
from kl_lens.reporting.plans import PlanView
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.words import note, paragraph
from kl_lens.reporting.spaces import Space
from kl_lens.reporting.tables import Cell, Column, table, text_column
from kl_lens.run.records import Profile
from kl_lens.weights.recipes import FP16

TITLE = "The answer"
KL_AXIS = "KL from the original, nats per token"
_NOTHING = 1e-8  # a KL below this is rounding, and would stretch a logarithmic axis over decades of it


def section(view: RunView) -> Section | None:
    answers = answer.recommendations(view)
    if not answers:
        return None
    sentences = [tag("p", *_sentence(view, each.plan), class_="lead") for each in answers]
    parts: list[Html | None] = [
        tag("div", *sentences, class_="grid answers"),
        explorer.explorer(view),
        *(note(line) for line in view.without_slider),
        tag("div", *_charts(view), class_="grid charts"),
    ]
    for each in answers:
        parts += [_comparison(view, each.plan), note(each.rule)]
    return Section("answer", TITLE, join([*parts, note(_protocol(view)), _commands(view, answers[0].plan)]))


def _charts(view: RunView) -> list[Html]:
    """One for each target: size against KL, ours and every rival as measured."""
    charts = []
    for target, space in view.spaces.items():
        points, texts = kl_points(view, space)
        if points:
            caption = (
                f"Measured: {'; '.join(texts)}; bars: one standard error. Dashed: the best plan of each size, "
                "predicted. Click two plans to compare them."
            )
            name = f"Size against KL: {space.title}"
            charts.append(size_plot(name, points, KL_AXIS, caption, space.frontier, True, target or ""))
    return charts


def kl_points(view: RunView, space: Space) -> tuple[list[SizePoint], list[str]]:
    """Every plan of a target whose KL was measured, and on which text."""
    points, texts = [], dict[str, None]()
    for plan in explorer.plans_of(view, space):
        kl, where = explorer.measured_kl(view, plan, space.target)
        if kl is None or kl.value <= _NOTHING or set(plan.stored.values()) == {FP16}:
            continue
        star = plan.name in answer.recommended_names(view)
        bytes_ = explorer.bytes_of(view, plan, space.target)
        pin = f"{space.target or ''}/{plan.name}"
        points.append(SizePoint(plan.title, plan.label, plan.family, bytes_, kl, star, pin))
        texts[where] = None
    return points, list(texts)


def _sentence(view: RunView, plan: PlanView) -> list[object]:
    """Size, quality, target, speed."""
    base = view.fp16_of(plan.target)
    parts: list[object] = [
        tag("b", runtime_title(plan.target) if plan.target else plan.title),
        f": {size(plan.bytes)}, {percent(plan.bytes / base)} of FP16 ({size(base)}); "
        f"{plan.row.bits_per_weight:.2f} bits per weight.",
    ]
    quality = _quality(view, plan)
    if quality is not None:
        parts.append(_perplexity_words(quality))
    elif plan.row.predicted_kl is not None:
        parts.append(f" Predicted KL: {number(plan.row.predicted_kl)} nats per token; not measured yet.")
    if plan.plan.limits:
        parts.append(f" {answer.target_of(plan)}{answer.measured_of(view, plan)}")
    timed = [(p, r) for p in answer.best_profiles(view, plan) if (r := answer.speed_ratio(p)) is not None]
    if timed:
        said = " and ".join(
            _speed_words(r) + ("" if plan.target else f" ({runtime_of(p.subject)})") for p, r in timed
        )
        quick = ", by a quick timing" if any(p.settings.get("quick") for p, _ in timed) else ""
        parts.append(f" Speed against the FP16 file on {timed[0][0].device}: {said}{quick}.")
    return parts


@dataclass(frozen=True)
class _Quality:
    """The best known perplexity: of the exported file where it was evaluated, else of the plan in PyTorch."""

    value: float
    original: float
    error: float  # of the difference between the two, on the same text
    where: str


def _quality(view: RunView, plan: PlanView) -> _Quality | None:
    for score, original in answer.quality_scores(view, plan):
        change = score.values.get("token_perplexity_change")
        if original is not None:
            error = change.standard_error if change else math.nan
            where = score.what if plan.target else f"{runtime_of(score.subject)} on {score.what}"
            return _Quality(score.values["token_perplexity"].value, original.value, error, where)
    if plan.perplexity is not None and plan.original_perplexity:
        where = f"PyTorch on {plan.measured_on or 'held-out text'}"
        return _Quality(
            plan.perplexity.value, plan.original_perplexity, plan.perplexity.standard_error, where
        )
    return None


def _perplexity_words(quality: _Quality) -> str:
    """A change within twice its own error is called what it is."""
    change = quality.value - quality.original
    share, error = percent(abs(change) / quality.original, 1), percent(quality.error / quality.original, 1)
    values = f"from {quality.original:.2f} to {quality.value:.2f}"
    known = f" ± {error}" if not math.isnan(quality.error) else ""
    if abs(change) < 2 * quality.error or abs(change) < 5e-4 * quality.original:
        sign = "+" if change >= 0 else "−"
        return f" Perplexity goes {values}, which may be chance ({sign}{share}{known}; {quality.where})."
    verb = "rises" if change > 0 else "falls"
    return f" Perplexity {verb} by {share}{known}, {values} ({quality.where})."


def _commands(view: RunView, plan: PlanView) -> Html | None:
    lines = answer.commands_for(view, plan)
    if not lines:
        return None
    return join([paragraph("To make it again:"), tag("pre", tag("code", "\n".join(lines)))])


def _comparison(view: RunView, plan: PlanView) -> Html:
    """FP16, what stands beside the answer, and the answer."""
    shown = _beside(view, plan)
    timed = [profile.subject for p in shown for profile in answer.best_profiles(view, p)]
    targets = list(dict.fromkeys(runtime_of(subject) for subject in timed))
    if plan.target:
        targets = [t for t in targets if t == runtime_title(plan.target)]
    ratios = [t for t in targets if any((f := _profile(view, p, t)) and answer.speed_ratio(f) for p in shown)]

    def of(name: str, target: str) -> Column:
        return Column(name if plan.target else f"{name}, {target}")

    columns = [
        text_column("file" if plan.target else "plan"), Column("size"), Column("of FP16"), Column("predicted KL"),
        Column("KL, held-out text"), Column("perplexity, held-out text"),
        *([Column("KL, test text")] if plan.target else []),
        *(of("speed, × FP16", target) for target in ratios),
        *(of("peak memory", target) for target in targets),
    ]  # fmt: skip
    rows = [
        _original_row(view, plan, ratios, targets),
        *(_row(view, p, ratios, targets, plan) for p in shown),
    ]
    title = f"Files for {runtime_title(plan.target)}" if plan.target else "Plans"
    return table(columns, rows, highlight=[1 + shown.index(plan)], caption=title)


def _protocol(view: RunView) -> str:
    texts = list(dict.fromkeys(p.measured_on for p in view.plans if p.measured_on))
    predicted = "Predicted KL: the sum of what each component loses alone"
    factor = next((p.plan.interaction for p in view.plans if p.plan.interaction != 1), None)
    predicted += "." if factor is None else f", times {factor:.3f} as learnt from other plans and text."
    if not texts:
        return predicted
    return (
        f"Held-out text: {'; '.join(texts)}, whole plans in PyTorch, activations rounded as the runtime does. ± is "
        f"one standard error, for perplexities that of the difference from the original. {predicted}"
    )


def _beside(view: RunView, plan: PlanView) -> list[PlanView]:
    """Of a target's plan, the others for that target; of another, the uniform plans and the paper's nearest points."""
    if plan.target:
        others = [p for p in view.plans if p.target == plan.target]
        judged = {s.subject.plan for s in view.scores if s.subject.target == plan.target}
        others += [p for p in view.plans if p.family in ("uniform", "paper") and p.name in judged]
    else:
        others = [p for p in view.plans if p.family == "uniform"]
        points = sorted((p for p in view.plans if p.family == "paper"), key=lambda p: p.bytes)
        others += [p for p in points if p.bytes <= plan.bytes][-1:] + [
            p for p in points if p.bytes > plan.bytes
        ][:1]
    unique = {p.name: p for p in [*others, plan] if set(p.stored.values()) - {FP16}}  # FP16 has its own row
    return sorted(unique.values(), key=lambda p: -explorer.bytes_of(view, p, plan.target))


def _profile(view: RunView, plan: PlanView, target: str) -> Profile | None:
    profiles = [p for p in answer.best_profiles(view, plan) if runtime_of(p.subject) == target]
    return profiles[0] if profiles else None


def _original_row(view: RunView, plan: PlanView, ratios: list[str], targets: list[str]) -> list[object]:
    original = next((p.original_perplexity for p in [plan, *view.plans] if p.original_perplexity), None)
    perplexity = "–" if original is None else f"{original:.2f}"
    base, on_test = view.fp16_of(plan.target), ["0"] if plan.target else []
    return ["FP16, the original", Cell(size(base), base), Cell("100 %", base), "0", "0", perplexity,
            *on_test, *("1" for _ in ratios), *(_fp16_memory(view, t) for t in targets)]  # fmt: skip


def _fp16_memory(view: RunView, target: str) -> object:
    """Of the file that the others' ratios are to."""
    bases = {p.settings.get("ratios_to") for p in view.profiles if answer.speed_ratio(p) is not None}
    profiles = [p for p in view.profiles if p.subject.label in bases and runtime_of(p.subject) == target]
    return _memory(profiles[0] if profiles else None)


def _memory(profile: Profile | None) -> object:
    if profile is None or not profile.peak_memory_bytes:
        return "–"
    return Cell(size(profile.peak_memory_bytes), profile.peak_memory_bytes)


def _speed(profile: Profile | None) -> str:
    ratio = answer.speed_ratio(profile) if profile else None
    return ratio.brief if ratio else "–"


def _speed_words(ratio: Ratio) -> str:
    return ratio.words if ratio.obstacle else f"{ratio.brief} times"


def _row(
    view: RunView, plan: PlanView, ratios: list[str], targets: list[str], beside: PlanView
) -> list[object]:
    count, base = explorer.bytes_of(view, plan, beside.target), view.fp16_of(beside.target)
    profiles = {target: _profile(view, plan, target) for target in targets}
    return [
        plan.title,
        Cell(size(count), count),
        Cell(percent(count / base, 1), count),
        number(plan.row.predicted_kl),
        with_error(plan.kl),
        fixed_with_error(plan.perplexity),
        *([with_error(explorer.measured_kl(view, plan, beside.target)[0])] if beside.target else []),
        *(_speed(profiles[target]) for target in ratios),
        *(_memory(profiles[target]) for target in targets),
    ]
