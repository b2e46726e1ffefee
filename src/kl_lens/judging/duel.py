"""Files side by side, as contenders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from kl_lens.base.errors import printable
from kl_lens.base.files import RECORD_FILE
from kl_lens.judging.choosing import Contender
from kl_lens.judging.evaluator import ScoreJournal
from kl_lens.judging.judged import Judged, JudgedArtifact
from kl_lens.judging.texts import EvaluationText
from kl_lens.model.tasks import TEXT
from kl_lens.run.readings import divergence_values, likelihood_values, window_kl
from kl_lens.run.records import Estimate
from kl_lens.targets.gguf.header import read_header

_OWNER = re.compile(r"^https?://[^/]+/([^/]+)/")
# The hub's cache, and the folders of LM Studio: models/OWNER/REPOSITORY/FILE.
_IN_FOLDERS = re.compile(r"/models--(.+?)--|/models/([^/]+)/[^/]+/[^/]+\.gguf$")


@dataclass(frozen=True)
class Entrant(Contender):
    """A file, its size, and what it loses on a text."""

    runtime: str
    maker: str  # as far as the file says
    values: dict[str, Estimate]  # kl_mean, token_perplexity, same_top


def entrants(
    journal: ScoreJournal, subjects: Sequence[Judged], text: EvaluationText
) -> list[Entrant]:
    """The files among the subjects whose KL on this text the journal has, small ones first."""
    judged_files = []
    files = [judged for judged in subjects if isinstance(judged, JudgedArtifact)]
    names = short_names([str(judged.path) for judged in files])
    for judged, name in zip(files, names, strict=True):
        readings = [*journal.readings(judged, text.items, divergence=True).values()]
        if not readings or len(readings) < len(text.items):
            continue
        values = divergence_values(readings)
        values |= likelihood_values(readings, images=text.task != TEXT)
        size = judged.target.loaded_bytes(judged.path)
        kl = values["kl_mean"].value
        shown = {key: values[key] for key in ("kl_mean", "token_perplexity", "same_top")}
        title = judged.target.title
        maker = maker_of(judged.path)
        windows = window_kl(readings)
        judged_files.append(Entrant(name, size, kl, windows, title, maker, shown))
    return sorted(judged_files, key=lambda entrant: entrant.bytes)


def maker_of(path: Path) -> str:
    """Who made a file: as it says itself, else the owner of the hub's repository that it lies in; empty: not known."""
    if (path / RECORD_FILE).is_file():
        return "KL Lens"
    if path.suffix == ".gguf":
        metadata = read_header(path).metadata
        if maker := metadata.get("general.quantized_by"):
            return printable(str(maker))
        if match := _OWNER.search(str(metadata.get("general.repo_url", ""))):
            return printable(match[1])
    match = _IN_FOLDERS.search(path.absolute().as_posix())
    return "" if match is None else match[1] or match[2]


def short_names(files: Sequence[str]) -> list[str]:
    """The last parts of paths, as many as tell them apart; `model.safetensors` and the like say nothing."""
    paths = [PurePath(file) for file in files]
    dull = ("model", "openvino_model")
    parts = [(p.parent if p.name.startswith(dull) else p).parts for p in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(ends[-count:]) for ends in parts]
        if len(set(names)) == len(names):
            return names
    return list(files)
