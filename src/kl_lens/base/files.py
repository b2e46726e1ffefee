"""Atomic writing of files, and of folders whose files change all together or not at all; digests; shipped files.

A process can be killed at any moment. One file is written next to its place and renamed. Several files that belong
together are written into a hidden folder; one rename makes them count, and the next process that comes finishes moving
them. What a killed process left is removed by the next one that writes there.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kl_lens.base import system
from kl_lens.base.accelerators import on_host
from kl_lens.base.errors import KLLensError, system_error
from kl_lens.base.lazy import torch
from kl_lens.base.system import processors

MODEL_FILE = "config.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
RECORD_FILE = "artifact.json"  # describes the other files; moved last, removed first
DIGESTS = ".digests"  # of large files; deleted with them
LFS_POINTER = b"version https://git-lfs"  # what Git leaves of a large file
_WRITING = ".writing"
_DECIDED = ".decided"


def write_text(path: Path, content: str) -> None:
    """Replaces the content of `path` atomically; on failure the old file stays."""
    with whole(path) as temporary:
        temporary.write_text(content, encoding="utf-8")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a temporary path that is renamed to the real one at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_files(path.parent)
    lock, handle = _locked_file(path)
    temporary = _content_of(lock)
    try:
        with naming(path):
            yield temporary
            # Some libraries make files that nobody else may read.
            shutil.copymode(lock, temporary)
            system.rename_over(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        system.remove_locked(lock, handle)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system that name no file get this one's name."""
    try:
        yield
    except Exception as error:
        failure = system_error(error)
        if failure is None or failure.filename is not None:
            raise
        raise OSError(failure.errno, failure.strerror, str(path)) from error


def damage(path: Path) -> str:
    """What is wrong with a file that no reader understands, and what to do."""
    with suppress(OSError):
        with path.open("rb") as file:
            start = file.read(200).lstrip().lower()
        if start.startswith(LFS_POINTER):
            return "is a pointer of Git LFS; run `git lfs pull` in its folder"
        if start.startswith((b"<!doctype", b"<html")):
            return "is a web page; download the file itself"
        if not start:
            return "is empty; download it again"
    return "is damaged or incomplete; download it again"


def _locked_file(path: Path) -> tuple[Path, int]:
    """A new, empty file; its lock shows that the writer of its content is alive."""
    while True:
        lock = path.parent / f".{path.name[:100]}.{secrets.token_hex(4)}{_WRITING}"
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        system.lock(handle, wait=True)
        if os.fstat(handle).st_nlink:
            # Without a link, another process removed it before it was locked.
            return lock, handle
        os.close(handle)


def _content_of(lock: Path) -> Path:
    """Apart from the lock: safetensors replaces the file that it writes, and a lock would be gone with it."""
    return lock.with_name(f"{lock.name}-content")


def _clear_files(folder: Path) -> None:
    """Removes temporary files of killed processes."""
    for leftover in folder.glob(f".*{_WRITING}"):
        with suppress(OSError):
            handle = os.open(leftover, os.O_RDONLY)
            if leftover.is_file() and system.lock(handle, wait=False):
                _content_of(leftover).unlink(missing_ok=True)
                system.remove_locked(leftover, handle)
            else:
                os.close(handle)


# -- what is not ours ------------------------------------------------------------------------------------------


def require_outside_models(path: Path, label: str) -> None:
    """Raises if an output that the user named (`label`: the flag) is a model's folder, or lies in one."""
    output = Path(os.path.realpath(path))
    for folder in (output, *output.parents):
        is_model = os.path.isfile(folder / MODEL_FILE)
        if not is_model or os.path.exists(folder / RECORD_FILE):
            continue
        if folder == output or any(any(folder.glob(weights)) for weights in _WEIGHTS):
            raise KLLensError(
                f"{label} {path}: {folder} holds a model ({MODEL_FILE}); use a place outside it"
            )


def require_own_file(path: Path, label: str, mark: str) -> None:
    """Raises if an output that the user named would replace a file that KL Lens did not make; those it made have `mark`
    near their beginning."""
    if not os.path.lexists(path):
        return
    if path.is_dir():
        raise KLLensError(f"{label} {path} is a folder; it needs a file")
    with suppress(OSError), path.open("rb") as file:
        if mark.encode() in file.read(1 << 14):
            return
    raise KLLensError(
        f"{label} {path}: the file that is there was not made by {label}; use another name, or delete it"
    )


