"""Files side by side: which of them loses least for its size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from kl_lens.base.units import human_bytes
from kl_lens.evaluation.evaluator import ScoreJournal
from kl_lens.evaluation.judged import Judged, JudgedArtifact
from kl_lens.evaluation.scoring import divergence_values, likelihood_values
from kl_lens.evaluation.texts import EvaluationText
from kl_lens.planning import paired_difference
from kl_lens.planning.rivals import Windows
from kl_lens.run.records import Estimate

ONE_SIZE = 0.02  # files that differ by less than this share have one size


@dataclass(frozen=True)
class Entrant:
    """A file, its size, and what it loses on a text."""

    name: str
    runtime: str
    bytes: int
    values: dict[str, Estimate]  # kl_mean, token_perplexity, same_top
    windows: Windows  # mean KL of each

    @property
    def kl(self) -> float:
        return self.values["kl_mean"].value


def entrants(
    journal: ScoreJournal, subjects: Sequence[Judged], text: EvaluationText
) -> list[Entrant]:
    """The files among the subjects whose KL on this text the journal has, small ones first."""
    found = []
    files = [judged for judged in subjects if isinstance(judged, JudgedArtifact)]
    for judged, name in zip(
        files, short_names([str(judged.path) for judged in files]), strict=True
    ):
        known = [journal.window(judged, item, divergence=True) for item in text.items]
        if scores := [score for score in known if score is not None][
            : len(known) if all(known) else 0
        ]:
            kl = np.array([score.kl().mean(dtype=np.float64) for score in scores])
            values = divergence_values(scores) | likelihood_values(scores, task=text.task)
            shown = {
                key: values[key] for key in ("kl_mean", "token_perplexity", "same_top")
            }
            size = judged.target.loaded_bytes(judged.path)
            found.append(Entrant(name, judged.target.title, size, shown, kl))
    return sorted(found, key=lambda entrant: entrant.bytes)


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


def verdicts(files: Sequence[Entrant]) -> Iterator[str]:
    """A sentence for every file beside the best of those that are no larger, if that is better or as large."""
    for file in files:
        others = [
            f for f in files if f is not file and f.bytes <= (1 + ONE_SIZE) * file.bytes
        ]
        best = min(others, key=lambda f: f.kl, default=None)
        if best is None or (best.kl, best.name) > (file.kl, file.name):
            continue  # not beaten; its rivals of one size say so
        difference = paired_difference(file.windows, best.windows)
        apart = f"{difference.mean:.2g} ± {difference.standard_error:.1g} nats per token, paired by window"
        one_size = best.bytes >= (1 - ONE_SIZE) * file.bytes
        sizes = f"{human_bytes(best.bytes)} and {human_bytes(file.bytes)}"
        if difference.interval[0] > 0:
            why = "which has the same size" if one_size else "although it is smaller"
            yield f"{best.name} is better than {file.name}, {why} ({sizes}): its KL is lower by {apart}."
        else:
            both = f"{best.name} and {file.name} have the same size"
            what = both if one_size else f"{best.name} is smaller than {file.name}"
            yield f"{what} ({sizes}), and this text does not tell their KL apart: {apart}."
