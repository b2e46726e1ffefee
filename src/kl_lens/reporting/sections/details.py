"""What autopsies found; every layer, task results, what the models write; and what a sceptic needs to get the same
numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

from kl_lens.base.version import __version__
from kl_lens.reporting import answer
from kl_lens.reporting.data import KL, RunView, runtime_of
from kl_lens.reporting.markup import Cell, Html, Section, details, join, note, table, tag
from kl_lens.reporting.names import (
    fixed_with_error,
    number,
    size,
    subject_title,
    with_error,
)
from kl_lens.run.autopsies import Autopsy
from kl_lens.run.records import ORIGINAL, PREDICTED, Plan, SensitivityTable
from kl_lens.weights.recipes import FP16

_TEXT_FIELDS = (
    "source",
    "split",
    "order",
    "windows",
    "length",
    "stride",
    "seed",
    "fingerprint",
)


_USES = {"task": "task", "positions": "loss along the text"}


def section(view: RunView) -> Section | None:
    plans = {plan.target: plan for plan in answer.recommendations(view)}
    parts: list[Html | None] = []
    tables = [(space.target, space.title, space.table) for space in view.spaces.values()]
    if not tables and view.table:
        tables = [(None, "as published", view.table)]
    for index, (target, title, of) in enumerate(tables):
        if of.measurements:
            parts.append(
                details(
                    f"Every layer, {title}", _layers(view, of, plans.get(target), index)
                )
            )
    parts += [_tasks(view), _samples(view)]
    return Section("details", "Details", join(parts)) if any(parts) else None


def _layers(view: RunView, of: SensitivityTable, plan: Plan | None, index: int) -> Html:
    """One row for each component, KL in one column for each recipe; what was predicted has a sign before it."""
    measured = {(m.component, m.format): m for m in of.measurements if KL in m.metrics}
    formats = list(dict.fromkeys(name for _, name in measured))
    shown = [
        c for c in of.components if any((c.name, name) in measured for name in formats)
    ]
    columns = ["component", "in the plan", "weights", *formats]
    stored = {} if plan is None else view.cost(plan).stored

    def kl(name: str, format_name: str) -> object:
        m = measured.get((name, format_name))
        if m is None:
            return "–"
        value = m.metrics[KL]
        predicted = m.compute_dtype == PREDICTED
        return Cell(
            f"≈ {number(value.value, 2)}" if predicted else with_error(value), value.value
        )

    rows = [
        [
            c.name,
            stored.get(c.name, FP16 if plan else "–"),
            Cell(f"{c.parameters:,}", c.parameters),
            *(kl(c.name, name) for name in formats),
        ]
        for c in shown
    ]
    identifier = f"layers-{index}" if index else "layers"
    caption = f"KL of every component in every recipe, {view.nats} (≈: predicted)"
    return table(columns, rows, identifier=identifier, caption=caption, tall=True)


def _tasks(view: RunView) -> Html | None:
    scores = [s for s in view.scores if s.kind == "task"]
    if not scores:
        return None
    latest = {(s.subject, s.what): s for s in scores}
    names = list(dict.fromkeys((s.what, metric) for s in scores for metric in s.values))
    subjects = sorted(
        dict.fromkeys(s.subject for s in scores), key=lambda s: s.what != ORIGINAL
    )
    rows = []
    for subject in subjects:
        results = {
            task: latest[subject, task].values
            for task, _ in names
            if (subject, task) in latest
        }
        cells = [
            fixed_with_error(results.get(task, {}).get(metric), 3)
            for task, metric in names
        ]
        rows.append([subject_title(subject), *cells])
    columns = ["file", *(f"{task}: {metric}" for task, metric in names)]
    examples = ", ".join(
        f"{task} {n:,}" for task, n in {s.what: s.tokens for s in scores}.items()
    )
    return join(
        [
            table(columns, rows, caption="Task results"),
            note(f"± one standard error; examples: {examples}."),
        ]
    )


def _samples(view: RunView) -> Html | None:
    if not view.generations:
        return None
    blocks: dict[str, list[Html]] = {}
    for sample in sorted(view.generations, key=lambda g: g.subject.what != ORIGINAL):
        quote = tag("blockquote", tag("b", sample.prompt), sample.text)
        label = tag("span", subject_title(sample.subject), class_="what")
        blocks.setdefault(sample.prompt, []).append(tag("div", label, quote))
    words = "The prompt in bold, then what the model wrote. Two good models may differ after one close call."
    shown = [tag("div", *samples, class_="samples") for samples in blocks.values()]
    return join([tag("h3", "Samples of text"), tag("p", words), *shown])


def autopsies(view: RunView) -> Section | None:
    if not view.autopsies:
        return None
    return Section(
        "autopsies",
        "Autopsies",
        join(_autopsy(view, autopsy) for autopsy in view.autopsies),
    )


def _autopsy(view: RunView, autopsy: Autopsy) -> Html:
    rows = [
        [
            step.letter,
            step.title,
            with_error(step.kl),
            with_error(step.apart),
            step.failure or step.note,
        ]
        for step in autopsy.steps
    ]
    columns = ["", "step", "KL", "apart", ""]
    items = [
        tag(
            "li",
            tag("b", "Wrong: " if finding.is_fault else "Note: "),
            finding.words,
            "" if finding.kl is None else f" ({number(finding.kl)} nats)",
            ". ",
            finding.advice,
        )
        for finding in autopsy.findings
    ]
    planned = None
    if autopsy.planned_kl is not None:
        bytes_ = size(autopsy.planned_bytes or autopsy.bytes)
        planned = tag(
            "p",
            f"Our plan from this run: KL {with_error(autopsy.planned_kl)} at {bytes_}, in PyTorch.",
        )
    return join(
        [
            tag("h3", f"{Path(autopsy.file).name}, {size(autopsy.bytes)}"),
            tag("p", tag("b", autopsy.headline)),
            tag("ul", *items) if items else None,
            table(
                columns, rows, sortable=False, caption=f"Step by step on {autopsy.text}"
            ),
            planned,
            note("Each step changes one thing. ± is one standard error over windows."),
        ]
    )


# -- where the numbers come from -----------------------------------------------------------------------------


def provenance(view: RunView) -> Section:
    parts = [
        _pairs(_model(view)),
        details("Texts, splits and seeds", _texts(view)),
        details("Commands", _commands(view)),
        details("Versions and machine", _pairs(_machine(view))),
        note(f"Report written by kl-lens {__version__}."),
    ]
    return Section("provenance", "Where the numbers come from", join(parts))


def shown_place(value: object) -> str:
    """A source as a reader needs it: hub ids and names whole, of a place on somebody's disk the last part."""
    text = str(value)
    return PurePath(text).name if PurePath(text).is_absolute() else text


