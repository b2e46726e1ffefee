"""Every layer, task results, and what the models write."""

from __future__ import annotations

from kl_lens.reporting import answer
from kl_lens.reporting.data import KL, Generation, RunView
from kl_lens.reporting.markup import Html, join, tag
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import fixed_with_error, number, with_error
from kl_lens.reporting.plans import PlanView
from kl_lens.reporting.sections.words import Section, details, heading, note, paragraph
from kl_lens.reporting.tables import Cell, table
from kl_lens.run.records import ORIGINAL, PREDICTED, Score, SensitivityTable, Subject
from kl_lens.weights.recipes import FP16

TITLE = "Details"


def section(view: RunView) -> Section | None:
    plans = {each.plan.target: each.plan for each in answer.recommendations(view)}
    parts: list[Html | None] = []
    tables = [(space.target, space.title, space.table) for space in view.spaces.values()]
    if not tables and view.table:
        tables = [(None, "as published", view.table)]
    for index, (target, title, of) in enumerate(tables):
        if of.measurements:
            parts.append(details(f"Every layer, {title}", *_layers(view, of, plans.get(target), index)))
    parts += [_tasks(view), _samples(view)]
    return Section("details", TITLE, join(parts)) if any(parts) else None


def _layers(view: RunView, of: SensitivityTable, plan: PlanView | None, index: int) -> list[Html]:
    """One row for each component, KL in one column for each recipe; what was predicted has a sign before it."""
    known = {(m.component, m.format): m for m in of.measurements if KL in m.metrics}
    formats = list(dict.fromkeys(name for _, name in known))
    shown = [c for c in of.components if any((c.name, name) in known for name in formats)]
    columns = ["component", "in the plan", "weights", *formats]

    def kl(name: str, format_name: str) -> object:
        m = known.get((name, format_name))
        if m is None:
            return "–"
        value = m.metrics[KL]
        predicted = m.compute_dtype == PREDICTED
        return Cell(f"≈ {number(value.value, 2)}" if predicted else with_error(value), value.value)

    rows = [
        [c.name, "–" if plan is None else plan.stored.get(c.name, FP16), c.parameters,
         *(kl(c.name, name) for name in formats)]
        for c in shown
    ]  # fmt: skip
    identifier = f"layers-{index}" if index else "layers"
    search = tag(
        "label", "component ", tag("input", type="search", data_filter="0", placeholder="part of a name")
    )
    output = tag("output", f"{len(rows)} rows")
    controls = tag("div", search, output, class_="controls", data_for=identifier, hidden=True)
    caption = f"KL of every component in every recipe, {view.nats} (≈: predicted)"
    return [controls, table(columns, rows, identifier=identifier, caption=caption, tall=True)]


def _tasks(view: RunView) -> Html | None:
    scores = [s for s in view.scores if s.kind == "task"]
    if not scores:
        return None
    names = list(dict.fromkeys((s.what, metric) for s in scores for metric in s.values))
    subjects = sorted(dict.fromkeys(s.subject for s in scores), key=lambda s: s.what != ORIGINAL)
    columns = ["file"]
    columns += [f"{what}: {metric}" for what, metric in names]
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
