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


def image_windows(
    source: ImageSource, preparation: Preparation, names: Mapping[str, int], classes: int,
    *, length: int, windows: int | None, seed: int | None = None,
) -> Windows:  # fmt: skip
    """With a seed: windows of randomly chosen images; the first k of a larger draw are the draw of k. Without: all
    images, at most `windows`, in a fixed order that mixes the classes."""
    available = len(source.entries)
    count = windows or available // length
    if seed is None:
        count = min(available // length, count)
    if not count or count * length > available:
        count = max(count, 1)
        raise TextError(
            f"{source.label}: {count} windows of {length} images need {count * length:,} images, there are "
            f"{available:,}: ask for at most {available // length} windows, or give more"
        )
    order = list(range(available))
    random.Random(seed or 0).shuffle(order)
    numbers = source.classes(names, classes)
    pictures = []
    for entry in (source.entries[k] for k in order[: count * length]):
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
        stream_tokens=available,
    )
