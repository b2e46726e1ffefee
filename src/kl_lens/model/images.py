"""Image classifiers: a task with images by name in place of text. Other code sees only ids of images.

    digits, digits:test    the shipped ones: 1,797 handwritten digits of 8 × 8 pixels
    FOLDER, FOLDER:valid   FOLDER/CLASS/*.png, or files without labels

Splits are `train`, `valid` and `test`: folders of these names, or else files assigned by a hash of their content,
half of them to `train`, so that copies of an image are always in the same split.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor, nn
from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from kl_lens.base.errors import CheckpointError, TextError, one_line
from kl_lens.base.files import reference_path
from kl_lens.model.files import refusing
from kl_lens.text.sources import WIKITEXT, TextSource
from kl_lens.text.windows import UsedDocument, Windows

IMAGE = "image"
DIGITS = "digits"
UNLABELLED = -1
MOST_IMAGES = 4096  # of one forward
MOST_PIXELS = 2**20
TRAIN, VALID, TEST = SPLITS = ("train", "valid", "test")
# Where a split has several, the last counts.
_FOLDERS = {"train": TRAIN, "valid": VALID, "val": VALID, "test": TEST}
_SUFFIXES = [
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
]
Pixels = npt.NDArray[np.uint8]


class Entry(NamedTuple):
    name: str
    content: Path | Pixels  # the file, or (height, width)
    label: str | None


@dataclass(frozen=True, eq=False)
class ImageSource:
    """Images in a fixed order, with the name the user gave."""

    name: str
    split: str
    entries: tuple[Entry, ...]

    @property
    def label(self) -> str:
        return f"{self.name}:{self.split}"

    def classes(self, names: Mapping[str, int], count: int) -> Mapping[str, int]:
        """Label → output of the model: by the model's names, by number, or in sorted order."""
        labels = sorted({e.label for e in self.entries if e.label is not None})
        if names.keys() >= {*labels}:
            return names
        if all(label.isdigit() and int(label) < count for label in labels):
            return {label: int(label) for label in labels}
        if len(labels) == count:
            return {label: number for number, label in enumerate(labels)}
        raise TextError(
            f"{self.label}: {len(labels)} classes ({', '.join(labels[:3])}, …), but the model has {count}: name "
            "them as in config.json's id2label, or by number"
        )


def open_images(name: str, split: str) -> ImageSource:
    """Opens images by name or by the path of a folder; `FOLDER:SPLIT` names another split."""
    base, _, named = name.rpartition(":")
    if base and named in SPLITS:
        split = named
    else:
        base = name
    if split not in SPLITS:
        raise TextError(
            f"{name}: images have no split {split!r}; there are {', '.join(SPLITS)}"
        )
    if base == DIGITS:
        return ImageSource(base, split, tuple(_digits(split)))
    folder = Path(os.path.expanduser(base))
    if not folder.is_dir():
        raise TextError(f"{base}: no such folder of images; give one, or {DIGITS}")
    if entries := tuple(_of_split(folder, split)):
        return ImageSource(base, split, entries)
    raise TextError(
        f"{folder}: no images for {split}; expected CLASS/*.png there, or in train/, val/ and test/"
    )


def _digits(split: str) -> Iterator[Entry]:
    with np.load(reference_path("images", "digits.npz")) as stored:
        pairs = zip(stored[f"{split}_images"], stored[f"{split}_labels"], strict=True)
        for number, (image, label) in enumerate(pairs):
            yield Entry(f"{DIGITS}:{split}, image {number}", image, str(label))


def _of_split(folder: Path, split: str) -> Iterator[Entry]:
    folders = {
        kind: folder / name for name, kind in _FOLDERS.items() if (folder / name).is_dir()
    }
    if split in folders and (split == TRAIN or {VALID, TEST} <= folders.keys()):
        yield from _entries(folders[split])
        return
    shares = [TRAIN, TRAIN, VALID, TEST]
    if split != TRAIN and folders.keys() & {VALID, TEST}:
        # Divide a single evaluation folder: images that help choose a plan must not evaluate it.
        folder = folders.get(VALID) or folders[TEST]
        shares = [VALID, TEST]
    for entry in _entries(folder):
        content = Path(entry.name).read_bytes()
        share = hashlib.blake2b(content, digest_size=1).digest()[0]
        if shares[share % len(shares)] == split:
            yield entry


def _entries(folder: Path) -> Iterator[Entry]:
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _SUFFIXES and path.is_file():
            parts = path.relative_to(folder).parts
            yield Entry(str(path), path, parts[0] if len(parts) > 1 else None)


