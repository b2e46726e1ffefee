"""`publish`: a file with its proof, as a folder and as a repository on the hub."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_lens import planning
from kl_lens.base.errors import KLLensError, RunError, one_line
from kl_lens.base.files import RECORD_FILE, replacing, require_own_folder
from kl_lens.run.folder import Run, recommended_name
from kl_lens.run.records import ARTIFACT
from kl_lens.run.sharing import SHARED, write_shared
from kl_lens.study import settings as of
from kl_lens.study.events import Events
from kl_lens.study.session import Session
from kl_lens.study.settings import Settings, option, with_options
from kl_lens.targets import TARGETS, describe_target, earlier_artifact, locate

_INHERITED = ("license", "license_name", "license_link", "language")


@with_options
class PublishSettings(Settings):
    run: str = option(help="the run folder", positional=True, metavar="RUN")
    target: str = option(
        help="whose file to publish", positional=True, choices=TARGETS, metavar="TARGET"
    )
    to: str = option(
        help="the repository on the hub; it is made if it does not exist",
        metavar="ORG/NAME",
    )
    plan: of.Name | None = option(
        None, "whose file it is (default: what the last kl-lens run recommends)"
    )
    base_model: str | None = option(
        None,
        "the original on the hub (default: where the run's model came from)",
        metavar="ORG/NAME",
    )
    license: str | None = option(
        None, "as the hub spells it (default: the original's)", metavar="ID"
    )
    private: bool = option(False, "make the repository private")
    out: of.OutputFolder | None = option(
        None,
        "where to write (default: RUN/published/TARGET; RUN/published/PLAN if it is not recommended-TARGET)",
    )
    dry_run: bool = option(False, "write the folder, upload nothing")

    def check(self) -> None:
        super().check()
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils._validators import validate_repo_id

        names = {"--to": self.to} | (
            {} if self.base_model is None else {"--base-model": self.base_model}
        )
        for flag, name in names.items():
            try:
                validate_repo_id(name)
            except HFValidationError as error:
                raise KLLensError(f"{flag} {name}: {one_line(error)}") from error
            if "/" not in name:
                raise KLLensError(f"{flag} {name}: expected ORG/NAME")


@dataclass(frozen=True)
class PublishResult:
    folder: Path
    files: dict[str, int]  # name → bytes
    url: str | None  # None: nothing was uploaded


def publish(settings: PublishSettings, session: Session) -> PublishResult:
    with Run.open(Path(settings.run)) as run:
        name = settings.plan or run.recommended(settings.target)
        plan_name = settings.target if name == recommended_name(settings.target) else name
        folder = settings.out or run.folder / "published" / plan_name
        card = _write(run, settings, name, folder, session.events)
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    url = None if settings.dry_run else _upload(settings, folder, card, session.events)
    return PublishResult(folder, files, url)


def _write(
    run: Run, settings: PublishSettings, name: str, folder: Path, events: Events
) -> Any:
    """Writes the folder; returns the client's own view of the card."""
    import pyarrow
    from huggingface_hub import ModelCard
    from pyarrow import parquet

    from kl_lens.reporting.card import CHART, card, chart, front_matter, score_of
    from kl_lens.reporting.data import collect

    path, artifact = locate(run.artifact_folder(f"{settings.target}/{name}"))
    view = collect(run)
    plan = view.plan(name)
    if plan is None or artifact is None:
        raise RunError(
            f"{run.folder} has no plan {name}; it has {', '.join(p.name for p in view.plans)}"
        )
    if plan.target != settings.target:
        raise RunError(
            f"{name} was not made for {settings.target}; publish a plan of that target"
        )
    score = score_of(view, plan)
    if score is None or score.subject.what != ARTIFACT:
        raise RunError(
            f"{run.folder}: the file of {name} was not evaluated in its runtime, so there is nothing to show; run: "
            f"kl-lens evaluate --run {run.folder} --plan all --target {settings.target}"
        )
    source = str(view.identity.get("source", ""))
    base = settings.base_model or (source.partition("@")[0] if "@" in source else None)
    inherited = _original_card(source) | (
        {"license": settings.license} if settings.license else {}
    )
    if "license" not in inherited:
        events.warn(
            "the card names no licence, because the original's does not; name one with --license"
        )
    about = front_matter(view, plan, base, inherited)
    content = card(view, plan, artifact, score, settings.to, about)
    parsed = ModelCard(content)
    if parsed.data.to_dict() != about:
        raise RunError(
            f"{run.folder}: the card's front matter cannot be read back; please report it"
        )
    earlier = earlier_artifact(folder)
    require_own_folder(folder)
    with replacing(folder) as new:
        for file in (*artifact.files, RECORD_FILE):
            _link(path / file, new / file)
        shutil.copyfile(planning.plan_path(run.folder / "plans", name), new / "plan.json")
        rows = run.table(target=settings.target).rows()
        parquet.write_table(
            pyarrow.Table.from_pylist(rows), new / "sensitivities.parquet"
        )
        write_shared(run, new / SHARED)
        (new / CHART).write_text(chart(view, plan), encoding="utf-8")
        (new / "README.md").write_text(content, encoding="utf-8")
        for beside, text in describe_target(settings.target).beside(artifact).items():
            (new / beside).write_text(text, encoding="utf-8")
    for file in set(earlier.files if earlier else ()) - set(
        artifact.files
    ):  # or they would be uploaded too
        (folder / file).unlink(missing_ok=True)
    return parsed


def _original_card(source: str) -> dict[str, Any]:
    """What the original's card says that holds for the file too."""
    from huggingface_hub import ModelCard

    from kl_lens.model import model_folder

    try:
        metadata = ModelCard.load(model_folder(source) / "README.md").data.to_dict()
    except (
        KLLensError,
        OSError,
        ValueError,
        TypeError,
    ):  # moved, without a card, or one that cannot be read
        return {}
    return {name: metadata[name] for name in _INHERITED if metadata.get(name)}


def _link(source: Path, path: Path) -> None:
    """Weights need no second place on the disk."""
    try:
        os.link(source.resolve(), path)
    except OSError:  # another disk
        shutil.copyfile(source, path)


def _upload(settings: PublishSettings, folder: Path, card: Any, events: Events) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        card.validate()  # by the hub, before anything is made there
        api = HfApi()
        api.create_repo(settings.to, private=settings.private, exist_ok=True)
        events.note(f"uploading {folder} to {settings.to}")
        message = f"Upload {settings.target} files by KL Lens"
        commit = api.upload_folder(
            repo_id=settings.to, folder_path=folder, commit_message=message
        )
    except (
        Exception
    ) as error:  # also of the client's HTTP library; a card that the hub does not accept
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            raise KLLensError(
                f"{settings.to}: the hub does not let you write there; run `hf auth login`"
            ) from error
        raise KLLensError(
            f"{settings.to}: not uploaded: {one_line(error)}; {folder} is complete"
        ) from error
    return str(commit.commit_url)
