"""Tries GGUF files in another process. `header.check_file` finds known causes of crashes; this finds the rest.

A file whose header matches the one recorded at export is ours and is opened directly.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from kl_lens.base.errors import TargetError
from kl_lens.run.records import Artifact
from kl_lens.targets import quarantine

if TYPE_CHECKING:
    from kl_lens.targets.gguf.session import GGUFSession

# Keys of an artifact's settings.
HEADER_DIGEST, TOKENIZER_CHECK = "header_digest", "tokenizer_check"


def header_digest(path: Path) -> str:
    """Digest of everything before the weights, in all parts: metadata, tokenizer, list of tensors."""
    from kl_lens.targets.gguf.header import read_header

    info = read_header(path)
    digest = hashlib.blake2b(digest_size=16)
    for part in info.paths:
        offsets = (entry.offset for entry in info.tensors if entry.path == part)
        with part.open("rb") as file:
            digest.update(file.read(min(offsets, default=part.stat().st_size)))
    return digest.hexdigest()


def require_safe(path: Path, artifact: Artifact | None) -> None:
    """Raises TargetError if opening this file would crash or hang the process."""
    if artifact is None or artifact.settings.get(HEADER_DIGEST) != header_digest(path):
        require_opened(path)


def require_opened(path: Path) -> None:
    """Raises TargetError if llama.cpp, in a separate process, cannot open and run it."""
    from kl_lens.targets.gguf.header import parts_of

    quarantine.require_opens(__name__, path, parts_of(path), "llama.cpp")


def try_out(path: Path, *, same_tokens: bool = True) -> None:
    from kl_lens.targets.gguf.session import open_session

    with open_session(path, threads=1) as session:
        logits = session.prefill([0, min(1, session.vocabulary - 1)])
        session.step(int(logits.argmax()))
        try:
            session.require_vocabulary()
        except TargetError:
            return
        session.detokenize(session.tokenize("The history of 12 cities."))
        if same_tokens:
            _require_same_tokens(session)


def _require_same_tokens(session: GGUFSession) -> None:
    """Raises TargetError if llama.cpp splits a sample string differently from the exported tokenizer."""
    from kl_lens.targets.artifacts import read_artifact
    from kl_lens.targets.gguf.tokenizer import differing_string

    try:
        check = read_artifact(session.path.parent).settings.get(TOKENIZER_CHECK)
    except TargetError:  # not exported by KL Lens: there is no record
        return
    if check and (text := differing_string(session.tokenize, check)) is not None:
        pre = session.file.metadata.get("tokenizer.ggml.pre")
        raise TargetError(
            f"{session.path}: llama.cpp's tokenizer ({pre}) splits text unlike the model's; export with "
            f"--without-tokenizer, for use with token ids. First difference: {text[:60]!r}"
        )
