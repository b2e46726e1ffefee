"""Makes `reference/images` and `reference/vision`: handwritten digits, and a small MambaVision that reads them.

    python reference/recipe/vision.py --out reference

Needs scikit-learn for its copy of the digits, unless they are there already. `training.json` says how long it took.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import ViTImageProcessorPil

from kl_lens.model.architectures.mambavision import (
    MambaVisionConfig,
    MambaVisionForImageClassification,
    MambaVisionMixer,
)

SPLITS = {
    "train": 1088,
    "valid": 272,
    "test": 437,
}  # 1,797 in all; the first two in whole windows of 16
PROCESSOR = ViTImageProcessorPil(
    size={"height": 16, "width": 16}, image_mean=[0.3], image_std=[0.35]
)
SETTINGS = {
    "dim": 16,
    "in_dim": 16,
    "depths": [1, 4, 4],
    "num_heads": [1, 2, 4],
    "window_size": [8, 8, 4],
    "mlp_ratio": 4,
    "in_chans": 1,
    "convolution_stages": 1,
    "patch_strides": [1, 1],
    "num_labels": 10,
    "architectures": ["MambaVisionForImageClassification"],
}
Data = dict[str, tuple[torch.Tensor, torch.Tensor]]


def make_images(folder: Path, seed: int = 0) -> None:
    """scikit-learn's copy of the digits, 17 grey levels stretched to 0 … 255, dealt out at random."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.round(digits.images * 255 / 16).astype(np.uint8)
    if len({image.tobytes() for image in images}) != len(images):
        raise SystemExit("two of the digits are the same image: deal them out together")
    order = np.random.default_rng(seed).permutation(len(images))
    stored = {}
    first = 0
    for split, count in SPLITS.items():
        chosen = order[first : first + count]
        stored |= {
            f"{split}_images": images[chosen],
            f"{split}_labels": digits.target[chosen].astype(np.uint8),
        }
        first += count
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "digits.npz", **stored)


def read_images(folder: Path) -> Data:
    with np.load(folder / "digits.npz") as stored:
        return {
            split: (
                PROCESSOR(
                    [*stored[f"{split}_images"][:, None]],
                    input_data_format="channels_first",
                    return_tensors="pt",
                )["pixel_values"],
                torch.from_numpy(stored[f"{split}_labels"].astype(np.int64)),
            )
            for split in SPLITS
        }


def initialise(model: torch.nn.Module) -> None:
    """Small matrices, and time steps between 0.001 and 0.1."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, MambaVisionMixer):
            torch.nn.init.uniform_(
                module.dt_proj.weight, -(module.rank**-0.5), module.rank**-0.5
            )
            step = torch.exp(
                torch.empty_like(module.dt_proj.bias).uniform_(np.log(0.001), np.log(0.1))
            )
            module.dt_proj.bias.data = (
                step + torch.log(-torch.expm1(-step))
            ) / 2  # it counts twice


def augmented(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Moved by up to two pixels, and a little noise."""
    background = images.amin()
    padded = functional.pad(images, (2, 2, 2, 2), value=float(background))
    moves = torch.randint(0, 5, (len(images), 2), generator=generator).tolist()
    moved = torch.stack(
        [p[:, y : y + 16, x : x + 16] for p, (y, x) in zip(padded, moves, strict=True)]
    )
    return moved + 0.1 * torch.randn(moved.shape, generator=generator).to(moved.device)


@torch.no_grad()
def judged(
    model: MambaVisionForImageClassification, data: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, float]:
    model.eval()
    images, labels = data
    logits = torch.cat([model(part).logits for part in images.split(256)])
    return {
        "top1": float((logits.argmax(-1) == labels).float().mean()),
        "cross_entropy": float(functional.cross_entropy(logits, labels)),
    }


def train(
    data: Data, epochs: int, rate: float, seed: int
) -> tuple[MambaVisionForImageClassification, dict]:  # type: ignore[type-arg]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = MambaVisionForImageClassification(MambaVisionConfig(**SETTINGS))
    initialise(model)
    images, labels = data["train"]
    model.to(images.device)
    steps = epochs * (len(images) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.1
    )
    history = []
    begin = time.perf_counter()
    for epoch in range(epochs):
        model.train()
        for chosen in torch.randperm(len(images), generator=generator)[
            : len(images) // 64 * 64
        ].split(64):
            loss = functional.cross_entropy(
                model(augmented(images[chosen], generator)).logits,
                labels[chosen],
                label_smoothing=0.05,
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        if epoch % 5 == 4:
            seconds = round(time.perf_counter() - begin, 1)
            history.append(
                {
                    "epoch": epoch + 1,
                    "training": float(loss),
                    **judged(model, data["valid"]),
                    "seconds": seconds,
                }
            )
            print(json.dumps(history[-1]), flush=True)
    about = {
        "epochs": epochs,
        "rate": rate,
        "seed": seed,
        "batch": 64,
        "seconds": history[-1]["seconds"],
        "history": history,
    }
    return model, about


def publish(
    model: MambaVisionForImageClassification, about: dict, data: Data, folder: Path
) -> None:  # type: ignore[type-arg]
    """FP16 weights; scored as they are read back."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        n: t.half() if t.is_floating_point() else t for n, t in model.state_dict().items()
    }
    save_file(
        {n: t.contiguous() for n, t in kept.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "model.safetensors").chmod(0o644)
    model.config.save_pretrained(folder)
    PROCESSOR.save_pretrained(folder)
    again = MambaVisionForImageClassification.from_pretrained(folder, dtype=torch.float32)
    scores = {split: judged(again, data[split]) for split in SPLITS}
    record = {
        "parameters": sum(p.numel() for p in model.parameters()),
        **about,
        "scores": scores,
    }
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(scores))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("reference"))
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--images", type=Path, help="where digits.npz is (default: OUT/images)"
    )
    arguments = parser.parse_args()
    images = arguments.images or arguments.out / "images"
    if not (images / "digits.npz").is_file():
        make_images(images)
    data = read_images(images)
    on_device = {
        split: tuple(t.to(arguments.device) for t in pair) for split, pair in data.items()
    }
    model, about = train(on_device, arguments.epochs, arguments.rate, arguments.seed)
    publish(model.cpu(), about, data, arguments.out / "vision")


if __name__ == "__main__":
    main()
