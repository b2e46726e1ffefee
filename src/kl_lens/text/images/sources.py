"""Images by name, as the command line gives it.

    digits, digits:test    the shipped ones: 1,797 handwritten digits of 8 × 8 pixels
    FOLDER, FOLDER:valid   FOLDER/CLASS/*.png, or files beside a labels.csv (file,label), or files without labels

Splits are `train`, `valid` and `test`: folders of these names, or else files assigned by a hash of their content,
half of them to `train`, so that copies of an image are always in the same split.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kl_lens.base.errors import TextError, one_line
from kl_lens.base.resources import reference_path
from kl_lens.text.images.album import Pixels

DIGITS = "digits"
TRAIN, VALID, TEST = SPLITS = ("train", "valid", "test")
_FOLDERS = {TRAIN: ("train", "training"), VALID: ("val", "valid", "validation"), TEST: ("test",)}
_DEALT = (TRAIN, TRAIN, VALID, TEST)
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_LABELS = ("labels.csv", "labels.txt")


@dataclass(frozen=True, eq=False)
class Entry:
    """An image and its label."""

    name: str
    content: Path | Pixels  # the file, or (height, width, channels)
    label: str | None

    def read(self) -> Pixels:
        return _read(self.content) if isinstance(self.content, Path) else self.content


@dataclass(frozen=True, eq=False)
class ImageSource:
    """Images in a fixed order, with the name the user gave."""

    name: str
    split: str
    entries: tuple[Entry, ...]

    @property
    def label(self) -> str:
        return f"{self.name}:{self.split}"

    def classes(self, names: Mapping[str, int], classes: int) -> dict[str, int]:
        """Label → output of the model: by the model's names, by number, or in sorted order."""
        found = sorted({entry.label for entry in self.entries if entry.label is not None})
        if all(label in names for label in found):
            return {label: names[label] for label in found}
        if all(label.isdigit() and int(label) < classes for label in found):
            return {label: int(label) for label in found}
        if len(found) == classes:
            return {label: number for number, label in enumerate(found)}
        raise TextError(
            f"{self.label}: {len(found)} classes ({', '.join(found[:3])}, …), but the model has {classes}: name "
            "them as in config.json's id2label, or by number"
        )


def open_images(
    name: str | os.PathLike[str], split: str | None = None, *, for_evaluation: bool = False
) -> ImageSource:
    """Opens images by name or by the path of a folder; `FOLDER:SPLIT` also names a split.

    Raises:
        TextError: unknown name, or no images.
    """
    name = os.fspath(name)
    base, _, named = name.rpartition(":")
    if not base or named not in SPLITS:
        base, named = name, ""
    split = named or split or (TEST if for_evaluation else TRAIN)
    if split not in SPLITS:
        raise TextError(f"{name}: images have no split {split!r}; there are {', '.join(SPLITS)}")
    if base == DIGITS:
        return ImageSource(base, split, _digits(split))
    folder = Path(os.path.expanduser(base))
    if not folder.is_dir():
        raise TextError(f"{base}: no such folder of images; give one, or {DIGITS}")
    entries = _of_split(folder, split)
    if not entries:
        raise TextError(
            f"{folder}: no images for {split}; expected CLASS/*.png there, or in train/, val/ and test/"
        )
    return ImageSource(base, split, tuple(entries))


def _digits(split: str) -> tuple[Entry, ...]:
    with np.load(reference_path("images", "digits.npz")) as stored:
        images, labels = stored[f"{split}_images"], stored[f"{split}_labels"]
    return tuple(
        Entry(f"{DIGITS}:{split}, image {number}", image[..., None], str(label))
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True))
    )


def _of_split(folder: Path, split: str) -> list[Entry]:
    places = {
        kind: next((folder / name for name in names if (folder / name).is_dir()), None)
        for kind, names in _FOLDERS.items()
    }
    there = {kind: place for kind, place in places.items() if place is not None}
    if split in there and (split == TRAIN or {VALID, TEST} <= there.keys()):
        return _entries(there[split])
    if split != TRAIN and (judging := there.get(VALID) or there.get(TEST)) is not None:
        # Divide a single evaluation folder: images that help choose a plan must not evaluate it.
        return [entry for entry in _entries(judging) if (VALID, TEST)[_share(entry) % 2] == split]
    return [entry for entry in _entries(folder) if _DEALT[_share(entry) % len(_DEALT)] == split]


def _share(entry: Entry) -> int:
    assert isinstance(entry.content, Path)
    return hashlib.blake2b(entry.content.read_bytes(), digest_size=1).digest()[0]


def _entries(folder: Path) -> list[Entry]:
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
    labels = _labels(folder)
    return [Entry(str(path), path, _label(path, folder, labels)) for path in files]


def _label(path: Path, folder: Path, labels: Mapping[str, str] | None) -> str | None:
    within = path.relative_to(folder)
    if labels is not None:
        label = labels.get(within.as_posix()) or labels.get(path.name)
        if label is None:
            raise TextError(
                f"{folder}: the labels file has no label for {within}; label every image, or remove the file"
            )
        return label
    return within.parts[0] if len(within.parts) > 1 else None


def _labels(folder: Path) -> dict[str, str] | None:
    path = next((folder / name for name in _LABELS if (folder / name).is_file()), None)
    if path is None:
        return None
    text = path.read_text()
    rows = csv.reader(io.StringIO(text), delimiter="," if "," in text else " ", skipinitialspace=True)
    try:
        return {row[0].strip(): row[1].strip() for row in rows if row}
    except IndexError as error:
        raise TextError(f"{path}: expected two columns in every line, file and label") from error


def _read(path: Path) -> Pixels:
    try:
        from PIL import Image
    except ImportError as error:
        raise TextError(f"{path}: reading image files needs Pillow: pip install 'kl-lens[images]'") from error
    try:
        with Image.open(path) as image:
            grey = image.mode in ("1", "L", "LA", "I;16")
            return np.asarray(image.convert("L" if grey else "RGB")).reshape(image.height, image.width, -1)
    except Exception as error:  # Pillow raises many kinds of errors for damaged files
        raise TextError(f"{path} is not a readable image: {one_line(error)}") from error
