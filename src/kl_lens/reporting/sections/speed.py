"""Speed against size, per target and device, with the bound that memory bandwidth sets."""

from __future__ import annotations

from kl_lens.reporting import answer
from kl_lens.reporting.data import RunView, plan_or_file, runtime_of
from kl_lens.reporting.figures.speed import speed_plot, timing_names
from kl_lens.reporting.markup import Html, join
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import number, percent, size
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.words import grid, heading, note, paragraph
from kl_lens.reporting.tables import Cell, Column, table, text_column
from kl_lens.run.records import Profile

TITLE = "Speed against size"
_PROTOCOLS = {
    "use": "as a user sees it",
    "benchmark_app": "the published protocol (benchmark_app)",
}


def section(view: RunView) -> Section | None:
    if not view.profiles:
        return None
    stars = answer.recommended_names(view)
    groups: dict[tuple[str, str], list[Profile]] = {}
    for profile in view.profiles:
        groups.setdefault((profile.device, profile.protocol), []).append(profile)
    parts: list[Html] = [
        paragraph(
            "Medians of repeated timings, quartiles as error bars. Ratios are taken within one session against the "
            "FP16 file of the same runtime, with 95 % intervals."
        )
    ]
    for (device, protocol), profiles in groups.items():
        threads = sorted({p.threads for p in profiles})
        title = f"{device}, {' or '.join(map(str, threads))} thread{'s' if threads != [1] else ''}: "
        parts += [
            heading(title + _PROTOCOLS.get(protocol, protocol)),
            grid(
                speed_plot(
                    timing,
                    profiles,
                    lambda p: _label(view, p),
                    lambda p: runtime_of(p.subject),
                    recommended=lambda p: plan_or_file(p.subject) in stars,
                )
                for timing in timing_names(profiles)
            ),
            *_bandwidth(profiles),
            *_warnings(profiles),
            _table(profiles),
        ]
    return Section("speed", TITLE, join(parts))


def _label(view: RunView, profile: Profile) -> str:
    name = plan_or_file(profile.subject)
    plan = view.plan(name)
    if plan is not None and plan.family == "paper":  # ten of them per target; their tooltips tell
        return ""
    return plan.label if plan else name.rpartition("/")[2]


def _bandwidth(profiles: list[Profile]) -> list[Html]:
    rates = [p.bound["read_bandwidth"] for p in profiles if p.bound.get("read_bandwidth")]
    if not rates:
        return []
    words = (
        f"Dashed: what {size(max(rates))} per second of memory bandwidth, measured beside the timings, allows when "
        "every weight that a token needs is read once; for prompts, also what its arithmetic allows."
    )
    if any(p.bound.get("fits_in_cache") for p in profiles):
        words += " A file that fits into the processor's caches may lie above it."
    return [note(words)]


def _warnings(profiles: list[Profile]) -> list[Html]:
    notes = [note(line) for line in answer.libraries(profiles)]
    notes += [note(line) for line in answer.unmeasurable(profiles)]
    if any(p.settings.get("quick") for p in profiles):
        notes.append(note("Some of these are quick timings, too short to publish."))
    if any(not p.settings.get("ratios_to_fp16", True) for p in profiles):
        notes.append(note("Where a runtime had no FP16 file beside the others, no ratio is given."))
    return notes


def _table(profiles: list[Profile]) -> Html:
    columns = [
        text_column("file"), Column("size"), Column("speed"), Column("quartiles"), Column("× FP16"),
        Column("first token, ms"), Column("load, s"), Column("peak memory"), Column("of the bound"),
    ]  # fmt: skip
    rows = [_row(p) for p in sorted(profiles, key=lambda p: (runtime_of(p.subject), -p.file_bytes))]
    return table(columns, rows, caption="Timings")


def _row(profile: Profile) -> list[object]:
    speed, ratio = answer.speed_of(profile), answer.speed_ratio(profile)
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
