"""GGUF files from elsewhere are tried out by another process. `header.check_file` finds what is known to end llama.cpp;
this finds the rest. A file that still has the header that its export recorded is one of ours and goes straight in."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kl_lens.errors import TargetError
from kl_lens.records import Artifact
from kl_lens.targets import quarantine

HEADER_DIGEST = "header_digest"  # of an artifact's settings


def header_digest(path: Path) -> str:
    """Of everything before the weights: metadata, tokenizer, the list of tensors."""
    from kl_lens.targets.gguf.header import read_header

    ends = min((entry.offset for entry in read_header(path).tensors), default=path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.blake2b(file.read(ends), digest_size=16).hexdigest()


def require_safe(path: Path, artifact: Artifact | None) -> None:
    """Raises TargetError where opening this file would end or hang the process."""
    if artifact is None or artifact.settings.get(HEADER_DIGEST) != header_digest(path):
        require_opened(path)


def require_opened(path: Path) -> None:
    """Raises TargetError where llama.cpp, in a process of its own, cannot open and run it."""
    quarantine.require_opens(__name__, path, [path], "llama.cpp")


def try_out(path: Path) -> None:
    from kl_lens.targets.gguf.session import open_session

    with open_session(path, threads=1) as session:
        logits = session.prefill([0, min(1, session.vocabulary - 1)])
        session.step(int(logits.argmax()))
        try:
            session.require_vocabulary()
        except TargetError:
            return
        session.detokenize(session.tokenize("The history of 12 cities."))