def _model(view: RunView) -> dict[str, object]:
    identity = view.identity
    candidates = [c for c in view.components if c.quantizable]
    blocks = 1 + max(
        (c.block for c in view.components if c.block is not None), default=-1
    )
    weights = f"{sum(c.parameters for c in view.components):,} in {blocks} blocks; "
    weights += f"{len(candidates)} components can be quantized"
    return {
        "model": view.model,
        "compared with": identity.get("original"),
        "architecture": identity.get("model_type"),
        "source": shown_place(identity["source"]) if identity.get("source") else None,
        "fingerprint of the weights": identity.get("model_fingerprint"),
        "weights": weights if view.components else None,
        "measured in": identity.get("dtype"),
        "precision of products": identity.get("precision"),
        "version of the metrics": identity.get("metrics_version"),
        "noise floor": None
        if view.noise is None
        else f"{view.noise:.3g} {view.nats} (the original against itself)",
        "computed by transformers' own code": view.kernels,
    }


def _pairs(pairs: dict[str, object]) -> Html:
    present = {key: value for key, value in pairs.items() if value not in (None, "")}
    return tag(
        "dl",
        *(join([tag("dt", key), tag("dd", value)]) for key, value in present.items()),
    )


def _texts(view: RunView) -> Html:
    rows = []
    for use, text in _every_text(view):
        values = ["–" if text.get(name) is None else text[name] for name in _TEXT_FIELDS]
        begins = "–" if text.get("bos") is None else f"BOS (token {text['bos']})"
        row = [use, shown_place(values[0]), *values[1:], begins]
        if row not in rows:
            rows.append(row)
    columns = ["used for", *_TEXT_FIELDS, "windows begin with"]
    whole = table(columns, rows, sortable=False, caption="Texts, splits and seeds")
    lost = dict.fromkeys(text["lost"] for text in view.texts.values() if "lost" in text)
    words = (
        "A run whose held-out or test windows overlap those of calibration is refused."
    )
    return join([whole, *map(note, lost), note(words)])


def _every_text(view: RunView) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What each text was used for, and what is known of it."""
    yield from view.texts.items()
    for plan in view.plans:
        if plan.measured:
            source, _, split = plan.measured.text.partition(":")
            about = {"source": source, "split": split, "windows": plan.measured.windows}
            yield "judging plans", about
    for score in view.scores:
        protocol = score.protocol
        names = {
            "source": protocol.get("dataset", score.what),
            "length": protocol.get("window"),
        }
        yield _USES.get(score.kind, "judging files"), {**protocol, **names}
    for autopsy in view.autopsies:
        yield "autopsy", {"source": autopsy.text}


def _commands(view: RunView) -> Html:
    lines: dict[str, list[float]] = {}
    for command in view.commands:
        lines.setdefault(command.line, []).append(command.started)
    items = []
    for line, times in lines.items():
        date = datetime.fromtimestamp(times[0], UTC).strftime(" %Y-%m-%d %H:%M UTC")
        date += f", {len(times)} times" if len(times) > 1 else ""
        items.append(tag("li", tag("code", line), tag("span", date, class_="quiet")))
    return tag("ol", *items, class_="commands") if items else note("None were noted.")


def _machine(view: RunView) -> dict[str, object]:
    """Each version and machine once; more than one where the run was continued elsewhere or later."""
    facts: dict[str, dict[str, None]] = {}
    for command in view.commands:
        if versions := command.provenance.get("versions"):
            packages = ", ".join(
                f"{package} {version}" for package, version in versions.items()
            )
            facts.setdefault("packages", {})[packages] = None
        for name in ("machine", "system"):
            if name in command.provenance:
                facts.setdefault(name, {})[str(command.provenance[name])] = None
    used = [(s.subject, s.runtime) for s in view.scores] + [
        (p.subject, p.runtime) for p in view.profiles
    ]
    for subject, runtime in used:
        if "version" in runtime:
            facts.setdefault(runtime_of(subject), {})[str(runtime["version"])] = None
    return {name: " / ".join(values) for name, values in facts.items()}
