"""What autopsies found; every layer, task results, and what the models write."""

from __future__ import annotations

from pathlib import Path

from kl_lens.evaluation.autopsy import Autopsy
from kl_lens.reporting import answer
from kl_lens.reporting.data import KL, RunView
from kl_lens.reporting.frontier import PlanView
from kl_lens.reporting.markup import Cell, Html, Section, details, join, note, table, tag
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import fixed_with_error, number, size, with_error
from kl_lens.run.records import ORIGINAL, PREDICTED, SensitivityTable
from kl_lens.weights.recipes import FP16


def section(view: RunView) -> Section | None:
    plans = {plan.target: plan for plan in answer.recommendations(view)}
    parts: list[Html | None] = []
    tables = [(space.target, space.title, space.table) for space in view.spaces.values()]
    if not tables and view.table:
        tables = [(None, "as published", view.table)]
    for index, (target, title, of) in enumerate(tables):
        if of.measurements:
            parts.append(details(f"Every layer, {title}", *_layers(view, of, plans.get(target), index)))
    parts += [_tasks(view), _samples(view)]
    return Section("details", "Details", join(parts)) if any(parts) else None


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
    latest = {(s.subject, s.what): s for s in scores}
    names = list(dict.fromkeys((s.what, metric) for s in scores for metric in s.values))
    subjects = sorted(dict.fromkeys(s.subject for s in scores), key=lambda s: s.what != ORIGINAL)
    rows = []
    for subject in subjects:
        own = {what: latest[subject, what].values for what, _ in names if (subject, what) in latest}
        cells = [fixed_with_error(own.get(what, {}).get(metric), 3) for what, metric in names]
        rows.append([subject_title(subject), *cells])
    columns = ["file", *(f"{what}: {metric}" for what, metric in names)]
    examples = ", ".join(f"{what} {n:,}" for what, n in {s.what: s.tokens for s in scores}.items())
    return join(
        [table(columns, rows, caption="Task results"), note(f"± one standard error; examples: {examples}.")]
    )


def _samples(view: RunView) -> Html | None:
    if not view.generations:
        return None
    blocks: dict[str, list[Html]] = {}
    for sample in sorted(view.generations, key=lambda g: g.subject.what != ORIGINAL):
        quote = tag("blockquote", tag("b", sample.prompt), sample.text)
        whose = tag("span", subject_title(sample.subject), class_="what")
        blocks.setdefault(sample.prompt, []).append(tag("div", whose, quote))
    words = "The prompt in bold, then what the model wrote. Two good models may differ after one close call."
    shown = [tag("div", *samples, class_="samples") for samples in blocks.values()]
    return join([tag("h3", "Samples of text"), tag("p", words), *shown])


def autopsies(view: RunView) -> Section | None:
    if not view.autopsies:
        return None
    return Section("autopsies", "Autopsies", join(_autopsy(view, found) for found in view.autopsies))


def _autopsy(view: RunView, found: Autopsy) -> Html:
    rows = [
        [step.letter, step.title, with_error(step.kl), with_error(step.apart), step.failure or step.note]
        for step in found.steps
    ]
    columns = ["", "step", "KL", "apart", ""]
    items = [
        tag("li", tag("b", "Wrong: " if finding.is_fault else "Note: "), finding.words,
            "" if finding.kl is None else f" ({number(finding.kl)} nats)", ". ", finding.advice)
        for finding in found.findings
    ]  # fmt: skip
    planned = None
    if found.planned_kl is not None:
        bytes_ = size(found.planned_bytes or found.bytes)
        planned = tag(
            "p", f"Our plan from this run: KL {with_error(found.planned_kl)} at {bytes_}, in PyTorch."
        )
    return join([
        tag("h3", f"{Path(found.file).name}, {size(found.bytes)}"), tag("p", tag("b", found.headline)),
        tag("ul", *items) if items else None,
        table(columns, rows, sortable=False, caption=f"Step by step on {found.text}"), planned,
        note("Each step changes one thing. ± is one standard error over windows."),
    ])  # fmt: skip
