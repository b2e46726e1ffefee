"""Several runs on one page: architectures, metrics, devices side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from kl_lens.records import Estimate, Profile
from kl_lens.reporting import answer
from kl_lens.reporting.data import RunView, plan_or_file, runtime_of
from kl_lens.reporting.explorer import explorer
from kl_lens.reporting.figures.damage import METRIC_NAMES
from kl_lens.reporting.figures.kinds import spread_rows, values_by_kind
from kl_lens.reporting.figures.speed import speed_plot, timing_names
from kl_lens.reporting.markup import Html, join
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import number, percent, size, with_error
from kl_lens.reporting.page import page
from kl_lens.reporting.palette import series_class
from kl_lens.reporting.plans import PlanView
from kl_lens.reporting.scales import by_span, linear, logarithmic
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.provenance import shown_place
from kl_lens.reporting.sections.words import grid, heading, note, paragraph
from kl_lens.reporting.svg import SHAPES, Mark, Plot, ends, figure, legend
from kl_lens.reporting.tables import Cell, Column, table, text_column


def comparison_page(views: Sequence[RunView]) -> str:
    names = run_names(views)
    parts = [
        ("runs", "The runs", _runs(views, names)),
        ("sizes", "Size against quality", _sizes(views, names)),
        ("kinds", "Sensitivity by component kind", _kinds(views, names)),
        ("metrics", "Which metric predicts the damage", _metrics(views, names)),
        ("speed", "Speed against size", _speeds(views, names)),
    ]
    sections = [Section(name, title, body) for name, title, body in parts if body is not None]
    return page(f"KL Lens: {len(views)} runs side by side", sections)


def run_names(views: Sequence[RunView]) -> list[str]:
    """Each run by its model, and by its folder too where two runs are of one model."""
    models = [view.model for view in views]
    return [
        model if models.count(model) == 1 else f"{model} ({shown_place(view.folder)})"
        for model, view in zip(models, views, strict=True)
    ]


def _style(index: int) -> tuple[str, str]:
    return series_class(index), SHAPES[index % len(SHAPES)]


def _key(names: Sequence[str]) -> Html:
    return legend([(name, _style(i)[1], _style(i)[0]) for i, name in enumerate(names)])


def _runs(views: Sequence[RunView], names: Sequence[str]) -> Html:
    """A column for each run: it stays readable with long names and on a phone."""
    facts = [_facts(view) for view in views]
    rows = [[label, *(column[label] for column in facts)] for label in facts[0]]
    columns = [text_column(""), *(text_column(name) for name in names)]
    words = "Compare KL and the change from the original: perplexities of different models or texts do not compare."
    side_by_side = table(columns, rows, sortable=False, caption="Side by side")
    return join([side_by_side, note(words), explorer(views, names)])


def _facts(view: RunView) -> dict[str, str]:
    blocks = 1 + max((c.block for c in view.components if c.block is not None), default=-1)
    text = view.texts.get("calibration", {})
    chosen = answer.recommend(view)
    plan = chosen.plan if chosen else None
    profiles = answer.best_profiles(view, plan) if plan else []
    timed = [(p, r) for p in profiles if (r := answer.speed_ratio(p)) is not None]
    return {
        "architecture": str(view.identity.get("model_type", "–")),
        "weights": f"{sum(c.parameters for c in view.components):,}",
        "blocks": str(blocks),
        "size at FP16": size(view.fp16_bytes),
        "formats measured": ", ".join(view.table.formats) if view.table else "–",
        "calibration": f"{shown_place(text.get('source'))} {text.get('split') or ''}, {text.get('windows')} windows of "
        f"{text.get('length')} tokens"
        if text
        else "–",
        "recommended": plan.title if plan else "–",
        "its size": f"{size(plan.bytes)} ({percent(plan.bytes / view.fp16_bytes, 1)})" if plan else "–",
        "its KL, nats per token": with_error(plan.kl) if plan else "–",
        "its perplexity (the original's)": f"{plan.perplexity.value:.2f} ({plan.original_perplexity:.2f})"
        if plan and plan.perplexity and plan.original_perplexity
        else "–",
        "its speed, times the FP16 file's": ", ".join(
            f"{r.words} ({runtime_of(p.subject)}, {p.device})" for p, r in timed
        )
        or "–",
    }


Quality = Callable[[PlanView], Estimate | None]


def _sizes(views: Sequence[RunView], names: Sequence[str]) -> Html | None:
    figures = [
        _overlay(views, names, "Size against KL", "measured KL, nats per token (log)", lambda p: p.kl, True),
        _overlay(
            views,
            names,
            "Size against perplexity",
            "perplexity, times the original's",
            _relative_perplexity,
            False,
        ),
        _frontiers(views),
    ]
    parts: list[Html | None] = [
        paragraph(
            "Sizes are shares of each model's FP16 size, so that models of different sizes can be laid over each other."
        ),
        _key(names),
        grid(figures),
    ]
    return join(parts) if any(figures) else None


def _relative_perplexity(plan: PlanView) -> Estimate | None:
    if plan.perplexity is None or not plan.original_perplexity:
        return None
    return Estimate(plan.perplexity.value / plan.original_perplexity)


def _overlay(
    views: Sequence[RunView], names: Sequence[str], title: str, axis: str, quality: Quality, as_log: bool
) -> Html | None:
    points = [
        (index, view, plan, value)
        for index, view in enumerate(views)
        for plan in view.plans
        if (value := quality(plan)) is not None and (value.value > 0 or not as_log)
    ]
    if len(points) < 2:
        return None
    values = [value.value for *_, value in points]
    x = linear([100 * plan.bytes / view.fp16_bytes for _, view, plan, _ in points])
    plot = Plot(title, x, logarithmic(values) if as_log else by_span(values), "size, % of FP16", axis)
    for index, name in enumerate(names):
        colour, shape = _style(index)
        mine = [(view, plan, value) for i, view, plan, value in points if i == index]
        paper = sorted(
            (100 * p.bytes / v.fp16_bytes, value.value) for v, p, value in mine if p.family == "paper"
        )
        plot.curve(paper, f"thin {colour}")
        chosen = answer.recommend(views[index])
        for view, plan, value in mine:
            star = chosen is not None and plan.name == chosen.plan.name
            share = 100 * plan.bytes / view.fp16_bytes
            words = f"{name}\n{plan.title}: {size(plan.bytes)}, {share:.1f} % of FP16\n{axis}: {with_error(value, 4)}"
            plot.marks.append(
                Mark(share, value.value, words, colour, shape, y_error=ends(value), emphasis=star,
                     label=plan.label if star else None)
            )  # fmt: skip
    return figure(
        title, plot.render(), "Lines join the paper's points; each run's recommended plan is outlined."
    )


def _frontiers(views: Sequence[RunView]) -> Html | None:
    """Of each run, its first target's."""
    lines = []
    for view in views:
        space = next(iter(view.spaces.values()), None)
        base = view.fp16_of(space.target) if space else 0
        lines.append([(100 * b / base, kl) for b, kl in space.frontier if kl > 0] if space else [])
    every = [point for points in lines for point in points]
    if not every:
        return None
    x, y = linear([x for x, _ in every]), logarithmic([y for _, y in every])
    title, axis = "Predicted frontiers", "predicted KL of the best plan, nats per token (log)"
    plot = Plot(title, x, y, "size, % of FP16", axis)
    for index, points in enumerate(lines):
        plot.curve(points, _style(index)[0])
    return figure(title, plot.render(), "What the best plan of each size is predicted to do.")


