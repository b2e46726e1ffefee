"""`kl-lens paper`: which metric predicts the loss, or what was read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kl_lens.cli.console import console, new_table
from kl_lens.measuring.correlation import Ranking
from kl_lens.study.paper import Imported


def as_json(result: Ranking | Imported) -> dict[str, Any]:
    return (
        asdict(result) | {"folder": str(result.folder)} if isinstance(result, Imported) else result.to_json()
    )


def show(result: Ranking | Imported) -> None:
    if isinstance(result, Imported):
        print(f"imported {result.measurements} published measurements of {result.model} into {result.folder}")
    else:
        _show_ranking(result)


def _show_ranking(ranking: Ranking) -> None:
    title = "Kendall τ between a metric and the damage (95 % interval)"
    words = ("damage", "format", "head", "calibration", "metric")
    table = new_table(title, words, ("candidates", "τ", "interval", "p"))
    for c in ranking.correlations:
        table.add_row(
            c.damage,
            c.format,
            "with" if c.with_head else "without",
            c.calibration,
            c.metric,
            str(c.candidates),
            f"{c.tau:.3f}",
            f"{c.low:.3f} … {c.high:.3f}",
            f"{c.p_value:.1e}",
        )
    out = console()
    out.print(table)
    out.print(
        "Damage: change in cross-entropy (perplexity) and KL from the original (divergence), "
        f"on {ranking.evaluation_tokens:,} held-out tokens, paired; "
        f"the original's token perplexity there is {ranking.perplexity:.3f}."
    )
    for r in ranking.reliabilities:
        head = "with" if r.with_head else "without"
        out.print(
            f"{r.format}, {head} the head: spread of the damage {r.spread:.2e} nats, "
            f"median error {r.median_error:.1e}, split-half τ {r.split_half_tau:.3f}"
            + (
                ": errors are large compared with the spread, so noise limits τ; raise --evaluation-windows"
                if r.is_noisy
                else "."
            )
        )
