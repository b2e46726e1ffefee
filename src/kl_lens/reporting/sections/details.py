"""Every layer, task results, and what the models write."""

from __future__ import annotations

from kl_lens.reporting.answer import recommendations
from kl_lens.reporting.data import Generation, RunView
from kl_lens.reporting.markup import Html, join, tag
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import fixed_with_error
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.words import heading, note, paragraph
from kl_lens.reporting.tables import Column, layer_table, table, text_column
from kl_lens.run.records import ORIGINAL, Score, Subject

TITLE = "Details"


def section(view: RunView) -> Section | None:
    plans = {each.plan.target: each.plan for each in recommendations(view)}
    parts: list[Html | None] = []
    tables = [(space.target, space.title, space.table) for space in view.spaces.values()]
    if not tables and view.table:
        tables = [(None, "as published", view.table)]
    for index, (target, title, of) in enumerate(tables):
        if of.measurements:
            parts += [heading(f"Every layer, {title}"), layer_table(of, plans.get(target), index)]
    parts += [_tasks(view), _samples(view)]
    return Section("details", TITLE, join(parts)) if any(parts) else None


def _tasks(view: RunView) -> Html | None:
    scores = [s for s in view.scores if s.kind == "task"]
    if not scores:
        return None
    names = list(dict.fromkeys((s.what, metric) for s in scores for metric in s.values))
    subjects = sorted(dict.fromkeys(s.subject for s in scores), key=lambda s: s.what != ORIGINAL)
    columns = [text_column("file")]
    columns += [Column(f"{what}: {metric}", hint=f"{metric} on {what}") for what, metric in names]
    rows: list[list[object]] = []
    for subject in subjects:
        cells: list[object] = [subject_title(subject)]
        for what, metric in names:
            latest = _latest(scores, subject, what)
            cells.append(fixed_with_error(latest.values.get(metric), 3) if latest else "–")
        rows.append(cells)
    examples = ", ".join(f"{what} {n:,}" for what, n in {s.what: s.tokens for s in scores}.items())
    return join(
        [table(columns, rows, caption="Task results"), note(f"± one standard error; examples: {examples}.")]
    )


def _latest(scores: list[Score], subject: Subject, what: str) -> Score | None:
    return next((s for s in reversed(scores) if (s.subject, s.what) == (subject, what)), None)


def _samples(view: RunView) -> Html | None:
    if not view.generations:
        return None
    prompts = list(dict.fromkeys(g.prompt for g in view.generations))
    blocks = []
    for prompt in prompts:
        generations = [g for g in view.generations if g.prompt == prompt]
        generations.sort(key=lambda g: g.subject.what != ORIGINAL)
        blocks.append(tag("div", *(_sample(g) for g in generations), class_="samples"))
    words = "The prompt in bold, then what the model wrote. Two good models may differ after one close call."
    return join([heading("Samples of text"), paragraph(words), *blocks])


def _sample(generation: Generation) -> Html:
    quote = tag("blockquote", tag("b", generation.prompt), generation.text)
    return tag("div", tag("span", subject_title(generation.subject), class_="what"), quote)
