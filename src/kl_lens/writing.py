"""Files that are whole or not there: written beside their place, then renamed into it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_text(path: Path, content: str) -> None:
    """Replaces `path` by `content` in one step; on any failure the old file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        # mkstemp makes private files; a result is for everybody who may read the folder.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
