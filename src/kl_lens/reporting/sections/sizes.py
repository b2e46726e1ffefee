"""Size against perplexity for each target, predictions against measurements, and every score."""

from __future__ import annotations

import json

from kl_lens.reporting.answer import recommended_names
from kl_lens.reporting.data import RunView, plan_or_file
from kl_lens.reporting.figures.sizes import SizePoint, predicted_plot, size_plot
from kl_lens.reporting.markup import Html, join
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import fixed_with_error, number, percent, size, with_error
from kl_lens.reporting.plans import FAMILIES
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.words import details, grid, paragraph
from kl_lens.reporting.spaces import Space
from kl_lens.reporting.tables import Cell, Column, table, text_column
from kl_lens.run.records import ARTIFACT, ORIGINAL, PLAN, Estimate, Score, Subject

TITLE = "Size against quality"
_PAIRED = "Bars: standard error of the difference from the original."
_VALUES = {"perplexity": "token_perplexity", "divergence": "kl_mean"}


def section(view: RunView) -> Section | None:
    if not view.plans:
        return None
    recommended = recommended_names(view)
    charts = [_chart(view, space, recommended) for space in view.spaces.values()]
    parts = [
        paragraph("Lower and further left is better."),
        grid([*charts, predicted_plot(view.plans, recommended)]),
        *_scores(view, recommended),
        details("Every plan, and what it is made of", _table(view, recommended)),
    ]
    return Section("sizes", TITLE, join(parts))


def _chart(view: RunView, space: Space, recommended: frozenset[str]) -> Html | None:
    """Of the target's files where several were evaluated, else of whole plans in PyTorch, else as predicted."""
    title, points, caption = f"Size against perplexity: {space.title}", *_scored(view, space, recommended)
    if len(points) < 2:
        points, caption = _verified(view, space, recommended)
    if points:
        return size_plot(title, points, "token perplexity", caption)
    if any(p.kl for p in view.plans) or not space.frontier:
        return None
    predicted = [
        SizePoint(p.title, p.label, p.family, p.bytes, Estimate(kl), p.name in recommended)
        for p in view.plans
        if p.target == space.target and (kl := p.row.predicted_kl)
    ]
    if not predicted:
        return None
    name = f"Size against predicted KL: {space.title}"
    return size_plot(name, predicted, "predicted KL, nats per token", None, space.frontier, True)


def _verified(view: RunView, space: Space, recommended: frozenset[str]) -> tuple[list[SizePoint], str]:
    """From `plan --verify`: whole plans in PyTorch, on held-out text."""
    plans = [p for p in view.plans if p.target == space.target and p.perplexity and p.original_perplexity]
    points = [
        SizePoint(p.title, p.label, p.family, p.bytes, p.perplexity, p.name in recommended)
        for p in plans
        if p.perplexity
    ]
    if points:
        points.append(_original(view, space, plans[0].original_perplexity or 0.0))
    text = next((p.measured_on for p in plans if p.measured_on), "held-out text")
    return points, f"In PyTorch, on {text}. {_PAIRED}"


def _scored(view: RunView, space: Space, recommended: frozenset[str]) -> tuple[list[SizePoint], str]:
    """From `evaluate`: on the text and by the protocol that judged most files."""
    what = ARTIFACT if space.target else PLAN
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in view.scores:
        subject = score.subject
        if score.kind != "perplexity" or _VALUES[score.kind] not in score.values:
            continue
        # A stand-in in PyTorch, or a file in float32, is in the table only.
        if subject.what == ORIGINAL or (subject.what == what and subject.target == space.target
                                        and subject.own_plan and subject.is_usual):  # fmt: skip
            key = score.what, json.dumps(score.protocol, sort_keys=True)
            groups.setdefault(key, []).append(score)
    scores = max(groups.values(), key=len, default=[])
    points = []
    for score in scores:
        value = score.values["token_perplexity"]
        if score.subject.what == ORIGINAL:
            points.append(_original(view, space, value.value))
        elif (count := view.subject_bytes(score.subject)) and score.subject.plan != "uniform_fp16":
            change = score.values.get("token_perplexity_change")
            paired = Estimate(value.value, change.standard_error if change else float("nan"))
            name = plan_or_file(score.subject)
            plan = view.plan(name)
            family, label = (plan.family, plan.label) if plan else ("other", name)
            points.append(
                SizePoint(subject_title(score.subject), label, family, count, paired, name in recommended)
            )
    return points, f"On {scores[0].what}: {_protocol(scores[0])} {_PAIRED}" if scores else ""


