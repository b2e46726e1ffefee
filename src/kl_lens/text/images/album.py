"""Images as ids, so that windows of images are rows of integers, like windows of tokens.

An image's id is a hash of its pixels and its label. Pixels are looked up here by id when a model runs. The album holds
what was opened in this process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kl_lens.base.errors import TextError

UNLABELLED = -1
Pixels = npt.NDArray[np.uint8]  # (channels, height, width), or a batch of those


@dataclass(frozen=True, eq=False)
class Picture:
    """An image resized for a model, before normalisation."""

    name: str
    pixels: Pixels
    label: int  # UNLABELLED if unknown

    @property
    def sha256(self) -> str:
        """Of the pixels only, not of label or name."""
        return hashlib.sha256(self.pixels.tobytes()).hexdigest()


_ALBUM: dict[int, Picture] = {}


def add_picture(picture: Picture) -> int:
    """Adds a picture; returns its id."""
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
        raise TextError(f"no image with the id {number} was opened in this process")
    return _ALBUM[number]
