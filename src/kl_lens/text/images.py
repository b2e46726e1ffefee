"""Images by name, prepared as a model wants them, as ids in windows.

    digits, digits:test    the shipped ones: 1,797 handwritten digits of 8 × 8 pixels
    FOLDER, FOLDER:valid   FOLDER/CLASS/*.png, or files beside a labels.csv (file,label), or files without labels

Splits are `train`, `valid` and `test`: folders of these names, or else files assigned by a hash of their content,
half of them to `train`, so that copies of an image are always in the same split.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from kl_lens.base.errors import CheckpointError, TextError, one_line
from kl_lens.base.files import reference_path
from kl_lens.base.lazy import torch

if TYPE_CHECKING:
    from kl_lens.text.windows import Windows

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


# Images opened in this process, by id. Ids make windows of images rows of integers, like windows of tokens.
_ALBUM: dict[int, Picture] = {}


def add_picture(picture: Picture) -> int:
    """Returns its id: a hash of its pixels and its label."""
    about = f"{picture.pixels.shape} {picture.label} "
    digest = hashlib.blake2b(
        about.encode() + picture.pixels.tobytes(), digest_size=8
    ).digest()
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


FILE = "preprocessor_config.json"
_MODES: dict[Any, str] = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_MODES |= {"bilinear": "bilinear", "bicubic": "bicubic"}
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)  # ImageNet's, used by most classifiers


@dataclass(frozen=True)
class Preparation:
    """From an image file to the model's input."""

    height: int
    width: int
    # First resized to this shorter side, then cropped to the centre.
    shortest: int | None = None
    mode: str = "bilinear"
    scale: float = 1 / 255
    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _STD

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any]) -> Self:
        """From `preprocessor_config.json`, or from config.json as in MambaVision and timm."""
        path = folder / FILE
        if path.is_file():
            try:
                return cls._of_processor(json.loads(path.read_text()))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CheckpointError(
                    f"{path} does not say how images are prepared: {error!r}"
                ) from error
        about = {**config, **(config.get("pretrained_cfg") or {})}
        size = (
            about.get("input_size")
            or about.get("input_resolution")
            or about.get("image_size")
            or 224
        )
        sides = [size] if isinstance(size, int) else list(size)
        height, width = sides[-2:] if len(sides) > 1 else (sides[0], sides[0])
        share = float(about.get("crop_pct") or 1.0)
        return cls(
            height,
            width,
            shortest=round(min(height, width) / share),
            mode=_MODES.get(about.get("interpolation", "bicubic"), "bicubic"),
            mean=tuple(about.get("mean") or _MEAN),
            std=tuple(about.get("std") or _STD),
        )

    @classmethod
    def _of_processor(cls, about: Mapping[str, Any]) -> Self:
        """The fields of transformers' image processors."""
        size = about["size"]
        crop = about.get("crop_size")
        shortest = None
        if isinstance(size, int):
            size = {"height": size, "width": size}
        if "shortest_edge" in size:
            shortest = int(size["shortest_edge"])
            if crop is None and "crop_pct" in about:  # as in ConvNeXt
                size = crop = shortest
                shortest = (
                    round(shortest / about["crop_pct"]) if shortest < 384 else shortest
                )
            size = {"height": shortest, "width": shortest}
        if crop is not None and about.get("do_center_crop", True):
            shortest = shortest or min(size["height"], size["width"])
            size = {"height": crop, "width": crop} if isinstance(crop, int) else crop
        normalised = about.get("do_normalize", True)
        return cls(
            int(size["height"]),
            int(size["width"]),
            shortest,
            _MODES.get(about.get("resample", 2), "bilinear"),
            float(about.get("rescale_factor", 1 / 255))
            if about.get("do_rescale", True)
            else 1.0,
            tuple(about["image_mean"])
            if normalised
            else (0.0,) * len(about.get("image_mean", _MEAN)),
            tuple(about["image_std"])
            if normalised
            else (1.0,) * len(about.get("image_mean", _MEAN)),
        )

    def write(self, folder: Path) -> None:
        """Writes the settings next to an exported model, in transformers' layout."""
        about: dict[str, Any] = {
            "do_resize": True,
            "size": {"height": self.height, "width": self.width},
            "resample": next(
                number for number, mode in _MODES.items() if mode == self.mode
            ),
            "do_rescale": True,
            "rescale_factor": self.scale,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }
        if self.shortest is not None:
            about |= {"do_center_crop": True, "crop_size": about["size"]}
            about |= {"size": {"shortest_edge": self.shortest}}
        (folder / FILE).write_text(json.dumps(about, indent=1) + "\n")

    def prepare(self, image: Pixels) -> Pixels:
        """(height, width, channels) from the file → (channels, height, width) for the model."""
        if image.shape[-1] != self.channels:
            image = (
                image[..., :1].repeat(self.channels, -1)
                if image.shape[-1] == 1
                else _grey(image)
            )
        planes = np.ascontiguousarray(np.moveaxis(image, -1, 0))
        if self.shortest is not None:
            factor = self.shortest / min(planes.shape[1:])
            sides = (
                max(self.shortest, round(side * factor)) for side in planes.shape[1:]
            )
            planes = self._resized(planes, *sides)
            top = (planes.shape[1] - self.height) // 2
            left = (planes.shape[2] - self.width) // 2
            if min(top, left) >= 0:
                planes = planes[:, top : top + self.height, left : left + self.width]
        return np.ascontiguousarray(self._resized(planes, self.height, self.width))

    def _resized(self, planes: Pixels, height: int, width: int) -> Pixels:
        if planes.shape[1:] == (height, width):
            return planes
        smooth = self.mode != "nearest"
        resized = torch.nn.functional.interpolate(
            torch.from_numpy(planes)[None],
            (height, width),
            mode=self.mode,
            antialias=smooth,
        )
        return np.asarray(resized[0].numpy())

    def normalised(self, pixels: Pixels) -> npt.NDArray[np.float32]:
        """The model's input, (…, channels, height, width)."""
        mean, std = (
            np.asarray(values, np.float32)[:, None, None]
            for values in (self.mean, self.std)
        )
        return (pixels.astype(np.float32) * np.float32(self.scale) - mean) / std


