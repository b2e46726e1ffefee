"""`kl-lens rank --run DIR`: which metric predicts real damage?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.table import Table

from kl_lens.cli import options
from kl_lens.cli.progress import sweep_progress
from kl_lens.errors import RunError
from kl_lens.records import Component
from kl_lens.runs import CALIBRATION, EVALUATION, Run
from kl_lens.sensitivity.perturbation import Candidate
from kl_lens.sensitivity.ranking import Ranking, rank
from kl_lens.sensitivity.sweep import Sweep
from kl_lens.targets import deployed
from kl_lens.text import Windows, draw_windows, evaluation_windows, refuse_overlap
from kl_lens.units import parse_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_run_model(parser)
    parser.add_argument(
        "--evaluation-text",
        default="wikitext2:test",
        metavar="TEXT",
        help="held-out text (default: wikitext2:test)",
    )
    parser.add_argument(
        "--evaluation-windows",
        type=int,
        default=128,
        metavar="N",
        help="windows of held-out text (default: 128)",
    )
    parser.add_argument(
        "--other-text",
        action="append",
        default=[],
        metavar="TEXT",
        help="also calibrate on this out-of-domain text (may be repeated)",
    )
    parser.add_argument("--memory-budget", default="8GB", help="for cached states (default: 8GB)")
    options.add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    with options.open_run(arguments) as run:
        run.note_command(sys.argv)
        model = options.load_run_model(arguments, run)
        tokenizer = model.require_tokenizer()
        candidates = _measured(run)
        calibration = run.text_identity(CALIBRATION)
        if calibration is None:
            raise RunError(f"{run.folder} holds no measurements of our own; run kl-lens measure first")
        length, seed = calibration["length"], calibration["seed"]
        count = calibration["windows"]
        drawn = options.redraw(run, tokenizer)
        held_out = evaluation_windows(
            arguments.evaluation_text, tokenizer, length=length, limit=arguments.evaluation_windows
        )
        refuse_overlap(drawn, held_out)
        budget = parse_bytes(arguments.memory_budget)
        activations = run.identity.get("activations", "weights")
        context = deployed(activations) if activations != "weights" else None

        def sweep(windows: Windows, role: str, title: str) -> None:
            with sweep_progress(title) as progress:
                Sweep(
                    model,
                    run,
                    memory_budget=budget,
                    progress=progress,
                    deployed=context,
                    deployed_as=activations,
                ).measure(candidates, windows, role)

        try:
            sweep(held_out, EVALUATION, "damage on held-out text")
            for text in arguments.other_text:
                other = draw_windows(text, tokenizer, windows=count, length=length, seed=seed)
                refuse_overlap(other, held_out)
                sweep(other, f"{CALIBRATION}:{Path(other.source).stem}", f"calibration on {other.source}")
        except KeyboardInterrupt:
            print(
                f"\nkl-lens rank: stopped; the same command goes on from there ({run.folder})",
                file=sys.stderr,
            )
            return 130
        ranking = rank(run)
        run.store("ranking", "latest", ranking.to_json())
    if arguments.json:
        options.print_json(ranking.to_json())
    else:
        _print(ranking)
    return 0


def _measured(run: Run) -> list[Candidate]:
    components = {c["name"]: Component.from_json(c) for c in run.identity.get("components", [])}
    found = [Candidate(components[name], fmt) for name, fmt in run.measured_windows(CALIBRATION)]
    if not found:
        raise RunError(f"{run.folder} holds no measurements; run kl-lens measure first")
    order = {name: index for index, name in enumerate(components)}
    return sorted(found, key=lambda c: (order[c.component.name], c.format))


def _print(ranking: Ranking) -> None:
    console = options.console()
    table = Table(title="Kendall τ between a metric and the damage (95 % interval)", title_justify="left")
    for column in ("damage", "format", "head", "calibration", "metric"):
        table.add_column(column)
    for column in ("candidates", "τ", "interval", "p"):
        table.add_column(column, justify="right")
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
    console.print(table)
    console.print(
        "Damage: change in cross-entropy (perplexity) and KL from the original (divergence), "
        f"on {ranking.evaluation_tokens:,} held-out tokens, paired; "
        f"the original's token perplexity there is {ranking.perplexity:.3f}."
    )
    for r in ranking.reliabilities:
        head = "with" if r.with_head else "without"
        console.print(
            f"{r.format}, {head} the head: spread of the damage {r.spread:.2e} nats, "
            f"median error {r.median_error:.1e}, split-half τ {r.split_half_tau:.3f}"
            + (
                ": the error bars are large against the spread, so τ is limited by noise; raise --evaluation-windows"
                if r.is_noisy
                else "."
            )
        )
