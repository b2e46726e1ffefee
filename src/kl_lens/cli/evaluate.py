"""`kl-lens evaluate`: scores, and whether the files agree with PyTorch."""

from __future__ import annotations

from typing import Any

from kl_lens.cli.console import Row, console, table
from kl_lens.evaluation.agreement import AGREES, AS_DEPLOYED, DISAGREES, IN_FLOAT32, Agreement
from kl_lens.evaluation.tasks import judge, near_chance
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import fixed_with_error, number, with_error
from kl_lens.run.positions import curve_of, shown_bins
from kl_lens.run.records import Estimate, Score, Subject
from kl_lens.study.evaluate import EvaluateResult

# Task → title, and for each column its name, its value, a factor and the decimals.
_LIKELIHOODS = {
    "text": (
        "Perplexity",
        (("token perplexity", "token_perplexity", 1, 3), ("word perplexity", "word_perplexity", 1, 2)),
    ),
    "image": (
        "Classification",
        (("top-1, %", "top1", 100, 2), ("cross-entropy, nats", "cross_entropy", 1, 4)),
    ),
}
_VERDICTS = {
    AGREES: "yes",
    AS_DEPLOYED: "yes, as deployed",
    IN_FLOAT32: "yes, in float32",
    DISAGREES: "[bold red]NO[/]",
}
_REMARKS = {
    AS_DEPLOYED: "As deployed: the file has the weights that were measured. The runtime also rounds activations; "
    "PyTorch agrees when it rounds them too.",
    IN_FLOAT32: "In float32: the file has the weights that were measured. The runtime's default arithmetic is coarser; "
    "in float32 it agrees with PyTorch.",
}


def as_json(result: EvaluateResult) -> dict[str, Any]:
    return {
        "scores": [_labelled(score) for score in result.outcome.scores],
        "agreements": [_labelled(agreement) for agreement in result.outcome.agreements],
        "verdicts": result.verdicts,
        "failures": result.failures,
        "notes": result.notes,
        "files": result.written,
    }


def _labelled(record: Score | Agreement) -> dict[str, Any]:
    """A record as JSON for people: subjects by their labels."""
    labels = {name: value.label for name, value in vars(record).items() if isinstance(value, Subject)}
    return record.to_json() | labels


def show(result: EvaluateResult) -> None:
    agreements, out = result.outcome.agreements, console()
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in result.outcome.scores:
        groups.setdefault((score.kind, score.what if score.kind != "task" else ""), []).append(score)
    for kind, show_scores in (
        ("perplexity", _likelihood),
        ("divergence", _divergence),
        ("positions", _positions),
    ):
        for scores in (scores for (each, _), scores in groups.items() if each == kind):
            title, rows = show_scores(scores, agreements)
            out.print(table(title, rows))
            out.print(_protocol(scores[0]))
    if tasks := groups.get(("task", "")):
        out.print(table("Tasks", [_task_row(score, result.max_drop) for score in tasks]))
        out.print(
            "Drop: the original's accuracy minus this one's, in percentage points, paired by example; verdicts by the "
            "95 % interval of the drop of acc."
        )
    for agreement in agreements:
        if agreement.verdict == DISAGREES:
            labels = {"cross_entropy": "cross-entropy", "kl_mean": "KL from the original"}
            changes = [f"{labels[name]} by {with_error(c)}" for name, c in agreement.differences.items()]
            one, other = subject_title(agreement.subject), subject_title(agreement.compared_with)
            out.print(
                f"[bold red]{one} DISAGREES with {other}[/] on the same windows: {', '.join(changes)} nats per token. "
                "PyTorch computes what transformers' own code computes, so the file is not what was measured: "
                "export it again. "
                "(Arithmetic that is not modelled, for example on a GPU, can look the same.)",
                soft_wrap=True,
            )
    remarks = [text for verdict, text in _REMARKS.items() if verdict in {a.verdict for a in agreements}]
    for note in [*remarks, *result.notes, *(f"Written: {path}" for path in result.written)]:
        out.print(note, soft_wrap=True)


def _task(score: Score) -> str:
    return str(score.protocol.get("task", "text"))


