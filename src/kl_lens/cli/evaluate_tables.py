"""How `kl-lens evaluate` shows its results."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rich.table import Table

from kl_lens.cli import options
from kl_lens.evaluation import Outcome
from kl_lens.evaluation.agreement import AGREES, AS_DEPLOYED, DISAGREES, IN_FLOAT32, Agreement
from kl_lens.evaluation.tasks import judge, near_chance
from kl_lens.records import Estimate, Score, Subject


def verdicts(outcome: Outcome, limit: float | None) -> list[dict[str, Any]]:
    """For every task score that has a drop: whether the limit holds."""
    if limit is None:
        return []
    return [
        {
            "subject": s.subject.label,
            "task": s.what,
            "max_drop": limit,
            "verdict": judge(s.values["acc_drop"], limit),
        }
        for s in outcome.scores
        if s.kind == "task" and "acc_drop" in s.values
    ]


def labelled(record: Score | Agreement) -> dict[str, Any]:
    """A record as JSON for people: subjects by their labels."""
    labels = {name: value.label for name, value in vars(record).items() if isinstance(value, Subject)}
    return record.to_json() | labels


def print_outcome(outcome: Outcome, limit: float | None, notes: Iterable[str]) -> None:
    console = options.console()
    for kind, show in (("perplexity", _perplexity), ("divergence", _divergence)):
        scores = [score for score in outcome.scores if score.kind == kind]
        for what in dict.fromkeys(score.what for score in scores):
            console.print(show([s for s in scores if s.what == what], outcome.agreements))
            console.print(_protocol(next(s for s in scores if s.what == what)))
    tasks = [score for score in outcome.scores if score.kind == "task"]
    if tasks:
        console.print(_tasks(tasks, limit))
        console.print(
            "Drop: the original's accuracy less this one's, in percentage points, paired by example; "
            "verdicts on acc, by the drop's 95 % interval."
        )
    for found in outcome.agreements:
        if found.verdict == DISAGREES:
            labels = {"cross_entropy": "cross-entropy", "kl_mean": "KL from the original"}
            changes = [f"{labels[name]} by {estimate(c, '.2g')}" for name, c in found.differences.items()]
            console.print(
                f"[bold red]{found.subject.label} DISAGREES with {found.compared_with.label}[/] on the same windows: "
                f"{', '.join(changes)} nats per token. What ships is not what was measured: export it again."
                " (An arithmetic that is not modelled, on a GPU say, can look the same.)",
                soft_wrap=True,
            )
    if any(a.verdict == AS_DEPLOYED for a in outcome.agreements):
        console.print(
            "As deployed: the file holds the weights that were measured; the runtime also rounds activations, and "
            "PyTorch agrees once it rounds them too.",
            soft_wrap=True,
        )
    if any(a.verdict == IN_FLOAT32 for a in outcome.agreements):
        console.print(
            "In float32: the file holds the weights that were measured; the runtime's own arithmetic is coarser, and "
            "agrees with PyTorch when told to compute in float32.",
            soft_wrap=True,
        )
    for note in notes:
        console.print(note, soft_wrap=True)


def _perplexity(scores: list[Score], agreements: list[Agreement]) -> Table:
    table = Table(title=f"Perplexity on {scores[0].what}", title_justify="left")
    table.add_column("model")
    beside = {a.subject: a for a in agreements if a.what == scores[0].what}
    for column in ("token perplexity", "Δ to original", "word perplexity", "Δ to original"):
        table.add_column(column, justify="right")
    if beside:
        table.add_column("same weights in PyTorch", justify="right")
        table.add_column("agrees?")
    values = {score.subject: score.values for score in scores}
    for score in scores:
        row = [
            score.subject.label,
            estimate(score.values["token_perplexity"]),
            estimate(score.values.get("token_perplexity_change"), "+.3f"),
            estimate(score.values["word_perplexity"], ".2f"),
            estimate(score.values.get("word_perplexity_change"), "+.2f"),
        ]
        if beside:
            found = beside.get(score.subject)
            torch = None if found is None else values.get(found.counterpart, {}).get("token_perplexity")
            row += [estimate(torch), "" if found is None else _verdict(found)]
        table.add_row(*row)
    return table


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
    table = Table(title=f"KL from the original on {scores[0].what}, nats per token", title_justify="left")
    table.add_column("model")
    for column in ("mean", "median", "99 %", "99.9 %", "max", "same top token"):
        table.add_column(column, justify="right")
    for score in scores:
        found = score.values
        table.add_row(
            score.subject.label,
            *(
                estimate(found[name], ".4g")
                for name in ("kl_mean", "kl_median", "kl_p99", "kl_p999", "kl_max")
            ),
            estimate(_percent(found["same_top"]), ".2f") + " %",
        )
    return table


def _tasks(scores: list[Score], limit: float | None) -> Table:
    table = Table(title="Tasks", title_justify="left")
    for column in ("task", "model"):
        table.add_column(column)
    for column in ("examples", "acc, %", "acc_norm, %", "drop of acc", "drop of acc_norm"):
        table.add_column(column, justify="right")
    if limit is not None:
        table.add_column(f"≤ {100 * limit:g} points?")
    table.add_column("note")
    for score in scores:
        found = {name: _percent(value) for name, value in score.values.items()}
        row = [
            score.what,
            score.subject.label,
            str(score.tokens),
            *(estimate(found.get(name), ".2f") for name in ("acc", "acc_norm")),
            *(estimate(found.get(f"{name}_drop"), "+.2f") for name in ("acc", "acc_norm")),
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
    return Estimate(100 * value.value, 100 * value.standard_error)
