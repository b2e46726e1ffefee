"""The files side by side: size, loss, perplexity, speed; predictions against measurements; every plan."""

from __future__ import annotations

from collections.abc import Sequence

from kl_lens.reporting import answer
from kl_lens.reporting.charts import RECOMMENDED, Dot, Line, axis, scatter
from kl_lens.reporting.data import RunView
from kl_lens.reporting.frontier import FAMILIES
from kl_lens.reporting.markup import Cell, Html, Section, details, figure, join, note, table
from kl_lens.reporting.names import subject_title
from kl_lens.reporting.numbers import fixed_with_error, number, percent, size, with_error
from kl_lens.run.records import ORIGINAL, Score, Subject


def section(view: RunView) -> Section | None:
    if not view.plans:
        return None
    stars = answer.recommended_names(view)
    scores, chart, plans = _scores(view, stars), _predicted(view, stars), _plans(view, stars)
    parts = [
        *scores,
        details("Every plan, and what it is made of", plans) if scores else plans,
        note(_protocol(view)),
        details("Predicted against measured KL", chart) if chart else None,
    ]
    return Section("files", "The files", join(parts))


def _scores(view: RunView, stars: frozenset[str]) -> list[Html]:
    """What `evaluate` found, one table for each text and protocol."""
    texts: dict[str, dict[Subject, dict[str, Score]]] = {}
    for score in view.scores:
        if score.kind in ("perplexity", "divergence"):
            subjects = texts.setdefault(f"Files on {score.what}: {_amount(view, score)}", {})
            subjects.setdefault(score.subject, {})[score.kind] = score
    columns = ["file", "size", "KL", "predicted KL", view.unit.perplexity, "word perplexity", "change, paired",
               f"same top {view.unit.guess.split()[-1]}, %", "speed, × FP16", "peak memory",
               "agrees with PyTorch"]  # fmt: skip
    tables = []
    for caption, subjects in texts.items():
        order = sorted(subjects, key=lambda s: (s.target or "", -(view.subject_bytes(s) or 0), s.label))
        rows = [_score_row(view, subject, list(subjects[subject].values())) for subject in order]
        kept = [i for i in range(len(columns)) if any(row[i] != "–" for row in rows)]
        highlight = [i for i, subject in enumerate(order) if subject.own_plan in stars]
        shown = [[row[i] for i in kept] for row in rows]
        tables.append(table([columns[i] for i in kept], shown, highlight=highlight, caption=caption))
    return tables


def _score_row(view: RunView, subject: Subject, scores: Sequence[Score]) -> list[object]:
    values = {k: v for score in scores for k, v in score.values.items()}
    bytes_, top, plan = view.subject_bytes(subject), values.get("same_top"), view.plan(subject.own_plan or "")
    profile = next((p for p in view.profiles if p.subject.key == subject.key and p.protocol == "use"), None)
    ratio, memory = answer.speed_ratio(profile) if profile else None, profile and profile.peak_memory_bytes
    return [
        subject_title(subject),
        Cell(size(bytes_), bytes_),
        "0" if subject.what == ORIGINAL else with_error(values.get("kl_mean")),
        number(plan.plan.predicted_kl if plan else None),
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
    window, stride = score.protocol.get("window"), score.protocol.get("stride")
    words = f"{score.tokens:,} {view.unit.one}s"
    return (
        words + (f", window {window}" if window else "") + (f", stride {stride}" if window and stride else "")
    )


def _plans(view: RunView, stars: frozenset[str]) -> Html:
    text = f"held-out {view.unit.text}"
    columns = ["plan", "kind", "size", "of FP16", "bits per weight", "predicted KL", f"KL, {text}",
               f"perplexity, {text}", "formats: components (share of the weights)"]  # fmt: skip
    rows: list[Sequence[object]] = [
        [p.name, FAMILIES[p.family], Cell(size(p.bytes), p.bytes),
         Cell(percent(p.bytes / view.fp16_of(p.target), 1), p.bytes), f"{p.cost.bits_per_weight:.2f}",
         number(p.plan.predicted_kl), with_error(p.kl), fixed_with_error(p.perplexity),
         p.cost.shares_text.replace(" %", "\u00a0%")]
        for p in view.plans
    ]  # fmt: skip
    highlight = [i for i, p in enumerate(view.plans) if p.name in stars]
    caption = "Every plan, by the name that commands know it by"
    return table(columns, rows, highlight=highlight, caption=caption, identifier="plans")


def _protocol(view: RunView) -> str:
    texts = list(dict.fromkeys(p.measured_on for p in view.plans if p.measured_on))
    words = "KL in nats, ± one standard error; of perplexities, that of the difference from the original. "
    words += "Predicted KL: the sum of what each component loses alone"
    factor = next((space.factor for space in view.spaces.values() if space.factor != 1), None)
    words += "." if factor is None else f", times {factor:.3f}: other plans were seen to lose that much more."
    held_out = (
        f" Held-out {view.unit.text}: {'; '.join(texts)}, plans in PyTorch that rounds as the runtime does."
    )
    return words + (held_out if texts else "")


def _predicted(view: RunView, stars: frozenset[str]) -> Html | None:
    """Is the prediction what the whole plan loses?"""
    shown = [
        (p, p.plan.predicted_kl, p.kl)
        for p in view.plans
        if p.kl is not None and p.plan.predicted_kl and p.plan.predicted_kl > 0 and p.kl.value > 0
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
    chart = scatter(x, y, dots, [Line([(x.low, x.low), (x.high, x.high)], dashed=True)])
    return figure("Predicted against measured", chart.svg(), f"{caption}{ratios[len(ratios) // 2]:.2f}.")