def _grey(image: Pixels) -> Pixels:
    """With Pillow's weights."""
    return np.round(image[..., :3] @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)[
        ..., None
    ]


DIGITS = "digits"
TRAIN, VALID, TEST = SPLITS = ("train", "valid", "test")
_FOLDERS = {
    TRAIN: ("train", "training"),
    VALID: ("val", "valid", "validation"),
    TEST: ("test",),
}
_DEALT = (TRAIN, TRAIN, VALID, TEST)
_SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".bmp",
    ".webp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
)
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
        labels = sorted(
            {entry.label for entry in self.entries if entry.label is not None}
        )
        if all(label in names for label in labels):
            return {label: names[label] for label in labels}
        if all(label.isdigit() and int(label) < classes for label in labels):
            return {label: int(label) for label in labels}
        if len(labels) == classes:
            return {label: number for number, label in enumerate(labels)}
        raise TextError(
            f"{self.label}: {len(labels)} classes ({', '.join(labels[:3])}, …), but the model has {classes}: name "
            "them as in config.json's id2label, or by number"
        )


def open_images(
    name: str | os.PathLike[str],
    split: str | None = None,
    *,
    for_evaluation: bool = False,
) -> ImageSource:
    """Opens images by name or by the path of a folder; `FOLDER:SPLIT` also names a split."""
    name = os.fspath(name)
    base, _, named = name.rpartition(":")
    if not base or named not in SPLITS:
        base = name
        named = ""
    split = named or split or (TEST if for_evaluation else TRAIN)
    if split not in SPLITS:
        raise TextError(
            f"{name}: images have no split {split!r}; there are {', '.join(SPLITS)}"
        )
    if base == DIGITS:
        return ImageSource(base, split, _digits(split))
    folder = Path(os.path.expanduser(base))
    if not folder.is_dir():
        raise TextError(f"{base}: no such folder of images; give one, or {DIGITS}")
    if entries := _of_split(folder, split):
        return ImageSource(base, split, tuple(entries))
    raise TextError(
        f"{folder}: no images for {split}; expected CLASS/*.png there, or in train/, val/ and test/"
    )