def _original(view: RunView, space: Space, perplexity: float) -> SizePoint:
    return SizePoint("the original", "FP16", ORIGINAL, view.fp16_of(space.target), Estimate(perplexity))


def _protocol(score: Score) -> str:
    """What a perplexity must name: window, stride, how much text."""
    window, stride = score.protocol.get("window"), score.protocol.get("stride")
    words = [f"{score.tokens:,} tokens"]
    if window:
        words.append(f"window {window}" + (f", stride {stride}" if stride else ""))
    return ", ".join(words) + "."


def _table(view: RunView, recommended: frozenset[str]) -> Html:
    columns = [
        text_column("plan"), text_column("kind"), Column("size"), Column("of FP16"),
        Column("bits per weight"), Column("predicted KL"), Column("KL, held-out text"),
        text_column("formats: components (share of the weights)"),
    ]  # fmt: skip
    rows: list[list[object]] = []
    for plan in view.plans:
        rows.append(
            [
                plan.name,
                FAMILIES[plan.family],
                Cell(size(plan.bytes), plan.bytes),
                Cell(percent(plan.bytes / view.fp16_of(plan.target), 1), plan.bytes),
                f"{plan.row.bits_per_weight:.2f}",
                number(plan.row.predicted_kl),
                with_error(plan.kl),
                plan.row.shares_text.replace(" %", "\u00a0%"),
            ]
        )
    highlight = [i for i, p in enumerate(view.plans) if p.name in recommended]
    caption = "Every plan, by the name that commands know it by"
    return table(columns, rows, highlight=highlight, caption=caption, identifier="plans")


def _scores(view: RunView, recommended: frozenset[str]) -> list[Html]:
    """Every perplexity and divergence that `evaluate` found, one table for each text and protocol."""
    texts: dict[str, dict[Subject, dict[str, Score]]] = {}
    for score in view.scores:
        if score.kind in _VALUES:
            subjects = texts.setdefault(f"Scores on {score.what}: {_protocol(score)}", {})
            subjects.setdefault(score.subject, {})[score.kind] = score
    columns = [
        text_column("file"), Column("size"), Column("token perplexity"), Column("change, paired"),
        Column("word perplexity"), Column("KL, nats per token"), Column("same top token, %"),
        text_column("agrees with PyTorch"),
    ]  # fmt: skip
    tables = []
    for caption, subjects in texts.items():
        rows = []
        order = sorted(subjects, key=lambda subject: subject.what != ORIGINAL)
        for subject in order:
            what = next(iter(subjects[subject].values())).what
            values = {k: v for score in subjects[subject].values() for k, v in score.values.items()}
            rows.append(_score_row(view, subject, what, values))
        highlight = [i for i, subject in enumerate(order) if subject.own_plan in recommended]
        tables.append(table(columns, rows, highlight=highlight, caption=caption))
    return tables


def _score_row(view: RunView, subject: Subject, what: str, values: dict[str, Estimate]) -> list[object]:
    count, top = view.subject_bytes(subject), values.get("same_top")
    return [
        subject_title(subject),
        Cell(size(count), count),
        fixed_with_error(values.get("token_perplexity")),
        fixed_with_error(values.get("token_perplexity_change"), 3),
        fixed_with_error(values.get("word_perplexity")),
        with_error(values.get("kl_mean")),
        f"{100 * top.value:.2f}" if top else "–",
        view.verdicts.get((subject, what), "–"),
    ]
