"""Section 4: size against quality, and predictions against measurements."""

from __future__ import annotations

import json

from kl_lens.records import ORIGINAL, Estimate, Score, Subject
from kl_lens.reporting.answer import recommended_names
from kl_lens.reporting.data import RunView, plan_or_file, runtime_of
from kl_lens.reporting.figures.sizes import SizePoint, predicted_plot, size_plot
from kl_lens.reporting.markup import Html, join
from kl_lens.reporting.numbers import fixed_with_error, number, percent, size, with_error
from kl_lens.reporting.plans import FAMILIES, PlanView
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.words import fills, grid, on_run, paragraph
from kl_lens.reporting.tables import Cell, Column, table, text_column

TITLE = "Size against quality"
_PAIRED = "Error bars: of the difference from the original, on the same text."
_VALUES = {"perplexity": "token_perplexity", "divergence": "kl_mean"}


def section(view: RunView) -> Section:
    if not view.plans:
        line = on_run(view, "plan", "--paper", "--verify")
        return Section("sizes", TITLE, None, line, "no plan has been made")
    recommended = recommended_names(view)
    figures = [*_verified(view, recommended), *_scored(view, recommended)]
    parts: list[Html | None] = [
        paragraph(
            "Every plan of the run: how many bytes it takes, and what it costs in quality. Lower and further left is "
            "better."
        ),
        grid([*figures, predicted_plot(view.plans, recommended)]) if figures else None,
    ]
    if not any(p.kl for p in view.plans):
        parts.append(
            fills("Measured KL and perplexity of the plans", on_run(view, "plan", "--paper", "--verify"))
        )
    if not any(s.kind == "perplexity" for s in view.scores):
        parts.append(fills("Scores of exported files on test text", on_run(view, "evaluate")))
    parts += [_table(view, recommended), *_scores(view, recommended)]
    return Section("sizes", TITLE, join(parts))


def _verified(view: RunView, recommended: frozenset[str]) -> list[Html]:
    """From `plan --verify`: whole plans in PyTorch, on text that decided nothing; one for each text and target."""
    figures = []
    texts = dict.fromkeys((p.measured_on, p.target) for p in view.plans if p.kl is not None)
    for text, target in texts:
        plans = [p for p in view.plans if p.measured_on == text and p.target == target]
        whose = f", computing as {target} does" if target else ""
        original = next((p.original_perplexity for p in plans if p.original_perplexity), None)
        points = [_point(p, p.perplexity, recommended) for p in plans if p.perplexity]
        if points and original:
            fp16 = SizePoint("the original", "FP16", ORIGINAL, view.fp16_of(target), Estimate(original))
            caption = f"In PyTorch{whose}, {text or 'held-out text'}. {_PAIRED}"
            figures.append(size_plot("Size against perplexity", [*points, fp16], "token perplexity", caption))
    if not figures and view.frontier(None):
        predicted = [(p, p.row.predicted_kl) for p in view.plans if p.row.predicted_kl]
        points = [_point(p, Estimate(kl), recommended) for p, kl in predicted]
        if points:
            axis = "predicted KL, nats per token"
            figures.append(
                size_plot("Size against predicted KL", points, axis, None, view.frontier(None), True)
            )
    return figures


def _point(plan: PlanView, quality: Estimate, recommended: frozenset[str]) -> SizePoint:
    return SizePoint(plan.name, plan.label, plan.family, plan.bytes, quality, plan.name in recommended)


def _scored(view: RunView, recommended: frozenset[str]) -> list[Html]:
    """From `evaluate`: one figure for each text, protocol and runtime that judged at least two plans."""
    groups: dict[tuple[str, str, str], list[Score]] = {}
    originals: dict[tuple[str, str], Score] = {}
    for score in view.scores:
        if score.kind != "perplexity" or _VALUES[score.kind] not in score.values:
            continue
        protocol = json.dumps(score.protocol, sort_keys=True)
        if score.subject.what == ORIGINAL:
            originals[score.what, protocol] = score
        elif score.subject.is_usual:  # a stand-in in PyTorch, or a file in float32: in the table, not drawn
            groups.setdefault((score.what, protocol, runtime_of(score.subject)), []).append(score)
    figures = []
    for (what, protocol, runtime), scores in sorted(groups.items()):
        points = [p for s in scores if (p := _scored_point(view, s, recommended)) is not None]
        if len(points) < 2:  # one plan is no curve; the table has it
            continue
        if (original := originals.get((what, protocol))) is not None:
            value = Estimate(original.values["token_perplexity"].value)
            points.append(SizePoint("the original", "FP16", ORIGINAL, view.fp16_of(runtime), value))
        caption = f"{what}: {_protocol(scores[0])} {_PAIRED}"
        figures.append(size_plot(f"Size against perplexity: {runtime}", points, "token perplexity", caption))
    return figures


def _scored_point(view: RunView, score: Score, recommended: frozenset[str]) -> SizePoint | None:
    count = view.subject_bytes(score.subject)
    if count is None:
        return None
    change = score.values.get("token_perplexity_change")
    value = Estimate(
        score.values["token_perplexity"].value, change.standard_error if change else float("nan")
    )
    name = plan_or_file(score.subject)
    plan = view.plan(name)
    family, label = (plan.family, plan.label) if plan else ("other", name)
    return SizePoint(score.subject.label, label, family, count, value, name in recommended)


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
        Column("bits per weight"), Column("predicted KL"), Column("measured KL"), Column("perplexity"),
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
                fixed_with_error(plan.perplexity),
                plan.row.shares_text.replace(" %", "\u00a0%"),
            ]
        )
    highlight = [i for i, p in enumerate(view.plans) if p.name in recommended]
    return table(columns, rows, highlight=highlight, caption="All plans of the run", identifier="plans")


def _scores(view: RunView, recommended: frozenset[str]) -> list[Html]:
    """Every perplexity and divergence that `evaluate` found, one table for each text and protocol."""
    texts: dict[str, dict[Subject, dict[str, Score]]] = {}
    for score in view.scores:
        if score.kind in _VALUES:
            subjects = texts.setdefault(f"Scores on {score.what}: {_protocol(score)}", {})
            subjects.setdefault(score.subject, {})[score.kind] = score
    columns = [
        text_column("judged"), Column("size"), Column("token perplexity"), Column("change, paired"),
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
        subject.label,
        Cell(size(count), count),
        fixed_with_error(values.get("token_perplexity")),
        fixed_with_error(values.get("token_perplexity_change"), 3),
        fixed_with_error(values.get("word_perplexity")),
        with_error(values.get("kl_mean")),
        f"{100 * top.value:.2f}" if top else "–",
        view.verdicts.get((subject, what), "–"),
    ]
