"""Disk cache of quantized weights: content-addressed, atomic, safe to delete. What another process wrote is checked.

`objects/DIGEST.safetensors` hold weights under the digest of their content; `names/HASH` map requests to digests. Over
the budget, the least recently used go first.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kl_lens.base.accelerators import on_host
from kl_lens.base.files import whole, write_text
from kl_lens.weights.formats import Quantized


class DiskCache:
    def __init__(self, folder: Path, budget: int) -> None:
        self.folder = folder
        self._budget = budget
        self._sound: dict[str, int] = {}  # digest → time of a file that was written here, or checked

    def take(self, name: str) -> Quantized | None:
        """The weight stored under this name, if it exists and is undamaged."""
        try:
            digest = self._name(name).read_text(encoding="ascii").strip()
            path = self._object(digest)
            with safe_open(path, framework="pt") as file:
                known = file.metadata() or {}
                parts = {part: file.get_tensor(part) for part in file.keys()}  # noqa: SIM118
            shape = tuple(int(size) for size in known["shape"].split(","))
            quantized = Quantized(known["format"], shape, **parts)
            if self._sound.get(digest) == path.stat().st_mtime_ns:
                quantized = quantized.known_as(digest)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError):
            return None
        if quantized.digest != digest:  # damaged
            path.unlink(missing_ok=True)
            return None
        with suppress(FileNotFoundError):  # another store of this folder needed the room
            os.utime(path)
            self._sound[digest] = path.stat().st_mtime_ns
        return quantized

    def put(self, name: str, quantized: Quantized) -> None:
        path = self._object(quantized.digest)
        tensors = {part: on_host(tensor).contiguous() for part, tensor in quantized.tensors.items()}
        if sum(tensor.nbytes for tensor in tensors.values()) > self._budget:
            return
        shape = ",".join(str(size) for size in quantized.shape)
        with whole(path) as temporary:
            save_file(tensors, temporary, {"format": quantized.format, "shape": shape})
        with suppress(FileNotFoundError):  # as above
            self._sound[quantized.digest] = path.stat().st_mtime_ns
        write_text(self._name(name), quantized.digest + "\n")
        self._trim(path)

    def _trim(self, newest: Path) -> None:
        files = []
        for path in newest.parent.glob("*.safetensors"):
            with suppress(FileNotFoundError):  # another store of this folder was faster
                files.append((path.stat(), path))
        total = sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda item: item[0].st_mtime_ns):
            if total <= self._budget or path == newest:
                break
            path.unlink(missing_ok=True)
            total -= status.st_size

    def _object(self, digest: str) -> Path:
        if not digest.isalnum():
            raise ValueError(f"{digest!r} is not a digest")
        return self.folder / "objects" / f"{digest}.safetensors"

    def _name(self, name: str) -> Path:
        return self.folder / "names" / hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
