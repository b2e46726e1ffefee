"""Tiny image classifiers with random weights, and folders of images for them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from torch import nn

from kl_lens.model import ImageTask, LoadedModel
from kl_lens.model.architectures.mambavision import (
    MambaVisionConfig,
    MambaVisionForImageClassification,
)

CLASSES = 10
_COMMON = {"num_labels": CLASSES, "num_channels": 1, "hidden_act": "gelu"}
_VIT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def mambavision(**settings: object) -> nn.Module:
    stages = {
        "depths": [1, 3],
        "num_heads": [1, 2],
        "window_size": [4, 4],
        "convolution_stages": 1,
    }
    small = {
        "dim": 16,
        "in_dim": 8,
        "mlp_ratio": 2,
        "in_chans": 1,
        "patch_strides": [1, 1],
        "num_labels": CLASSES,
    }
    model = MambaVisionForImageClassification(
        MambaVisionConfig(**{**stages, **small, **settings})
    )
    for module in model.modules():
        # As after training: no norm is the identity.
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.weight, module.running_var):
                nn.init.uniform_(values, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
    return model


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**_COMMON, **_VIT, image_size=8, patch_size=2)
    )


def swin() -> nn.Module:
    stages = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(**_COMMON, **stages, image_size=8, patch_size=1)
    )


class InSequence(nn.Module):
    """Blocks in a `Sequential`, logits without a wrapping: timm's manner."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 2, 2)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        )
        self.head = nn.Linear(16, CLASSES)
        self.config = transformers.PretrainedConfig()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(
            self.blocks(self.stem(pixels).flatten(2).transpose(1, 2)).mean(1)
        )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mambavision": mambavision,
    "vit": vit,
    "swin": swin,
    "timm's manner": InSequence,
}
PROCESSOR = transformers.ViTImageProcessorPil(
    size={"height": 8, "width": 8}, image_mean=[0.3], image_std=[0.4]
)


def classifier(name: str, seed: int = 0) -> LoadedModel:
    torch.manual_seed(seed)
    model = MODELS[name]().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:  # large enough that quantization shows
            parameter.normal_(std=2 / parameter.shape[1] ** 0.5)
    task = ImageTask(PROCESSOR, CLASSES)
    task.head(model).weight.mul_(2 / task.forward(model, task.sample(model, 1, 16)).std())  # type: ignore[operator]
    return LoadedModel(name, Path(), model, None, source=name, classifier=task)


def save(folder: Path, model: LoadedModel) -> Path:
    """The classifier as a folder in the hub's layout."""
    model.model.save_pretrained(folder)  # type: ignore[operator]
    PROCESSOR.save_pretrained(folder)
    return folder


def image_folder(
    folder: Path, count: int, classes: int = CLASSES, *, side: int = 8, seed: int = 0
) -> Path:
    """`count` images of noise, each under the name of its class."""
    generator = np.random.default_rng(seed)
    for number in range(count):
        class_folder = folder / f"class {number % classes}"
        class_folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (side, side), dtype=np.uint8)
        Image.fromarray(pixels).save(class_folder / f"{number}.png")
    return folder
