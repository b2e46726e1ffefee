"""What a sceptic needs to get the same numbers."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import PurePath

from kl_lens.base.version import __version__
from kl_lens.reporting.data import RunView, runtime_of
from kl_lens.reporting.markup import Html, Section, details, join, note, table, tag
from kl_lens.reporting.names import runtime_title
from kl_lens.reporting.numbers import count

_TEXT_FIELDS = ("source", "split", "order", "windows", "length", "stride", "seed")


def section(view: RunView) -> Section:
    parts = [
        _pairs(_model(view)),
        details("Texts, splits and seeds", _texts(view)),
        details("Commands, as they were typed", _commands(view)),
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
    blocks = 1 + max((c.block for c in view.components if c.block is not None), default=-1)
    weights = f"{sum(c.parameters for c in view.components):,} in {blocks} blocks; "
    weights += f"{len(candidates)} components can be quantized"
    # `as gguf computes` → `as llama.cpp computes`
    measured = [" ".join(map(runtime_title, words.split())) for words in view.measured]
    return {
        "model": view.model,
        "architecture": identity.get("model_type"),
        "source": shown_place(identity["source"]) if identity.get("source") else None,
        "fingerprint of the weights": identity.get("model_fingerprint"),
        "weights": weights if view.components else None,
        "measured in": identity.get("dtype"),
        "precision of products": identity.get("precision"),
        "what is quantized": ", ".join(measured),
        "version of the metrics": identity.get("metrics_version"),
        "noise floor": view.noise and f"{view.noise:.3g} {view.nats} (the original against itself)",
        "computed by transformers' own code": view.kernels,
    }


def _pairs(pairs: dict[str, object]) -> Html:
    known = {key: value for key, value in pairs.items() if value not in (None, "")}
    return tag("dl", *(join([tag("dt", key), tag("dd", value)]) for key, value in known.items()))


def _texts(view: RunView) -> Html:
    if not view.texts:
        return note("No text: the measurements were imported.")
    rows, documents = [], []
    for role, text in view.texts.items():
        values = ["–" if text.get(name) is None else text[name] for name in _TEXT_FIELDS]
        rows.append([role, shown_place(values[0]), *values[1:]])
        shown = [(f"{role}: fingerprint ", text["fingerprint"])] if "fingerprint" in text else []
        shown += [
            (f"{role}: {shown_place(d.get('name'))} ", d.get("sha256", ""))
            for d in text.get("documents", [])[:50]
        ]
        documents += [tag("li", words, tag("code", digest)) for words, digest in shown]
    refused = "A run whose held-out or test windows overlap those of calibration is refused."
    return join(
        [
            table(["used for", *_TEXT_FIELDS], rows, sortable=False, caption="Texts, splits and seeds"),
            note(refused),
            tag("ul", *documents, class_="plain"),
        ]
    )


def _commands(view: RunView) -> Html:
    lines: dict[str, list[float]] = {}
    for command in view.commands:
        lines.setdefault(command.line, []).append(command.started)
    items = []
    for line, times in lines.items():
        when = datetime.fromtimestamp(times[0], UTC).strftime(" %Y-%m-%d %H:%M UTC")
        when += f", {len(times)} times" if len(times) > 1 else ""
        items.append(tag("li", tag("code", line), tag("span", when, class_="quiet")))
    return tag("ol", *items, class_="commands") if items else note("None were noted.")


def _machine(view: RunView) -> dict[str, object]:
    """Each version and machine once; more than one where the run was continued elsewhere or later."""
    facts: dict[str, dict[str, None]] = {}
    for command in view.commands:
        if versions := command.provenance.get("versions"):
            packages = ", ".join(f"{package} {version}" for package, version in versions.items())
            facts.setdefault("packages", {})[packages] = None
        for name in ("machine", "system"):
            if name in command.provenance:
                facts.setdefault(name, {})[str(command.provenance[name])] = None
    for score in view.scores:
        if "found" in score.runtime:  # one of several libraries
            facts.setdefault(f"judged, {runtime_of(score.subject)}", {})[str(score.runtime["version"])] = None
    for profile in view.profiles:
        plain = [
            f"{key.replace('_', ' ')} {value}" for key, value in profile.runtime.items() if _is_plain(value)
        ]
        words = "; ".join([f"{profile.device}, {count(profile.threads, 'thread')}", *plain])
        facts.setdefault(f"timed, {runtime_of(profile.subject)}", {})[words] = None
    return {name: " / ".join(values) for name, values in facts.items()}


def _is_plain(value: object) -> bool:
    """Paths of libraries stay out."""
    return isinstance(value, int | float) or (isinstance(value, str) and len(value) < 80 and "/" not in value)