def _cell(score: Score, name: str, decimals: int, factor: int = 1, *, signed: bool = False) -> str:
    value = score.values.get(name)
    if value is None:
        return ""
    sign = "+" if signed and value.value >= 0 else ""
    return sign + fixed_with_error(Estimate(factor * value.value, factor * value.standard_error), decimals)


def _likelihood(scores: list[Score], agreements: list[Agreement]) -> tuple[str, list[Row]]:
    beside = {a.subject: a for a in agreements if a.what == scores[0].what}
    title, columns = _LIKELIHOODS[_task(scores[0])]
    rows = []
    for score in scores:
        row = {"model": subject_title(score.subject)}
        for heading, name, factor, decimals in columns:
            row[heading] = _cell(score, name, decimals, factor)
            row[f"Δ {heading}"] = _cell(score, f"{name}_change", decimals, factor, signed=True)
        if agreement := beside.get(score.subject):
            change = agreement.differences["cross_entropy"].value
            row["agrees with PyTorch?"] = f"{_VERDICTS[agreement.verdict]} ({change:+.1e} nats)"
        rows.append(row)
    return f"{title} on {scores[0].what}", rows


def _divergence(scores: list[Score], _: list[Agreement]) -> tuple[str, list[Row]]:
    row, best = {"text": ("token", "token"), "image": ("image", "class")}[_task(scores[0])]
    names = {"mean": "kl_mean", "median": "kl_median", "99 %": "kl_p99", "99.9 %": "kl_p999", "max": "kl_max"}
    rows = [
        {"model": subject_title(score.subject)}
        | {heading: with_error(score.values[name]) for heading, name in names.items()}
        | {f"same top {best}, %": _cell(score, "same_top", 2, 100)}
        for score in scores
    ]
    return f"KL from the original on {scores[0].what}, nats per {row}", rows


def _positions(scores: list[Score], _: list[Agreement]) -> tuple[str, list[Row]]:
    """The first bin, the last, and some between."""
    rows = []
    for score in scores:
        if curve := curve_of(score, "kl") or curve_of(score, "cross_entropy"):
            name = subject_title(score.subject) + ("" if curve_of(score, "kl") else ": cross-entropy")
            some = shown_bins(len(curve.starts))
            row = {"model": name} | {f"from {curve.starts[i]:,}": number(curve.means[i].value) for i in some}
            rows.append(row | {"slope per 1,000 tokens": with_error(curve.slope), "trend": curve.trend})
    return f"KL from the original by position on {scores[0].what}, nats per token", rows


def _task_row(score: Score, limit: float | None) -> Row:
    row = {"task": score.what, "model": subject_title(score.subject), "examples": str(score.tokens)}
    row |= {f"{name}, %": _cell(score, name, 2, 100) for name in ("acc", "acc_norm")}
    row |= {
        f"drop of {name}": _cell(score, f"{name}_drop", 2, 100, signed=True) for name in ("acc", "acc_norm")
    }
    if limit is not None and "acc_drop" in score.values:
        row[f"≤ {100 * limit:g} points?"] = judge(score.values["acc_drop"], limit)
    notes = []
    chance = score.protocol.get("chance")
    near = [n for n in ("acc", "acc_norm") if n in score.values and near_chance(score.values[n], chance)]
    if near and chance is not None:
        notes.append(f"{' and '.join(near)} near chance ({100 * chance:.0f} %)")
    others = [n for n in score.values if n not in ("acc", "acc_norm") and not n.endswith("_drop")]
    notes += [f"{name.replace('_', ' ')} {with_error(score.values[name])}" for name in others]
    return row | {"note": ", ".join(notes)}


def _protocol(score: Score) -> str:
    p = score.protocol
    errors = "± is one standard error over windows; Δ is the change from the original, paired by window."
    if _task(score) == "image":
        return f"{p['windows']} windows of {p['window']} images. {errors}"
    overlap = "" if p["stride"] == p["window"] else f", the last {p['stride']} tokens of each scored"
    text = f"{p['tokens']:,} tokens, {p['words']:,} words"
    return f"{p['windows']} windows of {p['window']} tokens{overlap}; {text}. {errors}"
