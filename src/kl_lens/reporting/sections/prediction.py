"""Does KL on calibration text predict the damage on held-out text?"""

from __future__ import annotations

from kl_lens.measuring.correlation import Correlation, Ranking
from kl_lens.reporting.data import KL, RunView
from kl_lens.reporting.figures.damage import METRIC_NAMES, damage_scatter, tau_rows
from kl_lens.reporting.markup import Html, join
from kl_lens.reporting.numbers import number
from kl_lens.reporting.sections import Section
from kl_lens.reporting.sections.words import command, details, grid, heading, note, paragraph
from kl_lens.reporting.tables import Column, table, text_column

TITLE = "Does KL predict the damage?"
_DAMAGES = {"perplexity": "change in perplexity", "divergence": "KL on held-out text"}


def section(view: RunView) -> Section | None:
    ranking = view.ranking
    if ranking is None or not ranking.points:
        return None
    formats = list(dict.fromkeys(p.format for p in ranking.points))
    parts = [
        paragraph(
            "Each dot is one component in one format: its KL on calibration text against what it does to "
            f"{ranking.evaluation_tokens:,} tokens of held-out text, where the original's token perplexity is "
            f"{ranking.perplexity:.2f}. Error bars: one standard error, paired with the original; squares: the head."
        ),
        grid(
            damage_scatter(f, [p for p in ranking.points if p.format == f], _caption(ranking, f))
            for f in formats
        ),
        heading("Every metric, with little and with foreign calibration text"),
        grid(
            tau_rows(f"{f}: against the {_DAMAGES.get(damage, damage)}", correlations)
            for damage in dict.fromkeys(c.damage for c in ranking.correlations)
            for f in formats
            if (correlations := _main(ranking, damage, f))
        ),
        *_reliability(ranking),
        details("All correlations", _table(ranking)),
    ]
    return Section("prediction", TITLE, join(parts))


def _main(ranking: Ranking, damage: str, format_name: str) -> list[Correlation]:
    """All components, the head too."""
    return [c for c in ranking.correlations if c.with_head and (c.damage, c.format) == (damage, format_name)]


def _caption(ranking: Ranking, format_name: str) -> str:
    correlations = [c for c in _main(ranking, "perplexity", format_name) if c.metric == KL]
    if not correlations:
        return ""
    best = correlations[0]
    interval = f"95 % interval {best.low:.2f} to {best.high:.2f}"
    return f"Kendall's τ {best.tau:.2f} ({interval}), {best.candidates} components."


def _reliability(ranking: Ranking) -> list[Html]:
    lines = []
    for r in ranking.reliabilities:
        if r.with_head:
            words = (
                f"{r.format}: the damage spreads by {number(r.spread)} nats over components, the median error of one "
                f"is {number(r.median_error, 2)}, and two halves of the held-out text agree with τ "
                f"{r.split_half_tau:.2f}"
            )
            more = [": noise limits every τ here; more ", command("--evaluation-windows"), " would help."]
            lines.append(note(words, *(more if r.is_noisy else ["."])))
    return lines


def _table(ranking: Ranking) -> Html:
    columns = [
        text_column("damage"), text_column("format"), text_column("head"),
        text_column("calibration"), text_column("metric"), Column("candidates"), Column("τ"),
        Column("low"), Column("high"), Column("p"),
    ]  # fmt: skip
    rows = [
        [
            _DAMAGES.get(c.damage, c.damage), c.format, "with" if c.with_head else "without", c.calibration,
            METRIC_NAMES.get(c.metric, c.metric), c.candidates, f"{c.tau:.3f}", f"{c.low:.3f}", f"{c.high:.3f}",
            f"{c.p_value:.1e}",
        ]
        for c in ranking.correlations
    ]  # fmt: skip
    return table(columns, rows, caption="Kendall's τ of every metric with the damage")