def _kinds(views: Sequence[RunView], names: Sequence[str]) -> Html | None:
    measured = [view for view in views if view.table is not None]
    formats = list(dict.fromkeys(f for view in measured if view.table for f in view.table.formats))
    series = {name: _style(index) for index, name in enumerate(names)}
    figures = []
    for format_name in formats:
        groups: dict[str, dict[str, list[float]]] = {}
        for view, name in zip(views, names, strict=True):
            if view.table is None:
                continue
            for kind, row in values_by_kind(view.components, view.table.measurements).items():
                if format_name in row:
                    groups.setdefault(kind, {})[name] = row[format_name]
        ordered = dict(sorted(groups.items(), key=lambda item: -max(median(v) for v in item[1].values())))
        if ordered:
            body = spread_rows(ordered, series, "KL, nats per token", f"Sensitivity by kind, {format_name}")
            figures.append(figure(format_name, body, key=_key(names)))
    return grid(figures) if figures else None


def _metrics(views: Sequence[RunView], names: Sequence[str]) -> Html | None:
    """τ with its interval, runs in columns."""
    rows: dict[tuple[str, str, str, str], dict[int, str]] = {}
    for index, view in enumerate(views):
        for c in view.ranking.correlations if view.ranking else ():
            if c.with_head:
                key = c.damage, c.format, METRIC_NAMES.get(c.metric, c.metric), _calibration(c.calibration)
                rows.setdefault(key, {}).setdefault(index, f"{c.tau:.2f} ({c.low:.2f} to {c.high:.2f})")
    if not rows:
        return None
    columns = [
        text_column("damage"),
        text_column("format"),
        text_column("metric"),
        text_column("calibration"),
    ]
    columns += [Column(name) for name in names]
    cells = [[*key, *(by_run.get(i, "–") for i in range(len(views)))] for key, by_run in rows.items()]
    return join(
        [
            table(columns, cells, caption="Kendall's τ with the damage on held-out text"),
            note("In brackets the 95 % interval; all components, the head among them."),
        ]
    )


