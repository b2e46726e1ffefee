"""`kl-lens benchmark`: speed, memory and size, and how close they are to the machine's limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kl_lens import profiling
from kl_lens.base.units import human_bytes
from kl_lens.cli.console import Row, console, table
from kl_lens.reporting.answer import libraries, unmeasurable
from kl_lens.reporting.names import subject_title
from kl_lens.run.records import Profile
from kl_lens.study.benchmark import BenchmarkResult


def as_json(result: BenchmarkResult) -> dict[str, Any]:
    report = result.report
    return {
        "profiles": [_profile_json(p) for p in report.profiles],
        "failures": result.failures,
        "notes": report.notes,
        "csv": report.csv,
    }


def _profile_json(profile: Profile) -> dict[str, Any]:
    """The record, with ratios as they are shown."""
    names = profile.ratios.keys() | {"tokens_per_second" if profile.protocol == "use" else "latency_ms"}
    ratios = {name: profiling.ratio_of(profile, name).to_json() for name in sorted(names)}
    return profile.to_json() | {"subject": profile.subject.label, "ratios": ratios}


def show(result: BenchmarkResult) -> None:
    report, out = result.report, console()
    used = [p for p in report.profiles if p.protocol == "use"]
    timed = [p for p in report.profiles if p.protocol == "benchmark_app"]
    if used:
        title = "Speed and memory: median (quartiles; for × FP16 the 95 % interval)"
        out.print(table(title, use_rows(used)))
    if timed:
        out.print(table("benchmark_app, the published protocol", _app_rows(timed)))
    for line in [*_remarks(report, used, timed), *report.notes]:
        out.print(line, soft_wrap=True)


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
                "limit tokens/s": f"{p.bound['tokens_per_second']:.0f}" if p.bound else "–",
                "share of limit": f"{p.bound['share']:.2f}" if p.bound else "–",
            }
        )
    return rows


def _app_rows(profiles: Sequence[Profile]) -> list[Row]:
    return [
        {
            "file": subject_title(p.subject),
            "one inference": p.settings["signature"],
            "size": human_bytes(p.file_bytes),
            "median ms": f"{p.timings['latency_ms'].median:.2f}",
            **{f"{name} ms": f"{p.settings[f'{name}_ms']:.2f}" for name in ("average", "min", "max")},
            "inferences/s": f"{p.timings['throughput_fps'].median:.1f}",
            "× FP16": _ratio(p, "latency_ms"),
            "iterations": f"{p.settings['reached_iterations']}",
            "seconds": f"{p.settings['reached_seconds']:.1f}",
            "share of limit": f"{p.bound['share']:.2f}" if p.bound else "–",
        }
        for p in profiles
    ]


def _ratio(profile: Profile, name: str) -> str:
    return profiling.ratio_of(profile, name).brief + ("" if profile.settings["ratios_to_fp16"] else " *")


def _remarks(report: profiling.Report, used: list[Profile], timed: list[Profile]) -> list[str]:
    lines = [
        f"This machine reads {report.bandwidth / 1e9:.1f} GB/s from memory with all threads: that is the limit."
    ]
    if any(p.bound.get("share", 0) > 1 for p in report.profiles):
        lines.append(
            "A share above 1: the file fits into the processor's caches and is not read from memory."
        )
    if not_fp16 := sorted(
        {p.settings["ratios_to"] for p in used + timed if not p.settings["ratios_to_fp16"]}
    ):
        lines.append(f"* no FP16 file was there: ratios are to {', '.join(not_fp16)}.")
    if used:
        first = used[0]
        base = human_bytes(first.settings["memory"]["base_bytes"])
        lines.append(
            f"{first.settings['new_tokens']} tokens generated after {first.settings['generated_after']}; "
            f"{first.settings['repeats']} round(s); {first.settings['interleaving']}. Peak memory is of a fresh "
            f"process, {base} of it before the model is loaded."
        )
        if shares := [
            f"{first.load[name]:.0%} {name}" for name in ("stolen", "others") if name in first.load
        ]:
            lines.append(f"Processor time lost meanwhile: {', '.join(shares)}.".replace("%", " %"))
    lines += [*unmeasurable(used), *libraries(used)]
    if any(p.settings["quick"] for p in report.profiles):
        lines.append("--quick: too short to publish; the records say so.")
    if report.csv is not None:
        lines.append(f"Written: {report.csv}; logs in {report.csv.parent / 'log/benchmark_log'}.")
    return lines
