"""What a sceptic needs to get the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from kl_lens.base.version import __version__
from kl_lens.reporting.data import RunView, runtime_of
from kl_lens.reporting.markup import Html, join, tag
from kl_lens.reporting.names import runtime_title
from kl_lens.reporting.numbers import count
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.words import details, heading, note
from kl_lens.reporting.tables import Column, table, text_column
from kl_lens.run.records import Profile

TITLE = "Where the numbers come from"
_TEXT_FIELDS = ("source", "split", "order", "windows", "length", "stride", "seed", "fingerprint")


def section(view: RunView) -> Section:
    parts = [
        _pairs(_model(view)),
        _texts(view),
        heading("Commands, as they were typed"),
        _commands(view),
        heading("Versions and machine"),
        _machine(view),
        note(f"Report written by kl-lens {__version__}."),
    ]
    return Section("provenance", TITLE, join(parts))


def shown_place(value: object) -> str:
    """A source as a reader needs it: hub ids and names whole, of a place on somebody's disk the last part."""
    text = str(value)
    return PurePath(text).name if PurePath(text).is_absolute() else text


def _model(view: RunView) -> dict[str, object]:
    identity = view.identity
    candidates = [c for c in view.components if c.quantizable]
    blocks = 1 + max((c.block for c in view.components if c.block is not None), default=-1)
    weights = f"{sum(c.parameters for c in view.components):,} in {blocks} blocks; "
    weights += f"{len(candidates)} components can be quantized"
    noise = None if view.noise is None else f"{view.noise:.3g} nats per token (the original against itself)"
    return {
        "model": view.model,
        "architecture": identity.get("model_type"),
        "source": shown_place(identity["source"]) if identity.get("source") else None,
        "fingerprint of the weights": identity.get("model_fingerprint"),
        "weights": weights if view.components else None,
        "measured in": identity.get("dtype"),
        "precision of products": identity.get("precision"),
        "what is quantized": ", ".join(map(_kind, view.measured)),
        "version of the metrics": identity.get("metrics_version"),
        "noise floor": noise,
        "computed by transformers' own code": view.kernels,
    }


def _kind(measured: str) -> str:
    """`as gguf computes` → `as llama.cpp computes`."""
    return " ".join(runtime_title(word) for word in measured.split())


def _pairs(pairs: dict[str, object]) -> Html:
    rows = [
        join([tag("dt", key), tag("dd", value)]) for key, value in pairs.items() if value not in (None, "")
    ]
    return tag("dl", *rows)


def _texts(view: RunView) -> Html:
    if not view.texts:
        return note("No text: the measurements were imported.")
    columns = [text_column("used for")] + [
        Column(name, number=name in ("windows", "length", "stride", "seed")) for name in _TEXT_FIELDS
    ]
    rows = [
        [role, *(_text_value(name, text.get(name)) for name in _TEXT_FIELDS)]
        for role, text in view.texts.items()
    ]
    whole = [
        tag("li", f"{role}: fingerprint ", tag("code", text["fingerprint"]))
        for role, text in view.texts.items()
        if "fingerprint" in text
    ]
    documents = whole + [
        tag("li", f"{role}: {shown_place(d.get('name'))} ", tag("code", str(d.get("sha256", ""))))
        for role, text in view.texts.items()
        for d in text.get("documents", [])[:50]
    ]
    return join(
        [
            table(columns, rows, sortable=False, caption="Texts, splits and seeds"),
            note("Held-out text is checked against the calibration text; a run that overlaps is refused."),
            details("Fingerprints and documents", tag("ul", *documents, class_="plain"))
            if documents
            else None,
        ]
    )


def _text_value(name: str, value: Any) -> object:
    if value is None:
        return "–"
    if name == "fingerprint":
        return f"{str(value)[:16]}…" if len(str(value)) > 17 else value
    return shown_place(value) if name == "source" else value


def _commands(view: RunView) -> Html:
    if not view.commands:
        return note("None were noted.")
    lines: dict[str, list[float]] = {}
    for command in view.commands:
        lines.setdefault(command.line, []).append(command.started)
    items = []
    for line, times in lines.items():
        when = f" {_day(times[0])}" + (f", {len(times)} times" if len(times) > 1 else "")
        items.append(tag("li", tag("code", line), tag("span", when, class_="quiet")))
    return tag("ol", *items, class_="commands")


def _day(started: float) -> str:
    return datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _machine(view: RunView) -> Html:
    """Each version and machine once; more than one where the run was continued elsewhere or later."""
    facts: dict[str, list[str]] = {}

    def add(name: str, value: object) -> None:
        text = str(value)
        if text not in facts.setdefault(name, []):
            facts[name].append(text)

    for command in view.commands:
        if versions := command.provenance.get("versions"):
            add("packages", ", ".join(f"{package} {version}" for package, version in versions.items()))
        for name in ("machine", "system"):
            if name in command.provenance:
                add(name, command.provenance[name])
    for score in view.scores:
        if "found" in score.runtime:  # one of several libraries
            add(f"judged, {runtime_of(score.subject)}", score.runtime["version"])
    pairs: dict[str, object] = {name: " / ".join(values) for name, values in facts.items()}
    by_target: dict[str, list[Profile]] = {}
    for profile in view.profiles:
        by_target.setdefault(f"timed, {runtime_of(profile.subject)}", []).append(profile)
    return _pairs(pairs | {name: _runtime(profiles) for name, profiles in by_target.items()})


def _runtime(profiles: Sequence[Profile]) -> str:
    """What the profiles have in common; what sets the files apart, and paths of libraries, stay out."""
    shared = [
        f"{key.replace('_', ' ')} {value}"
        for key, value in profiles[0].runtime.items()
        if _is_plain(value) and all(p.runtime.get(key) == value for p in profiles)
    ]
    devices = dict.fromkeys(f"{p.device}, {count(p.threads, 'thread')}" for p in profiles)
    return "; ".join([" / ".join(devices), *shared])


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and len(value) < 80 and "/" not in value)
