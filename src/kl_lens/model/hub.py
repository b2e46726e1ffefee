"""Models on the Hugging Face hub: the files that are needed, of one commit, from the local cache if they are there."""

from __future__ import annotations

import errno
import glob
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kl_lens.base.errors import CheckpointError, one_line
from kl_lens.base.units import human_bytes
from kl_lens.model.files import INDEXES, SINGLE, weight_files

_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?(@[\w./-]+)?$")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
# Everything but weights; their indexes are chosen with them.
_SMALL_FILE = re.compile(
    r"\.py$|^[^/]*(?<!\.index)\.(json|txt|model|jinja|kltable)$|^README\.md$"
)
_CONNECT_SECONDS = 10.0


# Opens a display of progress, by its title: with `started(total, done)` and `advanced(work, what)`.
Watch = Callable[[str], AbstractContextManager[Any]]


def download(text: str, *, weights: bool = True, watch: Watch | None = None) -> Path:
    """The folder of a snapshot, named after its commit. A commit that is in the cache needs no network.

    Args:
        weights: also the weights: safetensors, or .bin files if there are no others.
        watch: opens a display of progress, by its title.
    """
    if not _NAME.match(text) or text.startswith((".", "/")):
        raise CheckpointError(f"{text}: no such folder, and not a hub id (owner/name)")
    repo, _, revision = text.partition("@")
    if _COMMIT.match(revision) and (folder := _cached(repo, revision, weights)):
        return folder
    try:
        return _from_hub(repo, revision or None, weights, watch)
    except CheckpointError:
        raise
    except Exception as error:  # of the client, of its HTTP library, of the system
        # Without a connection, or no longer on the hub, but in the cache.
        usable = not isinstance(error, RevisionNotFoundError) and not _is_full(error)
        if usable and (folder := _cached(repo, revision, weights)):
            return folder
        raise CheckpointError(_why(repo, revision, error)) from error


def pinned_name(folder: Path) -> str:
    """`org/name@commit` of a snapshot folder."""
    return f"{folder.parent.parent.name.removeprefix('models--').replace('--', '/', 1)}@{folder.name}"


def _from_hub(
    repo: str, revision: str | None, weights: bool, watch: Watch | None
) -> Path:
    info = HfApi().model_info(
        repo, revision=revision, files_metadata=True, timeout=_CONNECT_SECONDS
    )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    chosen = [name for name in sizes if _SMALL_FILE.search(name)]
    if weights:
        chosen += _weights(info.id, str(info.sha), sizes)
    needed = sum(
        sizes[name]
        for name in chosen
        if not isinstance(try_to_load_from_cache(info.id, name, revision=info.sha), str)
    )
    cache = Path(constants.HF_HUB_CACHE)
    disk = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    if needed > (free := shutil.disk_usage(disk).free):
        raise CheckpointError(
            f"{repo} needs {human_bytes(needed)} in {cache}, where {human_bytes(free)} are free; free some space, or "
            "set HF_HOME to a place on another disk"
        )
    renamed = "" if info.id == repo else f" (renamed from {repo})"
    title = f"downloading {info.id}{renamed}"
    blobs = cache / f"models--{info.id.replace('/', '--')}" / "blobs"
    with _watched(title, needed, blobs, watch):
        patterns = [glob.escape(name) for name in chosen]
        return Path(
            snapshot_download(info.id, revision=revision, allow_patterns=patterns)
        )


def _weights(repo: str, commit: str, sizes: dict[str, int]) -> list[str]:
    """The names of the weight files and their index: safetensors before .bin twins."""
    for index, single in zip(INDEXES, SINGLE, strict=True):
        if index in sizes:
            path = Path(hf_hub_download(repo, index, revision=commit))
            content = json.loads(path.read_bytes())
            shards = sorted(set(content["weight_map"].values()))
            if missing := [name for name in shards if name not in sizes]:
                raise CheckpointError(
                    f"{repo}: {index} names {missing[0]}, which the hub does not have"
                )
            return [index, *shards]
        if single in sizes:
            return [single]
    suffixes = (".gguf", ".onnx", ".pth", ".pt", ".msgpack", ".h5", ".safetensors")
    unreadable = next((name for name in sizes if name.endswith(suffixes)), "")
    instead = f" (it has {unreadable})" if unreadable else ""
    raise CheckpointError(
        f"{repo} has no safetensors weights{instead}; name the original model's repository"
    )


def _cached(repo: str, revision: str, weights: bool) -> Path | None:
    """The snapshot in the cache, if it is whole."""
    try:
        path = snapshot_download(
            repo,
            revision=revision or None,
            local_files_only=True,
            allow_patterns=["config.json"],
        )
        folder = Path(path)
        if weights:
            weight_files(folder)
        return folder
    except (OSError, ValueError, CheckpointError):
        return None


def _why(repo: str, revision: str, error: Exception) -> str:
    """One line about an error of the client."""
    at = f" at revision {revision}" if revision else ""
    if isinstance(error, GatedRepoError):
        return f"{repo} is gated; accept its terms on the hub and run `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}"
    if isinstance(error, RepositoryNotFoundError):
        return f"{repo}: no such folder here and no such repository on the hub (private ones need `hf auth login`)"
    if _is_full(error):
        return (
            f"{repo}: the disk of {constants.HF_HUB_CACHE} is full; free some space, or set HF_HOME to a place on "
            "another disk, and run the command again: finished files are kept"
        )
    no_connection = isinstance(error, LocalEntryNotFoundError | ConnectionError)
    if no_connection or "Connect" in type(error).__name__:
        return (
            f"{repo}{at} is not a folder, is not in the local hub cache as a whole, and the hub cannot be reached; "
            "check the spelling, go online once, or give a folder"
        )
    return f"{repo}{at} could not be downloaded from the hub: {one_line(error)}"


def _is_full(error: BaseException | None) -> bool:
    """Whether a full disk is behind an error of the client."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _watched(title: str, total: int, blobs: Path, watch: Watch | None) -> Iterator[None]:
    """Shows how much has arrived in the cache: the client's own bars differ from version to version."""
    if watch is None or not total:
        yield
        return

    def arrived() -> int:
        sizes = 0
        for file in blobs.glob("*"):
            with suppress(OSError):  # renamed meanwhile
                sizes += file.stat().st_size
        return sizes

    def look(progress: Any, before: int) -> None:
        progress.started(float(total), 0.0)
        while not finished.wait(0.5):
            current = arrived()
            progress.advanced(float(current - before), "")
            before = current

    finished = threading.Event()
    with watch(title) as progress, ThreadPoolExecutor(1) as looking:
        looking.submit(look, progress, arrived())
        try:
            yield
        finally:
            finished.set()