# Pixels and label of the images prepared in this process, by id. Ids make windows of images rows of integers, like
# windows of tokens.
_ALBUM: dict[int, tuple[Pixels, int]] = {}


def add_picture(pixels: Pixels, label: int = 0) -> int:
    """Returns its id: a hash of its pixels and its label."""
    about = f"{pixels.shape} {label} ".encode()
    digest = hashlib.blake2b(about + pixels.tobytes(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1  # fits into an int64
    _ALBUM.setdefault(number, (pixels, label))
    return number


def _pictures(ids: Iterable[int]) -> Iterator[tuple[Pixels, int]]:
    for number in ids:
        if number not in _ALBUM:
            raise TextError(f"no image with the id {number} was opened in this process")
        yield _ALBUM[number]


def is_classifier(config: Mapping[str, Any]) -> bool:
    named = "ForImageClassification" in str(config.get("architectures"))
    return named or config.get("model_type") == "mambavision"


def own_images(source: str | Path) -> str | None:
    """The images that ship with a model."""
    return DIGITS if str(source) == "reference:vision" else None


def last_linear(model: nn.Module, width: int) -> nn.Module | None:
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return next((m for m in reversed(linears) if m.out_features == width), None)


@dataclass(frozen=True, eq=False)
class ImageTask:
    """Images in, a distribution over classes out."""

    processor: Any  # transformers'
    classes: int
    label_names: Mapping[str, int] = field(default_factory=dict)
    images: str | None = None  # default source of images

    name: ClassVar = IMAGE
    unit: ClassVar = "images"
    head_kind: ClassVar = "head"
    window_length: ClassVar = 16
    judged_length: ClassVar = 16
    lists: ClassVar[tuple[type[nn.Module], ...]] = (nn.ModuleList, nn.Sequential)
    generates: ClassVar = False

    @classmethod
    def of(
        cls, folder: Path, config: Mapping[str, Any], images: str | None = None
    ) -> ImageTask:
        """From the files next to the weights, of a checkpoint or of an exported model."""
        labels = config.get("id2label") or {}
        names = {str(label): int(number) for number, label in labels.items()}
        counts = (len(names), config.get("num_classes"), config.get("num_labels"))
        classes = int(next(filter(None, counts), 1000))
        # transformers' placeholders.
        if names == {f"LABEL_{number}": number for number in range(classes)}:
            names = {}
        return cls(_processor(folder, config), classes, names, images)

    @property
    def key(self) -> Hashable:
        labels = tuple(self.label_names.items())
        return self.processor.to_json_string(), self.classes, labels, self.images

    @property
    def identity(self) -> dict[str, Any]:
        return {"task": self.name, "images": self.images}

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """(channels, height, width)"""
        return self._prepared(np.zeros((8, 8), np.uint8)).shape

    @property
    def rows_at_once(self) -> int:
        return max(1, min(MOST_IMAGES, MOST_PIXELS // (self.shape[1] * self.shape[2])))

    def drawn(
        self, source: TextSource | str, *, windows: int, length: int, seed: int = 42
    ) -> Windows:
        """Windows of randomly chosen images; the first k of a larger draw are the draw of k."""
        return self._windows(self._opened(source, TRAIN), length, windows, seed)

    def from_start(
        self,
        source: TextSource | str,
        *,
        length: int,
        stride: int | None = None,
        limit: int | None = None,
    ) -> Windows:
        """All images, at most `limit` windows, in a fixed order that mixes the classes."""
        opened = self._opened(source, TEST)
        if any(entry.label is None for entry in opened.entries):
            raise TextError(
                f"{opened.label}: evaluation needs labels: a folder for each class"
            )
        if stride not in (None, length):
            raise TextError(
                f"{opened.label}: windows of images do not overlap; --stride works only for text"
            )
        most = len(opened.entries) // length
        return self._windows(opened, length, min(limit or most, most), None)

    def _opened(self, source: TextSource | str, split: str) -> ImageSource:
        if isinstance(source, TextSource):
            raise TextError(f"{source.label} is text, and this model classifies images")
        base, _, named = source.partition(":")
        if base != WIKITEXT:
            return open_images(source, split)
        if self.images is None:
            raise TextError(
                "this model classifies images: give some with --images FOLDER"
            )
        # A command's default text: that split of the run's images.
        return open_images(self.images, named or split)

    def _windows(
        self, source: ImageSource, length: int, windows: int, seed: int | None
    ) -> Windows:
        available = len(source.entries)
        count = max(windows, 1)
        if count * length > available:
            raise TextError(
                f"{source.label}: {count} windows of {length} images need {count * length:,} images, there are "
                f"{available:,}: ask for at most {available // length} windows, or give more"
            )
        order = list(range(available))
        random.Random(seed or 0).shuffle(order)
        classes = source.classes(self.label_names, self.classes)
        ids = []
        documents = []
        for name, content, label in (source.entries[n] for n in order[: count * length]):
            pixels = self._prepared(content)
            ids.append(
                add_picture(pixels, UNLABELLED if label is None else classes[label])
            )
            digest = hashlib.sha256(pixels.tobytes()).hexdigest()
            documents.append(UsedDocument(name, digest))
        starts = tuple(range(0, len(ids), length))
        return Windows(
            ids=torch.tensor(ids).reshape(-1, length),
            source=source.name,
            split=source.split,
            seed=seed,
            stride=length if seed is None else None,
            starts=starts,
            documents=tuple(tuple(documents[start : start + length]) for start in starts),
            stream_tokens=available,
        )

    def _prepared(self, content: Path | Pixels) -> Pixels:
        """Resized and cropped, (channels, height, width)."""
        from PIL import Image

        is_file = isinstance(content, Path)
        try:
            with Image.open(content) if is_file else Image.fromarray(content) as image:  # type: ignore[arg-type]
                plain = image.convert(
                    "L" if len(self.processor.image_mean) == 1 else "RGB"
                )
        except Exception as error:  # Pillow raises many kinds of errors for damaged files
            raise TextError(
                f"{content} is not a readable image: {one_line(error)}"
            ) from error
        options = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
        return np.ascontiguousarray(self.processor(plain, **options)["pixel_values"][0])

    def lost(self, windows: Windows, perplexity: float) -> str | None:
        return None

    def sample(self, model: nn.Module, windows: int, rows: int) -> Tensor:
        shape = (windows * rows, *self.shape)
        noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        return torch.tensor([*map(add_picture, noise)]).view(windows, rows)

    def blank(self, windows: int, rows: int) -> Tensor:
        black = np.zeros(self.shape, np.uint8)
        return torch.full((windows, rows), add_picture(black))

    def head(self, model: nn.Module) -> nn.Module:
        head = last_linear(model, self.classes)
        if head is None:
            raise CheckpointError(
                f"{type(model).__name__} has no linear layer to {self.classes} classes"
            )
        return head

    def inputs(self, ids: Iterable[int]) -> npt.NDArray[np.float32]:
        """What the model reads: (images, channels, height, width)."""
        images = [pixels for pixels, _ in _pictures(ids)]
        options = {"do_resize": False, "do_center_crop": False, "return_tensors": "np"}
        layout = "channels_first"
        return self.processor(images, input_data_format=layout, **options)["pixel_values"]

    def forward(self, model: nn.Module, ids: Tensor) -> Tensor:
        parameter = next(model.parameters())
        pixels = torch.from_numpy(self.inputs(ids.flatten().tolist()))
        output = model(pixels.to(parameter.device, parameter.dtype))
        logits = output if isinstance(output, Tensor) else output["logits"]
        return logits.reshape(*ids.shape, -1)

    def targets(self, ids: Tensor) -> Tensor:
        labels = [label for _, label in _pictures(ids.flatten().tolist())]
        return torch.tensor(labels, device=ids.device).reshape(ids.shape)


def _processor(folder: Path, config: Mapping[str, Any]) -> Any:
    """From `preprocessor_config.json`, or from config.json as MambaVision has it."""
    path = folder / "preprocessor_config.json"
    with refusing(
        f"{path} does not say how images are prepared, or Pillow is missing: pip install 'kl-lens[images]'"
    ):
        kind = transformers.ViTImageProcessorPil
        about = json.loads(path.read_text()) if path.is_file() else _settings(config)
        if "image_processor_type" not in about:
            return kind.from_dict(about)
        return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    size = config.get("input_resolution") or config.get("image_size") or 224
    height, width = [size, size] if isinstance(size, int) else size[-2:]
    return {
        "size": {"shortest_edge": round(min(height, width) / config.get("crop_pct", 1))},
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "resample": 2 if config.get("interpolation") == "bilinear" else 3,
        "image_mean": config.get("mean", IMAGENET_DEFAULT_MEAN),
        "image_std": config.get("std", IMAGENET_DEFAULT_STD),
    }