def _digits(split: str) -> tuple[Entry, ...]:
    with np.load(reference_path("images", "digits.npz")) as stored:
        images = stored[f"{split}_images"]
        labels = stored[f"{split}_labels"]
    return tuple(
        Entry(f"{DIGITS}:{split}, image {number}", image[..., None], str(label))
        for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True))
    )


def _of_split(folder: Path, split: str) -> list[Entry]:
    candidates = {
        kind: next((folder / name for name in names if (folder / name).is_dir()), None)
        for kind, names in _FOLDERS.items()
    }
    folders = {kind: path for kind, path in candidates.items() if path is not None}
    if split in folders and (split == TRAIN or {VALID, TEST} <= folders.keys()):
        return _entries(folders[split])
    if (
        split != TRAIN
        and (judging := folders.get(VALID) or folders.get(TEST)) is not None
    ):
        # Divide a single evaluation folder: images that help choose a plan must not evaluate it.
        return [
            entry
            for entry in _entries(judging)
            if (VALID, TEST)[_share(entry) % 2] == split
        ]
    return [
        entry
        for entry in _entries(folder)
        if _DEALT[_share(entry) % len(_DEALT)] == split
    ]


def _share(entry: Entry) -> int:
    assert isinstance(entry.content, Path)
    return hashlib.blake2b(entry.content.read_bytes(), digest_size=1).digest()[0]


def _entries(folder: Path) -> list[Entry]:
    files = sorted(
        p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file()
    )
    labels = _labels(folder)
    return [Entry(str(path), path, _label(path, folder, labels)) for path in files]


def _label(path: Path, folder: Path, labels: Mapping[str, str] | None) -> str | None:
    within = path.relative_to(folder)
    if labels is None:
        return within.parts[0] if len(within.parts) > 1 else None
    if label := labels.get(within.as_posix()) or labels.get(path.name):
        return label
    raise TextError(
        f"{folder}: the labels file has no label for {within}; label every image, or remove the file"
    )


def _labels(folder: Path) -> dict[str, str] | None:
    path = next((folder / name for name in _LABELS if (folder / name).is_file()), None)
    if path is None:
        return None
    text = path.read_text()
    rows = csv.reader(
        io.StringIO(text), delimiter="," if "," in text else " ", skipinitialspace=True
    )
    try:
        return {row[0].strip(): row[1].strip() for row in rows if row}
    except IndexError as error:
        raise TextError(
            f"{path}: expected two columns in every line, file and label"
        ) from error


def _read(path: Path) -> Pixels:
    try:
        from PIL import Image
    except ImportError as error:
        raise TextError(
            f"{path}: reading image files needs Pillow: pip install 'kl-lens[images]'"
        ) from error
    try:
        with Image.open(path) as image:
            grey = image.mode in ("1", "L", "LA", "I;16")
            return np.asarray(image.convert("L" if grey else "RGB")).reshape(
                image.height, image.width, -1
            )
    except Exception as error:  # Pillow raises many kinds of errors for damaged files
        raise TextError(f"{path} is not a readable image: {one_line(error)}") from error


def image_windows(
    source: ImageSource,
    preparation: Preparation,
    names: Mapping[str, int],
    classes: int,
    *,
    length: int,
    windows: int | None,
    seed: int | None = None,
) -> Windows:
    """With a seed: windows of randomly chosen images; the first k of a larger draw are the draw of k. Without: all
    images, at most `windows`, in a fixed order that mixes the classes."""
    from kl_lens.text.windows import UsedDocument, Windows

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
        ids=torch.tensor([add_picture(picture) for picture in pictures]).reshape(
            -1, length
        ),
        source=source.name,
        split=source.split,
        order="sequential" if seed is None else "drawn",
        seed=seed,
        stride=length if seed is None else None,
        starts=starts,
        documents=tuple(tuple(documents[start : start + length]) for start in starts),
        stream_tokens=available,
    )
