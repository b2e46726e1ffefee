"""The files side by side: size, loss, perplexity, speed; predictions against measurements; every score."""

from __future__ import annotations

from collections.abc import Sequence

from kl_lens.reporting import answer
from kl_lens.reporting.charts import RECOMMENDED, Chart, Dot, Line, axis, scatter
from kl_lens.reporting.data import RunView
from kl_lens.reporting.markup import Html, join
from kl_lens.reporting.names import runtime_title, subject_title
from kl_lens.reporting.numbers import fixed_with_error, number, percent, size, with_error
from kl_lens.reporting.plans import FAMILIES, PlanView
from kl_lens.reporting.sections.words import Section, details, figure, note
from kl_lens.reporting.tables import Cell, Column, table, text_column
from kl_lens.run.records import ARTIFACT, ORIGINAL, Profile, Score, Subject
from kl_lens.weights.recipes import FP16

TITLE = "The files"


def section(view: RunView) -> Section | None:
    if not view.plans:
        return None
    stars = answer.recommended_names(view)
    answers = answer.recommendations(view)
    tables = [_comparison(view, each.plan) for each in answers]
    parts = [
        *tables,
        note(_protocol(view)) if tables else None,
        details("Predicted against measured KL", chart) if (chart := _predicted(view, stars)) else None,
        *_scores(view, stars),
        details("Every plan, and what it is made of", _plans(view, stars)),
    ]
    return Section("files", TITLE, join(parts))


# -- the table ------------------------------------------------------------------------------------------------


def _comparison(view: RunView, plan: PlanView) -> Html:
    """FP16, what stands beside the answer, and the answer; columns that nothing is known for are left out."""
    shown, target, text = _beside(view, plan), plan.target, view.unit.text
    base = view.fp16_of(target)
    original = next((p.original_perplexity for p in [plan, *view.plans] if p.original_perplexity), None)
    tested = answer.value_of(view, Subject(ORIGINAL), "perplexity", "token_perplexity")
    profiles = [None if p is None else _profile(view, p, target) for p in (None, *shown)]
    rows: list[list[object]] = [
        ["FP16, the original", Cell(size(base), base), Cell("100 %", base), "0",
         f"{tested.value:.2f}" if tested else "–", "0",
         "–" if original is None else f"{original:.2f}", "0", "1", _memory(_fp16_profile(view, target))]
    ]  # fmt: skip
    for p, profile in zip(shown, profiles[1:], strict=True):
        bytes_ = view.bytes_of(p, target)
        wanted = (("divergence", "kl_mean"), ("perplexity", "token_perplexity"))
        file = Subject(ARTIFACT, p.name, target)
        kl, perplexity = (answer.value_of(view, file, *what) if target else None for what in wanted)
        ratio = answer.speed_ratio(profile) if profile else None
        rows.append(
            [p.title, Cell(size(bytes_), bytes_), Cell(percent(bytes_ / base, 1), bytes_), with_error(kl),
             "–" if perplexity is None else f"{perplexity.value:.2f}", with_error(p.kl), fixed_with_error(p.perplexity),
             number(p.row.predicted_kl), ratio.brief if ratio else "–", _memory(profile)]
        )  # fmt: skip
    columns = [
        text_column("file" if target else "plan"), Column("size"), Column("of FP16"), Column(f"KL, test {text}"),
        Column(f"perplexity, test {text}"), Column(f"KL, held-out {text}"), Column(f"perplexity, held-out {text}"),
        Column("predicted KL"), Column("speed, × FP16"), Column("peak memory"),
    ]  # fmt: skip
    kept = [i for i in range(len(columns)) if any(row[i] != "–" for row in rows[1:])]
    title = f"Files for {runtime_title(target)}" if target else "Plans"
    return table([columns[i] for i in kept], [[row[i] for i in kept] for row in rows],
                 highlight=[1 + shown.index(plan)], caption=title)  # fmt: skip


def _beside(view: RunView, plan: PlanView) -> list[PlanView]:
    """The other plans of its target, without FP16, which has its own row."""
    others = [p for p in view.plans_of(plan.target) if set(p.stored.values()) - {FP16}]
    return sorted(others, key=lambda p: -view.bytes_of(p, plan.target))


def _profile(view: RunView, plan: PlanView, target: str | None) -> Profile | None:
    profiles = answer.best_profiles(view, plan)
    return next((p for p in profiles if target is None or p.subject.target == target), None)


def _fp16_profile(view: RunView, target: str | None) -> Profile | None:
    """Of the file that the others' ratios are to."""
    bases = {p.settings.get("ratios_to") for p in view.profiles if answer.speed_ratio(p) is not None}
    found = (p for p in view.profiles if p.subject.label in bases and target in (None, p.subject.target))
    return next(found, None)


def _memory(profile: Profile | None) -> object:
    if profile is None or not profile.peak_memory_bytes:
        return "–"
    return Cell(size(profile.peak_memory_bytes), profile.peak_memory_bytes)