def require_own_folder(folder: Path) -> None:
    """Raises if a folder for exported files holds others."""
    if (folder / RECORD_FILE).exists() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if not path.name.startswith("."):
            raise KLLensError(
                f"{folder} holds {path.name} and no {RECORD_FILE}, so KL Lens did not export it; delete it, or use "
                "another folder"
            )


# -- folders -------------------------------------------------------------------------------------------------


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields an empty folder. At the end its files move to `folder` all together; on failure, or if the process is
    killed, the old files stay. Other files in the folder are not touched."""
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with system.locked_folder(folder, wait=False) as alone:
            if not alone:
                raise KLLensError(
                    f"{folder}: another process is writing there; wait until it is done"
                )
            _finish(folder)
            for leftover in folder.glob(f"{_WRITING}*"):
                shutil.rmtree(leftover)
            staging = folder / _WRITING
            staging.mkdir()
            try:
                yield staging
                system.rename_over(staging, folder / _DECIDED)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            _finish(folder)
    except BaseException:
        if new:
            with suppress(OSError):
                folder.rmdir()
        raise


def settle(folder: Path) -> None:
    """Finishes what a killed process had decided. Call before reading a folder's record."""
    if not (folder / _DECIDED).exists():
        return
    try:
        # The holder is only moving files.
        with system.locked_folder(folder, wait=True):
            _finish(folder)
    except OSError as error:
        raise KLLensError(
            f"{folder}: an export was interrupted here and cannot be finished ({error.strerror}); export again"
        ) from error


def _finish(folder: Path) -> None:
    """Moves the files; every step can be repeated. Meanwhile the folder has no record, so that none can describe the
    wrong files."""
    decided = folder / _DECIDED
    if not decided.is_dir():
        return
    moved = sorted(decided.iterdir(), key=lambda path: path.name == RECORD_FILE)
    if moved:
        (folder / RECORD_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder / DIGESTS, ignore_errors=True)
    for path in moved:
        destination = folder / path.name
        if destination.is_dir():
            shutil.rmtree(destination)
        system.rename_over(path, destination)
        path.unlink(missing_ok=True)  # of two links to one file, rename leaves both
    decided.rmdir()


# -- digests and shipped files -------------------------------------------------------------------------------

_PIECE = 1 << 22  # bytes


def bytes_digest(*parts: npt.NDArray[Any], about: str = "") -> str:
    """Of the arrays' bytes, and of `about`: a digest of the digests of pieces, which several threads compute."""
    flat = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
    pieces = [
        part[first : first + _PIECE]
        for part in flat
        for first in range(0, len(part), _PIECE)
    ]
    total = hashlib.blake2b(about.encode(), digest_size=16)
    with ThreadPoolExecutor(processors()) as pool:
        # Starts no more threads than there are pieces.
        for digest in (
            pool.map(_digest, pieces) if len(pieces) > 2 else map(_digest, pieces)
        ):
            total.update(digest)
    return total.hexdigest()


def tensor_digest(*parts: torch.Tensor, about: str = "") -> str:
    bytes_of = (
        on_host(part).contiguous().reshape(-1).view(torch.uint8).numpy() for part in parts
    )
    return bytes_digest(*bytes_of, about=about)


def _digest(piece: npt.NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(piece.data).digest()  # processors have instructions for it


_PACKAGE = Path(__file__).resolve().parent.parent


def reference_path(*parts: str, package: Path = _PACKAGE) -> Path:
    """The path of a shipped file or folder, such as `reference_path("mamba")`: in a checkout in `reference/`, in an
    installed wheel in `kl_lens/_reference/`. Raises KLLensError if it is missing."""
    roots = [package / "_reference"]
    checkout = package.parent.parent
    # Without this test any folder `reference` two levels above site-packages would be accepted.
    if (checkout / "pyproject.toml").is_file() and package.parent.name == "src":
        roots.append(checkout / "reference")
    for path in (root.joinpath(*parts) for root in roots):
        if path.exists():
            return path
    raise KLLensError(
        f"{'/'.join(parts)}: not among the reference files of this installation ({package}): reinstall kl-lens, or "
        "run from a full checkout"
    )
