"""Speed against size, per target and device, with the bound that memory bandwidth sets."""

from __future__ import annotations

from collections.abc import Sequence

from kl_lens.reporting import answer
from kl_lens.reporting.charts import SERIES, Dot, Line, axis, scatter, unit_of
from kl_lens.reporting.data import RunView, runtime_of
from kl_lens.reporting.markup import Cell, Html, Section, details, figure, join, note, table, tag
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import count, number, percent, size
from kl_lens.run.records import Profile

_PROTOCOLS = {
    "use": "as a user sees it",
    "benchmark_app": "the published protocol (benchmark_app)",
}
# What is drawn: the first that was timed.
_TIMINGS = {
    "tokens_per_second": "tokens per second",
    "throughput_fps": "inferences per second",
    "latency_ms": "milliseconds per inference",
}
_NEAR = 3.0  # a limit further above the timings than this would squash them


def section(view: RunView) -> Section | None:
    if not view.profiles:
        return None
    groups: dict[tuple[str, str], list[Profile]] = {}
    for profile in view.profiles:
        groups.setdefault((profile.device, profile.protocol), []).append(profile)
    parts: list[Html | None] = [
        note(
            "Speeds are medians of all turns, bars their quartiles. × FP16 compares the turns that nothing disturbed, "
            "of one session, with a 95 % interval."
        )
    ]
    for (device, protocol), profiles in groups.items():
        threads = sorted({p.threads for p in profiles})
        title = f"{device}, {' or '.join(map(str, threads))} thread{'s' if threads != [1] else ''}: "
        parts += [
            tag("h3", title + _PROTOCOLS.get(protocol, protocol)),
            _chart(view, profiles),
            *_notes(profiles),
            details("Timings", _table(profiles)),
        ]
    return Section("speed", "Speed against size", join(parts))


def _chart(view: RunView, profiles: Sequence[Profile]) -> Html | None:
    """Over file size, one series per runtime."""
    timing = next((name for name in _TIMINGS if any(name in p.timings for p in profiles)), None)
    if timing is None:
        return None
    title = _TIMINGS[timing]
    shown = [p for p in profiles if timing in p.timings]
    divisor, unit = unit_of(max(p.file_bytes for p in shown))
    stars = answer.recommended_names(view)
    dots, lines = [], []
    for index, runtime in enumerate(dict.fromkeys(runtime_of(p.subject) for p in shown)):
        limits = []
        for p in (p for p in shown if runtime_of(p.subject) == runtime):
            spread, name = p.timings[timing], p.subject.own_plan or p.subject.label
            words = f"{subject_title(p.subject)}, {p.device}, {count(p.threads, 'thread')}\n{size(p.file_bytes)}\n"
            words += f"{title}: {number(spread.median)}, quartiles {number(spread.low)} to "
            words += f"{number(spread.high)}, {spread.repeats} repeats"
            plan = view.plan(name)
            label = "" if plan and plan.family == "paper" else plan.label if plan else name.rpartition("/")[2]
            label = f"{label} ★" if name in stars else label
            dots.append(Dot(p.file_bytes / divisor, spread.median, words, runtime, spread.low,
                            spread.high, label))  # fmt: skip
            if limit := p.bound.get(timing):
                limits.append((p.file_bytes / divisor, limit))
        lines.append(Line(sorted(limits), f"s{index % len(SERIES)}", dashed=True))
    fastest = max(d.y for d in dots)
    lines = [line for line in lines if line.points and max(y for _, y in line.points) <= _NEAR * fastest]
    y = axis(
        title,
        [v for d in dots for v in (d.low or d.y, d.high or d.y)] + [v for s in lines for _, v in s.points],
    )
    caption = "Dashed: the limit of the machine's memory." if lines else ""
    x = axis(f"size of the file, {unit}", [d.x for d in dots])
    return figure(f"{title[0].upper()}{title[1:]} against size", scatter(x, y, dots, lines).svg(), caption)


def _notes(profiles: Sequence[Profile]) -> list[Html]:
    notes = []
    if rates := [p.bound["read_bandwidth"] for p in profiles if p.bound.get("read_bandwidth")]:
        words = (
            f"The bound is what {size(max(rates))} per second of memory bandwidth, measured beside the timings, allows "
            "when every weight that a token needs is read once. A file that fits into the processor's caches may be "
            "above it."
        )
        notes.append(note(words))
    notes += [note(line) for line in (*answer.libraries(profiles), *answer.unmeasurable(profiles))]
    if any(p.settings.get("quick") for p in profiles):
        notes.append(note("Some of these are quick timings, too short to publish."))
    if any(not p.settings.get("ratios_to_fp16", True) for p in profiles):
        notes.append(note("Where a runtime had no FP16 file beside the others, no ratio is given."))
    return notes


def _table(profiles: Sequence[Profile]) -> Html:
    columns = ["file", "size", "speed", "quartiles", "× FP16", "first token, ms", "load, s", "peak memory",
               "of the bound"]  # fmt: skip
    rows = [_row(p) for p in sorted(profiles, key=lambda p: (runtime_of(p.subject), -p.file_bytes))]
    return table(columns, rows, caption="Timings")


def _row(profile: Profile) -> list[object]:
    units = {"tokens_per_second": "tokens/s", "throughput_fps": "inferences/s"}
    speed = next(
        ((unit, profile.timings[name]) for name, unit in units.items() if name in profile.timings), None
    )
    ratio = answer.speed_ratio(profile)
    firsts = [n for n in profile.timings if n.startswith("first_token_seconds@")]
    first = max(firsts, key=lambda n: int(n.partition("@")[2]), default=None)
    load = profile.timings.get("load_seconds")
    share = profile.bound.get("share")
    return [
        subject_title(profile.subject),
        Cell(size(profile.file_bytes), profile.file_bytes),
        Cell(f"{number(speed[1].median)} {speed[0]}", speed[1].median) if speed else "–",
        f"{number(speed[1].low)} to {number(speed[1].high)}" if speed else "–",
        ratio.brief if ratio else "–",
        f"{1e3 * profile.timings[first].median:.1f} (after {first.partition('@')[2]})" if first else "–",
        f"{load.median:.2f}" if load else "–",
        Cell(size(profile.peak_memory_bytes), profile.peak_memory_bytes),
        Cell(percent(share), share) if share is not None else "–",
    ]
