"""A file from elsewhere is opened in a process of its own first: on some files llama.cpp ends the process it is in.

`header.check_file` finds the known ones; this finds the rest, and what hangs. A file that still has the header that
its export recorded is one of ours and goes straight in.

python -m kl_lens.targets.gguf.glass FILE
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from kl_lens.environment import for_child
from kl_lens.errors import KLLensError, TargetError, one_line
from kl_lens.records import Artifact

HEADER_DIGEST = "header_digest"  # of an artifact's settings
# Opening is reading: a second for every so many bytes, and enough for the libraries to load on a busy machine.
_SECONDS, _BYTES_PER_SECOND = 120, 20_000_000
_seen: set[tuple[str, int, int]] = set()  # files that stood it, as they were


def header_digest(path: Path) -> str:
    """Of everything before the weights: metadata, tokenizer, the list of tensors."""
    import hashlib

    from kl_lens.targets.gguf.header import read_header

    ends = min((entry.offset for entry in read_header(path).tensors), default=path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.blake2b(file.read(ends), digest_size=16).hexdigest()


def require_safe(path: Path, artifact: Artifact | None) -> None:
    """Raises TargetError where opening this file would end or hang the process."""
    if artifact is not None and artifact.settings.get(HEADER_DIGEST) == header_digest(path):
        return
    status = path.stat()
    stamp = (str(path.resolve()), status.st_size, status.st_mtime_ns)
    if stamp in _seen:
        return
    environment = for_child() | {"GGML_NO_BACKTRACE": "1"}  # else it starts a debugger on itself, for seconds
    limit = _SECONDS + status.st_size / _BYTES_PER_SECOND
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(path)], capture_output=True, env=environment, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise TargetError(f"{path}: llama.cpp hangs on it; export or download it again") from None
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        said = f" ({one_line(Exception(lines[-1]))})" if lines else ""
        raise TargetError(
            f"{path}: llama.cpp ends the process on it with {name}{said}; export or download it again"
        )
    if done.returncode:
        reason = lines[-1] if lines else f"opening it ended with {done.returncode}"
        raise TargetError(reason if str(path) in reason else f"{path}: {reason}")
    _seen.add(stamp)


def main() -> int:
    from kl_lens.targets.gguf.session import open_session

    try:
        with open_session(sys.argv[1], threads=1) as session:
            logits = session.prefill([0, min(1, session.vocabulary - 1)])
            session.step(int(logits.argmax()))
            try:
                session.require_vocabulary()
            except TargetError:
                return 0
            session.detokenize(session.tokenize("The history of 12 cities."))
    except KLLensError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
