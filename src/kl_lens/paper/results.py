"""Writes `perplexity_results_{tag}.json` in the paper's layout: {model: {point: perplexity}}."""

from __future__ import annotations

import json
from pathlib import Path

from kl_lens.base.files import write_text
from kl_lens.base.units import tag_of
from kl_lens.evaluation.journal import read_scores
from kl_lens.evaluation.texts import EvaluationText, protocol_digest
from kl_lens.run.folder import Run


def write_published(run: Run, model: str, text: EvaluationText, tag: str | None = None) -> Path:
    """Token perplexities of everything in the run that was scored on this text.

    A plan computed in PyTorch is named after the plan; files are `TARGET/PLAN`.
    """
    points = {
        score.subject.label.removeprefix("torch/"): score.values["token_perplexity"].value
        for score in read_scores(run, "perplexity")
        if protocol_digest(score.protocol) == text.digest
    }
    path = run.folder / f"perplexity_results_{tag_of(tag or Path(text.label).name)}.json"
    write_text(path, json.dumps({model: points}, indent=1) + "\n")
    return path