def _protocol(view: RunView) -> str:
    texts = list(dict.fromkeys(p.measured_on for p in view.plans if p.measured_on))
    predicted = "Predicted KL: the sum of what each component loses alone"
    factor = next((p.plan.interaction for p in view.plans if p.plan.interaction != 1), None)
    predicted += "." if factor is None else f", times {factor:.3f}, which other plans were seen to lose more."
    if not texts:
        return predicted
    return (
        f"Held-out {view.unit.text}: {'; '.join(texts)}, whole plans in PyTorch, activations rounded as the runtime "
        f"does. ± is one standard error, for perplexities that of the difference from the original. {predicted}"
    )


# -- the charts -----------------------------------------------------------------------------------------------


def _amount(view: RunView, score: Score) -> str:
    """What a perplexity must name: window, stride, how much text."""
    window, stride = score.protocol.get("window"), score.protocol.get("stride")
    words = f"{score.tokens:,} {view.unit.one}s"
    return (
        words + (f", window {window}" if window else "") + (f", stride {stride}" if window and stride else "")
    )


def _predicted(view: RunView, stars: frozenset[str]) -> Html | None:
    """Is the prediction what the whole plan loses?"""
    shown = [
        (p, p.row.predicted_kl, p.kl)
        for p in view.plans
        if p.kl is not None and p.row.predicted_kl and p.row.predicted_kl > 0 and p.kl.value > 0
    ]
    if len(shown) < 2:
        return None
    dots = [
        Dot(predicted, kl.value, f"{p.title}\npredicted {number(predicted, 4)}\nmeasured {with_error(kl, 4)}",
            RECOMMENDED if p.name in stars else FAMILIES[p.family], kl.value - kl.standard_error,
            kl.value + kl.standard_error, p.label)
        for p, predicted, kl in shown
    ]  # fmt: skip
    values = [v for dot in dots for v in (dot.x, dot.y)]
    x, y = (axis(f"{name} KL, {view.nats}", values, log=True) for name in ("predicted", "measured"))
    ratios = sorted(kl.value / predicted for _, predicted, kl in shown)
    caption = f"Dashed: as predicted. Measured / predicted: {ratios[0]:.2f} to {ratios[-1]:.2f}, median "
    chart: Chart = scatter(x, y, dots, [Line([(x.low, x.low), (x.high, x.high)], dashed=True)])
    return figure("Predicted against measured", chart, f"{caption}{ratios[len(ratios) // 2]:.2f}.")


# -- every plan, every score ----------------------------------------------------------------------------------


def _plans(view: RunView, stars: frozenset[str]) -> Html:
    columns = [
        text_column("plan"), text_column("kind"), Column("size"), Column("of FP16"),
        Column("bits per weight"), Column("predicted KL"), Column(f"KL, held-out {view.unit.text}"),
        text_column("formats: components (share of the weights)"),
    ]  # fmt: skip
    rows: list[Sequence[object]] = [
        [p.name, FAMILIES[p.family], Cell(size(p.bytes), p.bytes),
         Cell(percent(p.bytes / view.fp16_of(p.target), 1), p.bytes), f"{p.row.bits_per_weight:.2f}",
         number(p.row.predicted_kl), with_error(p.kl), p.row.shares_text.replace(" %", "\u00a0%")]
        for p in view.plans
    ]  # fmt: skip
    highlight = [i for i, p in enumerate(view.plans) if p.name in stars]
    caption = "Every plan, by the name that commands know it by"
    return table(columns, rows, highlight=highlight, caption=caption, identifier="plans")


def _scores(view: RunView, stars: frozenset[str]) -> list[Html]:
    """Every perplexity and divergence that `evaluate` found, one table for each text and protocol."""
    texts: dict[str, dict[Subject, dict[str, Score]]] = {}
    for score in view.scores:
        if score.kind in ("perplexity", "divergence"):
            subjects = texts.setdefault(f"Every score on {score.what}: {_amount(view, score)}", {})
            subjects.setdefault(score.subject, {})[score.kind] = score
    columns = [
        text_column("file"), Column("size"), Column(view.unit.perplexity), Column("change, paired"),
        Column("word perplexity"), Column(f"KL, {view.nats}"), Column(f"same top {view.unit.guess.split()[-1]}, %"),
        text_column("agrees with PyTorch"),
    ]  # fmt: skip
    tables = []
    for caption, subjects in texts.items():
        order = sorted(subjects, key=lambda subject: subject.what != ORIGINAL)
        rows = [_score_row(view, subject, list(subjects[subject].values())) for subject in order]
        highlight = [i for i, subject in enumerate(order) if subject.own_plan in stars]
        tables.append(details(caption, table(columns, rows, highlight=highlight, caption=caption)))
    return tables


def _score_row(view: RunView, subject: Subject, scores: Sequence[Score]) -> list[object]:
    values = {k: v for score in scores for k, v in score.values.items()}
    bytes_, top = view.subject_bytes(subject), values.get("same_top")
    return [
        subject_title(subject),
        Cell(size(bytes_), bytes_),
        fixed_with_error(values.get("token_perplexity")),
        fixed_with_error(values.get("token_perplexity_change"), 3),
        fixed_with_error(values.get("word_perplexity")),
        with_error(values.get("kl_mean")),
        f"{100 * top.value:.2f}" if top else "–",
        view.verdicts.get((subject, scores[0].what), "–"),
    ]
