"""Images as ids, so that windows of images are what windows of tokens are: rows of integers.

An image's id is a hash of its pixels and its label. Whoever feeds a model looks the pixels up here by id; whoever
stores, compares or resumes windows never meets them. The album lives as long as the process, and holds what was opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kl_lens.errors import TextError

UNLABELLED = -1
Pixels = npt.NDArray[np.uint8]  # (channels, height, width), or a batch of those


@dataclass(frozen=True, eq=False)
class Picture:
    """An image as a model wants it, before its numbers are normalised."""

    name: str
    pixels: Pixels
    label: int  # UNLABELLED where nobody says

    @property
    def sha256(self) -> str:
        """Of the pixels alone: the same image under another label or name is the same image."""
        return hashlib.sha256(self.pixels.tobytes()).hexdigest()


_ALBUM: dict[int, Picture] = {}


def add_picture(picture: Picture) -> int:
    """The picture's id; the same for the same pixels and label."""
    about = f"{picture.pixels.shape} {picture.label} "
    digest = hashlib.blake2b(about.encode() + picture.pixels.tobytes(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1  # fits into an int64
    _ALBUM.setdefault(number, picture)
    return number


def pixels_of(ids: Iterable[int]) -> Pixels:
    """(images, channels, height, width)"""
    return np.stack([_picture(number).pixels for number in ids])


def labels_of(ids: Iterable[int]) -> list[int]:
    return [_picture(number).label for number in ids]


def _picture(number: int) -> Picture:
    if number not in _ALBUM:
        raise TextError(
            f"no image with the id {number} was opened; ids of images last as long as the process"
        )
    return _ALBUM[number]
