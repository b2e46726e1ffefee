"""`kl-lens evaluate`: scores, and whether the files agree with PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from kl_lens.cli.console import console, new_table
from kl_lens.evaluation.agreement import AGREES, AS_DEPLOYED, DISAGREES, IN_FLOAT32, Agreement
from kl_lens.evaluation.tasks import judge, near_chance
from kl_lens.reporting.names import subject_title
from kl_lens.run.positions import curve_of, shown_bins
from kl_lens.run.records import Estimate, Score, Subject
from kl_lens.study.evaluate import EvaluateResult


def as_json(result: EvaluateResult) -> dict[str, Any]:
    return {
        "scores": [_labelled(score) for score in result.outcome.scores],
        "agreements": [_labelled(agreement) for agreement in result.outcome.agreements],
        "verdicts": result.verdicts,
        "failures": result.failures,
        "notes": result.notes,
        "files": [str(path) for path in result.written],
    }


def _labelled(record: Score | Agreement) -> dict[str, Any]:
    """A record as JSON for people: subjects by their labels."""
    labels = {name: value.label for name, value in vars(record).items() if isinstance(value, Subject)}
    return record.to_json() | labels


def show(result: EvaluateResult) -> None:
    outcome, limit, out = result.outcome, result.max_drop, console()
    for kind, table_of in (("perplexity", _likelihood), ("divergence", _divergence)):
        scores = [score for score in outcome.scores if score.kind == kind]
        for what in dict.fromkeys(score.what for score in scores):
            out.print(table_of([s for s in scores if s.what == what], outcome.agreements))
            out.print(_protocol(next(s for s in scores if s.what == what)))
    for what in dict.fromkeys(score.what for score in outcome.scores if score.kind == "positions"):
        shown = [s for s in outcome.scores if s.kind == "positions" and s.what == what]
        out.print(_positions(shown))
        out.print(_protocol(shown[0]))
    tasks = [score for score in outcome.scores if score.kind == "task"]
    if tasks:
        out.print(_tasks(tasks, limit))
        out.print(
            "Drop: the original's accuracy minus this one's, in percentage points, paired by example; verdicts by the "
            "95 % interval of the drop of acc."
        )
    for agreement in outcome.agreements:
        if agreement.verdict == DISAGREES:
            labels = {"cross_entropy": "cross-entropy", "kl_mean": "KL from the original"}
            changes = [f"{labels[name]} by {estimate(c, '.2g')}" for name, c in agreement.differences.items()]
            one, other = subject_title(agreement.subject), subject_title(agreement.compared_with)
            out.print(
                f"[bold red]{one} DISAGREES with {other}[/] on the same windows: {', '.join(changes)} nats per token. "
                "PyTorch computes what transformers' own code computes, so the file is not what was measured: "
                "export it again. "
                "(Arithmetic that is not modelled, for example on a GPU, can look the same.)",
                soft_wrap=True,
            )
    if any(a.verdict == AS_DEPLOYED for a in outcome.agreements):
        out.print(
            "As deployed: the file has the weights that were measured. The runtime also rounds activations; PyTorch "
            "agrees when it rounds them too.",
            soft_wrap=True,
        )
    if any(a.verdict == IN_FLOAT32 for a in outcome.agreements):
        out.print(
            "In float32: the file has the weights that were measured. The runtime's default arithmetic is coarser; in "
            "float32 it agrees with PyTorch.",
            soft_wrap=True,
        )
    for note in [*result.notes, *(f"Written: {path}" for path in result.written)]:
        out.print(note, soft_wrap=True)


# Task → title, and for each column its name, its value, a factor and the decimals.
_TEXT_COLUMNS = (
    ("token perplexity", "token_perplexity", 1, 3),
    ("word perplexity", "word_perplexity", 1, 2),
)
_IMAGE_COLUMNS = (("top-1, %", "top1", 100, 2), ("cross-entropy, nats", "cross_entropy", 1, 4))
_LIKELIHOODS = {"text": ("Perplexity", _TEXT_COLUMNS), "image": ("Classification", _IMAGE_COLUMNS)}


def _likelihood(scores: list[Score], agreements: list[Agreement]) -> Table:
    beside = {a.subject: a for a in agreements if a.what == scores[0].what}
    title, columns = _LIKELIHOODS[_task(scores[0])]
    numbers = [title for name, *_ in columns for title in (name, "Δ to original")]
    agrees = ("agrees with PyTorch?",) if beside else ()
    table = new_table(f"{title} on {scores[0].what}", ("model",), numbers, agrees)

    def shown(of: Mapping[str, Estimate], name: str, factor: int, spec: str) -> str:
        return estimate(_times(of[name], factor), spec) if name in of else ""

    for score in scores:
        row = [subject_title(score.subject)]
        for _, name, factor, decimals in columns:
            row.append(shown(score.values, name, factor, f".{decimals}f"))
            row.append(shown(score.values, f"{name}_change", factor, f"+.{decimals}f"))
        if beside:
            row.append(_verdict(beside[score.subject]) if score.subject in beside else "")
        table.add_row(*row)
    return table


def _task(score: Score) -> str:
    return str(score.protocol.get("task", "text"))


def _verdict(agreement: Agreement) -> str:
    change = agreement.differences["cross_entropy"]
    words = {
        AGREES: "yes",
        AS_DEPLOYED: "yes, as deployed",
        IN_FLOAT32: "yes, in float32",
        DISAGREES: "[bold red]NO[/]",
    }
    return f"{words[agreement.verdict]} ({change.value:+.1e} nats)"


def _divergence(scores: list[Score], agreements: list[Agreement]) -> Table:
    row, best = {"text": ("token", "token"), "image": ("image", "class")}[_task(scores[0])]
    title = f"KL from the original on {scores[0].what}, nats per {row}"
    table = new_table(title, ("model",), ("mean", "median", "99 %", "99.9 %", "max", f"same top {best}"))
    for score in scores:
        values = score.values
        table.add_row(
            subject_title(score.subject),
            *(
                estimate(values[name], ".4g")
                for name in ("kl_mean", "kl_median", "kl_p99", "kl_p999", "kl_max")
            ),
            estimate(_percent(values["same_top"]), ".2f") + " %",
        )
    return table


def _positions(scores: list[Score]) -> Table:
    """The first bin, the last, and some between."""
    found = [(s, c) for s in scores for c in (curve_of(s, "kl") or curve_of(s, "cross_entropy"),) if c]
    some = shown_bins(len(found[0][1].starts))
    numbers = [f"from {found[0][1].starts[index]:,}" for index in some]
    title = f"KL from the original by position on {scores[0].what}, nats per token"
    table = new_table(title, ("model",), (*numbers, "slope per 1,000 tokens"), ("trend",))
    for score, curve in found:
        name = subject_title(score.subject)
        name += "" if curve_of(score, "kl") else ": cross-entropy"
        cells = [f"{curve.means[index].value:.4g}" for index in some]
        table.add_row(name, *cells, estimate(curve.slope, "+.2g"), curve.trend)
    return table


def _tasks(scores: list[Score], limit: float | None) -> Table:
    numbers = ("examples", "acc, %", "acc_norm, %", "drop of acc", "drop of acc_norm")
    remarks = ("note",) if limit is None else (f"≤ {100 * limit:g} points?", "note")
    table = new_table("Tasks", ("task", "model"), numbers, remarks)
    for score in scores:
        percents = {name: _percent(value) for name, value in score.values.items()}
        row = [
            score.what,
            subject_title(score.subject),
            str(score.tokens),
            *(estimate(percents.get(name), ".2f") for name in ("acc", "acc_norm")),
            *(estimate(percents.get(f"{name}_drop"), "+.2f") for name in ("acc", "acc_norm")),
        ]
        if limit is not None:
            row.append(judge(score.values["acc_drop"], limit) if "acc_drop" in score.values else "")
        table.add_row(*row, _task_note(score))
    return table


def _task_note(score: Score) -> str:
    parts = []
    chance = score.protocol.get("chance")
    near = [
        name
        for name in ("acc", "acc_norm")
        if name in score.values and near_chance(score.values[name], chance)
    ]
    if near and chance is not None:
        parts.append(f"{' and '.join(near)} near chance ({100 * chance:.0f} %)")
    if "last_word_perplexity" in score.values:
        parts.append(f"last-word perplexity {estimate(score.values['last_word_perplexity'], '.4g')}")
    others = {"acc", "acc_norm", "last_word_perplexity"}
    for name, value in score.values.items():
        if name not in others and not name.endswith("_drop"):
            parts.append(f"{name} {estimate(value, '.4g')}")
    return ", ".join(parts)


def _protocol(score: Score) -> str:
    p = score.protocol
    if _task(score) == "image":
        what = f"{p['windows']} windows of {p['window']} images"
        return f"{what}. ± is one standard error over windows; Δ is paired by window."
    overlap = "" if p["stride"] == p["window"] else f", the last {p['stride']} tokens of each scored"
    return (
        f"{p['windows']} windows of {p['window']} tokens{overlap}; {p['tokens']:,} tokens, {p['words']:,} words. "
        f"± is one standard error over windows; Δ is paired by window."
    )


def estimate(value: Estimate | None, spec: str = ".3f") -> str:
    if value is None:
        return ""
    shown = format(value.value, spec)
    if math.isnan(value.standard_error):
        return shown
    return f"{shown} ± {format(value.standard_error, spec.replace('+', '').replace('.4g', '.2g'))}"


def _percent(value: Estimate) -> Estimate:
    return _times(value, 100)


def _times(value: Estimate, factor: int) -> Estimate:
    return Estimate(factor * value.value, factor * value.standard_error)
