"""What `evaluate`, `benchmark`, `autopsy` and `paper` show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from kl_lens.base.units import human_bytes
from kl_lens.cli.terminal import Bold, Red, Row, Shown, table
from kl_lens.reporting.answer import libraries, unmeasurable
from kl_lens.reporting.names import fixed_with_error, number, subject_title, with_error
from kl_lens.run.positions import curve_of, shown_bins
from kl_lens.run.ratios import ratio_of
from kl_lens.run.records import Estimate, Profile, Record, Score, Subject
from kl_lens.study.autopsy import AutopsyResult
from kl_lens.study.benchmark import Report
from kl_lens.study.compare import CompareResult
from kl_lens.study.evaluate import EvaluateResult
from kl_lens.study.paper import Ranking

# -- evaluate ------------------------------------------------------------------------------------------------

# Task → title, and for each column its name, its value, a factor and the decimals.
_LIKELIHOODS = {
    "text": (
        "Perplexity",
        (
            ("token perplexity", "token_perplexity", 1, 3),
            ("word perplexity", "word_perplexity", 1, 2),
        ),
    ),
    "image": (
        "Classification",
        (("top-1, %", "top1", 100, 2), ("cross-entropy, nats", "cross_entropy", 1, 4)),
    ),
}


def json_evaluate(result: EvaluateResult) -> dict[str, Any]:
    return {
        "scores": [_labelled(score) for score in result.scores],
        "agreements": [_labelled(agreement) for agreement in result.agreements],
        "verdicts": result.verdicts,
        "failures": result.failures,
        "notes": result.notes,
    }


# Of a file side by side with others: its name in JSON → where it is.
_FILE = {"file": "name", "maker": "maker", "runtime": "runtime", "bytes": "bytes"}


def _labelled(record: Record) -> dict[str, Any]:
    """A record as JSON for people: subjects by their labels."""
    labels = {
        name: value.label
        for name, value in vars(record).items()
        if isinstance(value, Subject)
    }
    return record.to_json() | labels


def show_evaluate(result: EvaluateResult) -> Shown:
    scores = result.scores
    shows = {
        "perplexity": _likelihood,
        "divergence": _divergence,
        "positions": _positions,
    }
    for kind, show in shows.items():
        for text in dict.fromkeys(score.what for score in scores if score.kind == kind):
            group = [
                score for score in scores if (score.kind, score.what) == (kind, text)
            ]
            yield show(group, result)
            yield _protocol(group[0])
    if tasks := [_task_row(score, result) for score in scores if score.kind == "task"]:
        yield table("Tasks", tasks)
        yield (
            "Drop: the original's accuracy minus this one's, in percentage points, paired by example; verdicts by the "
            "95 % interval of the drop of acc."
        )
    labels = {"cross_entropy": "cross-entropy", "kl_mean": "KL from the original"}
    for agreement in [a for a in result.agreements if not a.holds]:
        changes = [
            f"{labels[name]} by {with_error(c)}"
            for name, c in agreement.differences.items()
        ]
        title = subject_title(agreement.subject)
        reference = subject_title(agreement.compared_with)
        yield Red(
            f"{title} DISAGREES with {reference} on the same windows: {', '.join(changes)} nats per token. "
            "PyTorch computes what transformers' own code computes, so the file is not what was measured: export it "
            "again. (Arithmetic that is not modelled, for example on a GPU, can look the same.)"
        )
    yield from filter(None, dict.fromkeys(a.remark for a in result.agreements))
    yield from result.notes


def json_compare(result: CompareResult) -> dict[str, Any]:
    files = [
        {name: getattr(file, field) for name, field in _FILE.items()}
        | {name: value.to_json() for name, value in file.values.items()}
        for file in result.duel
    ]
    return {
        "files": files,
        "verdicts": result.comparisons,
        "failures": result.failures,
    }


def show_compare(result: CompareResult) -> Shown:
    rows = [
        {
            "file": file.name,
            "made by": file.maker,
            "runtime": file.runtime,
            "size": human_bytes(file.bytes),
            "KL": with_error(file.values["kl_mean"]),
            "perplexity": fixed_with_error(file.values["token_perplexity"], 3),
            "same top, %": f"{100 * file.values['same_top'].value:.2f}",
        }
        for file in result.duel
    ]
    yield table("Side by side", rows)
    yield from result.comparisons or [
        "Every larger file loses less: none is beaten by one of its size."
    ]
    if result.chart is not None:
        yield f"Written: {result.chart}"


def _task(score: Score) -> str:
    return str(score.protocol.get("task", "text"))


def _cell(
    score: Score, name: str, decimals: int, factor: int = 1, *, signed: bool = False
) -> str:
    value = score.values.get(name)
    if value is None:
        return ""
    sign = "+" if signed and value.value >= 0 else ""
    return sign + fixed_with_error(
        Estimate(factor * value.value, factor * value.standard_error), decimals
    )


def _likelihood(scores: list[Score], result: EvaluateResult) -> Table:
    beside = {a.subject: a for a in result.agreements if a.what == scores[0].what}
    title, columns = _LIKELIHOODS[_task(scores[0])]
    rows = []
    for score in scores:
        row = {"model": subject_title(score.subject)}
        for heading, name, factor, decimals in columns:
            row[heading] = _cell(score, name, decimals, factor)
            row[f"Δ {heading}"] = _cell(
                score, f"{name}_change", decimals, factor, signed=True
            )
        if agreement := beside.get(score.subject):
            change = agreement.differences["cross_entropy"].value
            answer = f"{agreement.answer} ({change:+.1e} nats)"
            row["agrees with PyTorch?"] = answer if agreement.holds else Red(answer)
        rows.append(row)
    return table(f"{title} on {scores[0].what}", rows)


def _divergence(scores: list[Score], _: EvaluateResult) -> Table:
    row, best = {"text": ("token", "token"), "image": ("image", "class")}[
        _task(scores[0])
    ]
    names = {
        "mean": "kl_mean",
        "median": "kl_median",
        "99 %": "kl_p99",
        "99.9 %": "kl_p999",
        "max": "kl_max",
    }
    shown = {*names.values(), "same_top"}
    rows = [
        {"model": subject_title(score.subject)}
        | {heading: with_error(score.values[name]) for heading, name in names.items()}
        | {f"same top {best}, %": _cell(score, "same_top", 2, 100)}
        | {
            name: with_error(value)
            for name, value in score.values.items()
            if name not in shown
        }
        for score in scores
    ]
    return table(f"KL from the original on {scores[0].what}, nats per {row}", rows)


def _positions(scores: list[Score], _: EvaluateResult) -> Table:
    """The first bin, the last, and some between."""
    rows = []
    for score in scores:
        if curve := curve_of(score, "kl") or curve_of(score, "cross_entropy"):
            name = subject_title(score.subject) + (
                "" if curve_of(score, "kl") else ": cross-entropy"
            )
            bins = shown_bins(len(curve.starts))
            row = {"model": name} | {
                f"from {curve.starts[i]:,}": number(curve.means[i].value) for i in bins
            }
            rows.append(
                row
                | {
                    "slope per 1,000 tokens": with_error(curve.slope),
                    "trend": curve.trend,
                }
            )
    return table(
        f"KL from the original by position on {scores[0].what}, nats per token", rows
    )


def _task_row(score: Score, result: EvaluateResult) -> Row:
    accuracies = ("acc", "acc_norm")
    row = {
        "task": score.what,
        "model": subject_title(score.subject),
        "examples": str(score.tokens),
    }
    row |= {f"{name}, %": _cell(score, name, 2, 100) for name in accuracies}
    row |= {
        f"drop of {name}": _cell(score, f"{name}_drop", 2, 100, signed=True)
        for name in accuracies
    }
    if verdict := result.verdict_of(score):
        row[f"≤ {100 * (result.task_drop or 0):g} points?"] = verdict
    notes = []
    if near := result.near_chance(score, accuracies):
        chance = score.protocol["chance"]
        notes.append(f"{' and '.join(near)} near chance ({100 * chance:.0f} %)")
    metrics = [n for n in score.values if n not in accuracies and not n.endswith("_drop")]
    notes += [
        f"{name.replace('_', ' ')} {with_error(score.values[name])}" for name in metrics
    ]
    return row | {"note": ", ".join(notes)}


def _protocol(score: Score) -> str:
    p = score.protocol
    errors = "± is one standard error over windows; Δ is the change from the original, paired by window."
    if _task(score) == "image":
        return f"{p['windows']} windows of {p['window']} images. {errors}"
    overlap = (
        ""
        if p["stride"] == p["window"]
        else f", the last {p['stride']} tokens of each scored"
    )
    text = f"{p['tokens']:,} tokens, {p['words']:,} words"
    return f"{p['windows']} windows of {p['window']} tokens{overlap}; {text}. {errors}"


# -- benchmark -----------------------------------------------------------------------------------------------


def json_benchmark(report: Report) -> dict[str, Any]:
    """The records, with ratios as they are shown."""
    profiles = []
    for p in report.profiles:
        names = p.ratios.keys() | {"tokens_per_second"}
        ratios = {name: ratio_of(p, name).to_json() for name in sorted(names)}
        profiles.append(p.to_json() | {"subject": p.subject.label, "ratios": ratios})
    return {
        "profiles": profiles,
        "failures": report.failures,
        "notes": report.notes,
    }


def show_benchmark(report: Report) -> Shown:
    used = report.profiles
    if used:
        title = "Speed and memory: median (quartiles; for × FP16 the 95 % interval)"
        yield table(title, use_rows(used))
    yield f"This machine reads {report.bandwidth / 1e9:.1f} GB/s from memory with all threads: that is the limit."
    if any(p.bound.get("share", 0) > 1 for p in used):
        yield "A share above 1: the file fits into the processor's caches and is not read from memory."
    bases = sorted(
        {p.settings["ratios_to"] for p in used if not p.settings["ratios_to_fp16"]}
    )
    if bases:
        yield f"* no FP16 file was there: ratios are to {', '.join(bases)}."
    if used:
        yield from _circumstances(used[0])
    yield from (*unmeasurable(used), *libraries(used))
    if any(p.settings["quick"] for p in used):
        yield "--quick: too short to publish; the records say so."
    yield from report.notes


def use_rows(profiles: Sequence[Profile]) -> list[Row]:
    rows = []
    for p in profiles:
        step = p.timings["seconds_per_token"]
        low, median, high = (f"{1e3 * v:.2f}" for v in (step.low, step.median, step.high))
        first = {
            f"first token ms @{n}": f"{1e3 * p.timings[f'first_token_seconds@{n}'].median:.1f}"
            for n in p.settings["prompt_lengths"]
        }
        rows.append(
            {
                "file": subject_title(p.subject),
                "size": human_bytes(p.file_bytes),
                "load s": f"{p.timings['load_seconds'].median:.2f}",
                **first,
                "ms/token": f"{median} ({low}–{high})",
                "tokens/s": f"{p.timings['tokens_per_second'].median:.1f}",
                "× FP16": _ratio(p, "tokens_per_second"),
                "peak memory": human_bytes(p.peak_memory_bytes or 0),
                "of it model": human_bytes(p.settings["memory"]["model_bytes"]),
                "limit tokens/s": f"{p.bound['tokens_per_second']:.0f}"
                if p.bound
                else "–",
                "share of limit": f"{p.bound['share']:.2f}" if p.bound else "–",
            }
        )
    return rows


def _ratio(profile: Profile, name: str) -> str:
    return ratio_of(profile, name).brief + (
        "" if profile.settings["ratios_to_fp16"] else " *"
    )


def _circumstances(first: Profile) -> Iterable[str]:
    settings = first.settings
    yield (
        f"{settings['new_tokens']} tokens generated after {settings['generated_after']}; "
        f"{settings['repeats']} round(s); {settings['interleaving']}. Peak memory is of a fresh process, "
        f"{human_bytes(settings['memory']['base_bytes'])} of it before the model is loaded."
    )
    lost = [
        f"{100 * first.load[name]:.0f} % {name}"
        for name in ("stolen", "others")
        if name in first.load
    ]
    if lost:
        yield f"Processor time lost meanwhile: {', '.join(lost)}."


# -- autopsy -------------------------------------------------------------------------------------------------

_MOST_RESTORED = 8


def json_autopsy(result: AutopsyResult) -> dict[str, Any]:
    return result.autopsy.to_json() | {
        "faults": len(result.autopsy.faults),
        "notes": result.notes,
    }


def show_autopsy(result: AutopsyResult) -> Shown:
    autopsy = result.autopsy
    yield _contents(result)
    if autopsy.steps:
        yield _chain(result)
        yield "± is one standard error over windows. “apart”: KL from the step named there, where equal is right."
    if autopsy.restored:
        rows = [
            {
                "part": part.what,
                "type": part.type,
                "KL": number(part.kl),
                "share": f"{part.share:.0%}",
            }
            for part in autopsy.restored[:_MOST_RESTORED]
        ]
        yield table("What exact weights would gain", rows)
    for finding in autopsy.findings:
        label = "Wrong" if finding.is_fault else "Note"
        cost = "" if finding.kl is None else f" ({number(finding.kl)} nats)"
        advice = f" What to do: {finding.advice}." if finding.advice else ""
        line = f"{label} ({finding.step}): {finding.words}{cost}.{advice}"
        yield Red(line) if finding.is_fault else line
    if autopsy.planned_kl is not None:
        size = human_bytes(autopsy.planned_bytes or autopsy.bytes)
        yield f"Our plan from this run: KL {with_error(autopsy.planned_kl)} at {size} (in PyTorch, same text)."
    yield from result.notes
    yield Bold(autopsy.headline)


def _contents(result: AutopsyResult) -> Table:
    """Tensors by kind and type."""
    autopsy = result.autopsy

    def largest(errors: Iterable[float | None]) -> str:
        return number(max((e for e in errors if e is not None), default=None))

    rows = [
        {
            "kind": kind or "–",
            "type": stored,
            "tensors": str(len(tensors)),
            "size": human_bytes(sum(t.bytes for t in tensors)),
            "weight error": largest(t.error for t in tensors),
            "rounding alone": largest(t.own_error for t in tensors),
        }
        for (kind, stored), tensors in autopsy.groups.items()
    ]
    return table(f"{autopsy.file}, {human_bytes(autopsy.bytes)}", rows)


def _chain(result: AutopsyResult) -> Table:
    autopsy = result.autopsy
    of = (
        f"KL from {autopsy.original} on {autopsy.text}, nats per token"
        if autopsy.original
        else "The file alone"
    )
    rows = [
        {
            "": step.letter,
            "step": step.title,
            "KL": "" if step.kl is None else with_error(step.kl),
            "apart": ""
            if step.apart is None
            else f"{with_error(step.apart)} ({step.beside})",
            "note": step.failure or step.note,
        }
        for step in autopsy.steps
    ]
    return table(of, rows)


# -- paper ---------------------------------------------------------------------------------------------------


def show_paper(ranking: Ranking) -> Shown:
    rows = [
        {
            "damage": c.damage,
            "format": c.format,
            "head": "with" if c.with_head else "without",
            "calibration": c.calibration,
            "metric": c.metric,
            "candidates": str(c.candidates),
            "τ": f"{c.tau:.3f}",
            "interval": f"{c.low:.3f} … {c.high:.3f}",
            "p": f"{c.p_value:.1e}",
        }
        for c in ranking.correlations
    ]
    yield table("Kendall τ between a metric and the damage (95 % interval)", rows)
    yield (
        "Damage: change in cross-entropy (perplexity) and KL from the original (divergence), "
        f"on {ranking.evaluation_tokens:,} held-out tokens, paired; "
        f"the original's token perplexity there is {ranking.perplexity:.3f}."
    )
    for r in (r for r in ranking.reliabilities if r.is_noisy):
        yield (
            f"{r.format}, {'with' if r.with_head else 'without'} the head: noise limits τ (median error of the damage "
            f"{r.median_error:.1e} nats, spread {r.spread:.1e}); raise --evaluation-windows"
        )
