"""The files side by side: size, loss, perplexity, speed; every plan; and speed against size."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kl_lens.reporting import answer
from kl_lens.reporting.charts import SERIES, Dot, Line, axis, scatter, unit_of
from kl_lens.reporting.data import FAMILIES, RunView, runtime_of
from kl_lens.reporting.markup import (
    Cell,
    Html,
    Section,
    details,
    figure,
    join,
    note,
    table,
    tag,
)
from kl_lens.reporting.names import (
    count,
    fixed_with_error,
    number,
    percent,
    plan_title,
    runtime_title,
    short_title,
    size,
    subject_title,
    sum_of_parts,
    with_error,
)
from kl_lens.run.records import ARTIFACT, ORIGINAL, Profile, Score, Subject

_DRAWN = "tokens_per_second"
_NEAR = 3.0  # a limit further above the timings than this would squash them


def section(view: RunView) -> Section | None:
    if not view.plans:
        return None
    stars = answer.recommended_names(view)
    scores = _scores(view, stars)
    plans = _plans(view, stars)
    parts = [
        *scores,
        details("Every plan, and what it is made of", plans) if scores else plans,
        _unjudged(view),
        note(_protocol(view)),
    ]
    return Section("files", "The files", join(parts))


def _scores(view: RunView, stars: frozenset[str]) -> list[Html]:
    """What `evaluate` found, one table for each text and protocol."""
    texts: dict[str, dict[Subject, dict[str, Score]]] = {}
    for score in view.scores:
        if score.kind in ("perplexity", "divergence"):
            subjects = texts.setdefault(
                f"Files on {score.what}: {_amount(view, score)}", {}
            )
            subjects.setdefault(score.subject, {})[score.kind] = score
    columns = [
        "file",
        "size",
        "KL",
        "predicted KL",
        view.unit.perplexity,
        "word perplexity",
        "change, paired",
        f"same top {view.unit.guess.split()[-1]}, %",
        "speed, × FP16",
        "peak memory",
        "agrees with PyTorch",
    ]
    tables = []
    for caption, subjects in texts.items():
        # PyTorch no longer stands in for them.
        files = {s.key for s in subjects if s.what == ARTIFACT}
        shown = [s for s in subjects if s.key in files or s.file_key not in files]
        order = sorted(
            shown, key=lambda s: (s.target or "", -(view.subject_bytes(s) or 0), s.label)
        )
        rows = [
            _score_row(view, subject, list(subjects[subject].values()))
            for subject in order
        ]
        filled = [i for i in range(len(columns)) if any(row[i] != "–" for row in rows)]
        highlight = [i for i, subject in enumerate(order) if subject.own_plan in stars]
        cells = [[row[i] for i in filled] for row in rows]
        tables.append(
            table(
                [columns[i] for i in filled], cells, highlight=highlight, caption=caption
            )
        )
    return tables


def _unjudged(view: RunView) -> Html | None:
    """Files that nobody has evaluated yet."""
    judged = {score.subject.file_key for score in view.scores}
    files = [
        f"{plan_title(artifact.plan)} for {runtime_title(artifact.target)} ({size(artifact.realised_bytes)})"
        for artifact in view.artifacts.values()
        if Subject(ARTIFACT, artifact.plan, artifact.target).key not in judged
    ]
    if not files:
        return None
    command = tag("code", shlex.join(["kl-lens", "evaluate", "--run", view.folder]))
    return note(
        f"Exported, not evaluated yet: {', '.join(files)}. To evaluate: ", command
    )


def _score_row(view: RunView, subject: Subject, scores: Sequence[Score]) -> list[object]:
    values = {k: v for score in scores for k, v in score.values.items()}
    bytes_ = view.subject_bytes(subject)
    top = values.get("same_top")
    plan = view.plan(subject.own_plan or "")
    profile = next((p for p in view.profiles if p.subject.key == subject.file_key), None)
    ratio = answer.speed_ratio(profile) if profile else None
    memory = profile and profile.peak_memory_bytes
    return [
        subject_title(subject),
        "–" if subject.what == ORIGINAL else Cell(size(bytes_), bytes_),
        "0" if subject.what == ORIGINAL else with_error(values.get("kl_mean")),
        number(view.predicted_kl(plan) if plan else None),
        *(
            f"{values[name].value:.2f}" if name in values else "–"
            for name in ("token_perplexity", "word_perplexity")
        ),
        fixed_with_error(values.get("token_perplexity_change")),
        f"{100 * top.value:.2f}" if top else "–",
        ratio.brief if ratio else "–",
        Cell(size(memory), memory) if memory else "–",
        view.verdicts.get((subject, scores[0].what), "–"),
    ]


def _amount(view: RunView, score: Score) -> str:
    """What a perplexity must name: window, stride, how much text."""
    window = score.protocol.get("window")
    stride = score.protocol.get("stride")
    protocol = f", window {window}, stride {stride}" if window and stride else ""
    return f"{score.tokens:,} {view.unit.one}s{protocol}"


def _plans(view: RunView, stars: frozenset[str]) -> Html:
    text = f"held-out {view.unit.text}"
    columns = [
        "plan",
        "size",
        f"KL, {text}",
        "predicted KL",
        f"perplexity, {text}",
        "kind",
        "of FP16",
        "bits per weight",
        "formats: components (share of the weights)",
    ]
    rows: list[Sequence[object]] = []
    for p in view.plans:
        cost = view.cost(p)
        measured = p.measured
        bytes_ = view.bytes_of(p, p.target)
        rows.append(
            [
                p.name,
                Cell(size(bytes_), bytes_),
                with_error(measured.kl if measured else None),
                number(view.predicted_kl(p)),
                fixed_with_error(measured.perplexity if measured else None),
                FAMILIES[p.family],
                Cell(percent(bytes_ / view.fp16_of(p.target), 1), bytes_),
                f"{cost.bits_per_weight:.2f}",
                cost.shares_text.replace(" %", "\u00a0%"),
            ]
        )
    highlight = [i for i, p in enumerate(view.plans) if p.name in stars]
    caption = "Every plan, by the name that commands know it by"
    return table(columns, rows, highlight=highlight, caption=caption, identifier="plans")


def _protocol(view: RunView) -> str:
    texts = list(dict.fromkeys(p.measured.place for p in view.plans if p.measured))
    words = "KL in nats, ± one standard error; of perplexities, that of the difference from the original. "
    words += "Bits per weight: of the weights, without the rest of the file. "
    for space in view.spaces.values():
        of = f" ({space.title})" if len(view.spaces) > 1 else ""
        words += f"Predicted KL{of}: {sum_of_parts(space.problem.interaction)}. "
    held_out = f"Held-out {view.unit.text}: {'; '.join(texts)}, plans in PyTorch that rounds as the runtime does."
    return words + (held_out if texts else "")


# -- speed ---------------------------------------------------------------------------------------------------


def speed(view: RunView) -> Section | None:
    if not view.profiles:
        return None
    groups: dict[str, list[Profile]] = {}
    for profile in view.profiles:
        groups.setdefault(profile.device, []).append(profile)
    parts: list[Html | None] = [
        note(
            "Speeds are medians of all repeats, bars their quartiles. × FP16: speed relative to the FP16 file of the "
            "same session, with a 95 % interval, from undisturbed repeats only."
        )
    ]
    for device, profiles in groups.items():
        threads = sorted({p.threads for p in profiles})
        title = f"{device}, {' or '.join(map(str, threads))} thread{'s' if threads != [1] else ''}"
        parts += [
            tag("h3", title),
            _chart(view, profiles),
            *_notes(profiles),
            details("Timings", _timings(profiles)),
        ]
    return Section("speed", "Speed against size", join(parts))


def _chart(view: RunView, profiles: Sequence[Profile]) -> Html | None:
    """Over file size, one series per runtime; without what was not measurable."""
    ratios = [answer.speed_ratio(profile) for profile in profiles]
    profiles = [
        profile
        for profile, ratio in zip(profiles, ratios, strict=True)
        if ratio is None or not ratio.obstacle
    ]
    if len(profiles) < min(2, len(ratios)):
        return None
    title = "tokens per second"
    divisor, unit = unit_of(max(p.file_bytes for p in profiles))
    stars = answer.recommended_names(view)
    dots = []
    lines = []
    for index, runtime in enumerate(
        dict.fromkeys(runtime_of(p.subject) for p in profiles)
    ):
        limits = []
        for p in (p for p in profiles if runtime_of(p.subject) == runtime):
            spread = p.timings[_DRAWN]
            name = p.subject.own_plan or p.subject.label
            words = f"{subject_title(p.subject)}, {p.device}, {count(p.threads, 'thread')}\n{size(p.file_bytes)}\n"
            words += (
                f"{title}: {number(spread.median)}, quartiles {number(spread.low)} to "
            )
            words += f"{number(spread.high)}, {spread.repeats} repeats"
            plan = view.plan(name)
            label = short_title(plan) if plan else name.rpartition("/")[2]
            label = f"{label} ★" if name in stars else label
            dots.append(
                Dot(
                    p.file_bytes / divisor,
                    spread.median,
                    words,
                    runtime,
                    spread.low,
                    spread.high,
                    label,
                )
            )
            if limit := p.bound.get(_DRAWN):
                limits.append((p.file_bytes / divisor, limit))
        lines.append(Line(sorted(limits), f"s{index % len(SERIES)}", dashed=True))
    fastest = max(d.y for d in dots)
    lines = [
        line
        for line in lines
        if line.points and max(y for _, y in line.points) <= _NEAR * fastest
    ]
    y = axis(
        title,
        [v for d in dots for v in (d.low or d.y, d.high or d.y)]
        + [v for s in lines for _, v in s.points],
    )
    caption = ""
    if lines:
        rate = max(p.bound["read_bandwidth"] for p in profiles if p.bound)
        caption = (
            f"Dashed: the bound, where every weight that a token needs is read once, at {size(rate)} per second. "
            "A file that fits into the processor's caches may be above it."
        )
    x = axis(f"size of the file, {unit}", [d.x for d in dots])
    return figure(
        f"{title[0].upper()}{title[1:]} against size",
        scatter(x, y, dots, lines).svg(),
        caption,
    )


def _notes(profiles: Sequence[Profile]) -> list[Html]:
    notes = [
        note(line)
        for line in (*answer.libraries(profiles), *answer.unmeasurable(profiles))
    ]
    if any(p.settings.get("quick") for p in profiles):
        notes.append(note("Some of these are quick timings, too short to publish."))
    if any(not p.settings.get("ratios_to_fp16", True) for p in profiles):
        notes.append(
            note("Where a runtime had no FP16 file beside the others, no ratio is given.")
        )
    return notes


def _timings(profiles: Sequence[Profile]) -> Html:
    columns = [
        "file",
        "size",
        "speed",
        "quartiles",
        "× FP16",
        "first token, ms",
        "load, s",
        "peak memory",
        "of the bound",
    ]
    rows = [
        _timing_row(p)
        for p in sorted(profiles, key=lambda p: (runtime_of(p.subject), -p.file_bytes))
    ]
    return table(columns, rows, caption="Timings")


def _timing_row(profile: Profile) -> list[object]:
    speed = profile.timings[_DRAWN]
    ratio = answer.speed_ratio(profile)
    firsts = [n for n in profile.timings if n.startswith("first_token_seconds@")]
    first = max(firsts, key=lambda n: int(n.partition("@")[2]), default=None)
    load = profile.timings.get("load_seconds")
    share = profile.bound.get("share")
    return [
        subject_title(profile.subject),
        Cell(size(profile.file_bytes), profile.file_bytes),
        Cell(f"{number(speed.median)} tokens/s", speed.median),
        f"{number(speed.low)} to {number(speed.high)}",
        ratio.brief if ratio else "–",
        f"{1e3 * profile.timings[first].median:.1f} (after {first.partition('@')[2]})"
        if first
        else "–",
        f"{load.median:.2f}" if load else "–",
        Cell(size(profile.peak_memory_bytes), profile.peak_memory_bytes),
        Cell(percent(share), share) if share is not None else "–",
    ]
