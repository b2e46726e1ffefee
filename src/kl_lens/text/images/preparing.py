"""How a model wants its images: size, cropping, normalisation; read from the checkpoint's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kl_lens.base.errors import CheckpointError
from kl_lens.text.images.album import Pixels

FILE = "preprocessor_config.json"
_MODES = {
    0: "nearest",
    2: "bilinear",
    3: "bicubic",
    "bilinear": "bilinear",
    "bicubic": "bicubic",
}  # Pillow's numbers
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, used by most classifiers


@dataclass(frozen=True)
class Preparation:
    """From an image file to the model's input."""

    height: int
    width: int
    shortest: int | None = None  # first resized to this shorter side, then cropped to the centre
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
                raise CheckpointError(f"{path} does not say how images are prepared: {error!r}") from error
        about = {**config, **(config.get("pretrained_cfg") or {})}
        size = about.get("input_size") or about.get("input_resolution") or about.get("image_size") or 224
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
        size, crop = about["size"], about.get("crop_size")
        shortest = None
        if isinstance(size, int):
            size = {"height": size, "width": size}
        if "shortest_edge" in size:
            shortest = int(size["shortest_edge"])
            if crop is None and "crop_pct" in about:  # as in ConvNeXt
                size = crop = shortest
                shortest = round(shortest / about["crop_pct"]) if shortest < 384 else shortest
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
            float(about.get("rescale_factor", 1 / 255)) if about.get("do_rescale", True) else 1.0,
            tuple(about["image_mean"]) if normalised else (0.0,) * len(about.get("image_mean", _MEAN)),
            tuple(about["image_std"]) if normalised else (1.0,) * len(about.get("image_mean", _MEAN)),
        )

    def write(self, folder: Path) -> None:
        """Writes the settings next to an exported model, in transformers' layout."""
        about: dict[str, Any] = {
            "do_resize": True,
            "size": {"height": self.height, "width": self.width},
            "resample": next(number for number, mode in _MODES.items() if mode == self.mode),
            "do_rescale": True,
            "rescale_factor": self.scale,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }
        if self.shortest is not None:
            about |= {
                "do_center_crop": True,
                "crop_size": about["size"],
                "size": {"shortest_edge": self.shortest},
            }
        (folder / FILE).write_text(json.dumps(about, indent=1) + "\n")

    def prepare(self, image: Pixels) -> Pixels:
        """(height, width, channels) from the file → (channels, height, width) for the model."""
        if image.shape[-1] != self.channels:
            image = image[..., :1].repeat(self.channels, -1) if image.shape[-1] == 1 else _grey(image)
        planes = np.ascontiguousarray(np.moveaxis(image, -1, 0))
        if self.shortest is not None:
            factor = self.shortest / min(planes.shape[1:])
            planes = self._resized(
                planes, *(max(self.shortest, round(side * factor)) for side in planes.shape[1:])
            )
            top, left = (planes.shape[1] - self.height) // 2, (planes.shape[2] - self.width) // 2
            if min(top, left) >= 0:
                planes = planes[:, top : top + self.height, left : left + self.width]
        return np.ascontiguousarray(self._resized(planes, self.height, self.width))

    def _resized(self, planes: Pixels, height: int, width: int) -> Pixels:
        if planes.shape[1:] == (height, width):
            return planes
        import torch  # not needed for images of the right size

        smooth = self.mode != "nearest"
        resized = torch.nn.functional.interpolate(
            torch.from_numpy(planes)[None], (height, width), mode=self.mode, antialias=smooth
        )
        return np.asarray(resized[0].numpy())

    def normalised(self, pixels: Pixels) -> npt.NDArray[np.float32]:
        """The model's input, (…, channels, height, width)."""
        mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (self.mean, self.std))
        return (pixels.astype(np.float32) * np.float32(self.scale) - mean) / std


def _grey(image: Pixels) -> Pixels:
    """With Pillow's weights."""
    return np.round(image[..., :3] @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)[..., None]
