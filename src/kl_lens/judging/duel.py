"""Files side by side, as contenders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from kl_lens.judging.choosing import Contender
from kl_lens.judging.evaluator import ScoreJournal
from kl_lens.judging.judged import Judged, JudgedArtifact
from kl_lens.judging.texts import EvaluationText
from kl_lens.model.tasks import TEXT
from kl_lens.run.readings import divergence_values, likelihood_values, window_kl
from kl_lens.run.records import Estimate


@dataclass(frozen=True)
class Entrant(Contender):
    """A file, its size, and what it loses on a text."""

    runtime: str
    values: dict[str, Estimate]  # kl_mean, token_perplexity, same_top


def entrants(
    journal: ScoreJournal, subjects: Sequence[Judged], text: EvaluationText
) -> list[Entrant]:
    """The files among the subjects whose KL on this text the journal has, small ones first."""
    judged_files = []
    files = [judged for judged in subjects if isinstance(judged, JudgedArtifact)]
    names = short_names([str(judged.path) for judged in files])
    for judged, name in zip(files, names, strict=True):
        readings = list(journal.readings(judged, text, divergence=True).values())
        if not readings or len(readings) < len(text.items):
            continue
        values = divergence_values(readings) | likelihood_values(
            readings, images=text.task != TEXT
        )
        shown = ("kl_mean", "token_perplexity", "same_top")
        entrant = Entrant(
            name,
            judged.target.loaded_bytes(judged.path),
            values["kl_mean"].value,
            window_kl(readings),
            judged.target.title,
            {key: values[key] for key in shown},
        )
        judged_files.append(entrant)
    return sorted(judged_files, key=lambda entrant: entrant.bytes)


def short_names(places: Sequence[str]) -> list[str]:
    """The last parts of paths, as many as tell them apart; `model.safetensors` and the like say nothing."""
    paths = [PurePath(place) for place in places]
    paths = [
        p.parent if p.name.startswith(("model", "openvino_model")) else p for p in paths
    ]
    for count in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return list(places)
