"""Windows of images. Only chosen images are read."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

from kl_lens.base.errors import TextError
from kl_lens.text.images.album import UNLABELLED, Picture, add_picture
from kl_lens.text.images.preparing import Preparation
from kl_lens.text.images.sources import ImageSource
from kl_lens.text.windows import UsedDocument, Windows


def draw_images(
    source: ImageSource, preparation: Preparation, names: Mapping[str, int], classes: int,
    *, windows: int = 64, length: int = 16, seed: int = 42,
) -> Windows:  # fmt: skip
    """Windows of randomly chosen images; the first k of a larger draw are the draw of k."""
    available = len(source.entries)
    if windows * length > available:
        raise TextError(
            f"{source.label}: {windows} windows of {length} images need {windows * length:,} images, there are "
            f"{available:,}: ask for at most {available // length} windows, or give more"
        )
    return _cut(source, preparation, names, classes, windows, length, seed)


def images_from_start(
    source: ImageSource, preparation: Preparation, names: Mapping[str, int], classes: int,
    *, length: int = 16, limit: int | None = None,
) -> Windows:  # fmt: skip
    """Windows of all images, at most `limit`, in a fixed random order that mixes the classes."""
    available = len(source.entries)
    count = min(available // length, limit or available)
    if not count:
        raise TextError(f"{source.label}: {available} images, fewer than one window of {length}: give more")
    return _cut(source, preparation, names, classes, count, length, None)


def _cut(
    source: ImageSource, preparation: Preparation, names: Mapping[str, int], classes: int,
    windows: int, length: int, seed: int | None,
) -> Windows:  # fmt: skip
    """`seed` None: from the start."""
    order = list(range(len(source.entries)))
    random.Random(seed or 0).shuffle(order)
    numbers = source.classes(names, classes)
    pictures = []
    for entry in (source.entries[k] for k in order[: windows * length]):
        label = UNLABELLED if entry.label is None else numbers[entry.label]
        pictures.append(Picture(entry.name, preparation.prepare(entry.read()), label))
    documents = [UsedDocument(picture.name, picture.sha256) for picture in pictures]
    starts = tuple(range(0, len(pictures), length))
    return Windows(
        ids=torch.tensor([add_picture(picture) for picture in pictures]).reshape(-1, length),
        source=source.name,
        split=source.split,
        order="sequential" if seed is None else "drawn",
        seed=seed,
        stride=length if seed is None else None,
        starts=starts,
        documents=tuple(tuple(documents[start : start + length]) for start in starts),
        stream_tokens=len(source.entries),
    )
