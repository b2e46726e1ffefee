"""`merge`: joins the measurements of several processes into one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kl_lens.base.errors import RunError
from kl_lens.run import merging
from kl_lens.run.folder import Run
from kl_lens.run.merging import Joined, shards_of
from kl_lens.study.session import Session
from kl_lens.study.settings import Settings, command_of, option, with_options


@with_options
class MergeSettings(Settings):
    run: str = option(
        help="the run folder to merge into; created if missing",
        positional=True,
        metavar="RUN",
    )
    sources: tuple[str, ...] = option(
        (),
        "folders to merge (default: the run's shards)",
        positional=True,
        nargs="*",
        metavar="FROM",
    )


@dataclass(frozen=True)
class MergeResult:
    folder: Path
    joined: list[Joined]
    missing: int  # candidate × window pairs that no source has
    failures: dict[str, str] = field(default_factory=dict)  # source → why it was refused


def merge(settings: MergeSettings, session: Session) -> MergeResult:
    folder = Path(settings.run)
    sources = [Path(source) for source in settings.sources] or shards_of(folder)
    if not sources:
        raise RunError(
            f"{folder / merging.SHARDS} holds no shards; name them: kl-lens merge RUN FROM …"
        )
    joined, refused = merging.merge(folder, sources, ["kl-lens", *command_of(settings)])
    missing = 0
    if joined:
        with Run.open(folder) as run:
            missing = merging.missing(run)
    return MergeResult(folder, joined, missing, refused)
