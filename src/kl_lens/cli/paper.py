"""`kl-lens paper`: which metric predicts the loss, or what was read."""

from __future__ import annotations

from kl_lens.cli.console import console, table
from kl_lens.paper.ranking import Ranking
from kl_lens.study.paper import Imported


def show(result: Ranking | Imported) -> None:
    if isinstance(result, Imported):
        print(f"imported {result.measurements} published measurements of {result.model} into {result.folder}")
        return
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
        for c in result.correlations
    ]
    out = console()
    out.print(table("Kendall τ between a metric and the damage (95 % interval)", rows))
    out.print(
        "Damage: change in cross-entropy (perplexity) and KL from the original (divergence), "
        f"on {result.evaluation_tokens:,} held-out tokens, paired; "
        f"the original's token perplexity there is {result.perplexity:.3f}."
    )
    noisy = ": errors are large compared with the spread, so noise limits τ; raise --evaluation-windows"
    for r in result.reliabilities:
        out.print(
            f"{r.format}, {'with' if r.with_head else 'without'} the head: spread of the damage {r.spread:.2e} nats, "
            f"median error {r.median_error:.1e}, split-half τ {r.split_half_tau:.3f}"
            + (noisy if r.is_noisy else ".")
        )