def _calibration(label: str) -> str:
    """`in domain, 4 of 4 windows` → `in domain, all`: runs differ in how many windows they have."""
    text, _, share = label.rpartition(", ")
    used, _, whole = share.removesuffix(" windows").partition(" of ")
    return f"{text}, all" if used == whole else f"{text}, a part"


def _speeds(views: Sequence[RunView], names: Sequence[str]) -> Html | None:
    owners: dict[int, tuple[RunView, str]] = {}
    groups: dict[str, list[Profile]] = {}
    for view, name in zip(views, names, strict=True):
        for profile in view.profiles:
            owners[id(profile)] = view, name
            groups.setdefault(profile.protocol, []).append(profile)

    def series(profile: Profile) -> str:
        _, name = owners[id(profile)]
        return f"{name}: {runtime_of(profile.subject)}, {profile.device}"

    def label(profile: Profile) -> str:
        view, _ = owners[id(profile)]
        name = plan_or_file(profile.subject)
        return "" if view.plan(name) else name

    parts: list[Html] = []
    for protocol, profiles in groups.items():
        parts += [
            heading(f"Protocol: {protocol}"),
            grid(speed_plot(timing, profiles, label, series) for timing in timing_names(profiles)),
            _speed_table(profiles, series),
        ]
    return join(parts) if parts else None


def _speed_table(profiles: Sequence[Profile], series: Callable[[Profile], str]) -> Html:
    columns = [
        text_column("run"), text_column("file"), Column("size"), Column("speed"), Column("× FP16"),
        Column("peak memory"),
    ]  # fmt: skip
    rows: list[list[object]] = []
    for profile in profiles:
        speed, ratio = answer.speed_of(profile), answer.speed_ratio(profile)
        rows.append(
            [
                series(profile),
                subject_title(profile.subject),
                Cell(size(profile.file_bytes), profile.file_bytes),
                Cell(f"{number(speed[1].median)} {speed[0]}", speed[1].median) if speed else "–",
                ratio.brief if ratio else "–",
                Cell(size(profile.peak_memory_bytes), profile.peak_memory_bytes),
            ]
        )
    return table(columns, rows, caption="Speeds")
