"""Perplexity over non-overlapping windows, in training and for the model card."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from models import LanguageModel, language_model, next_token_losses
from safetensors.torch import load_file
from transformers import AutoConfig

WINDOW = 512


def windows(ids: np.ndarray, window: int = WINDOW) -> torch.Tensor:
    """Non-overlapping windows [count, window]; a shorter rest at the end is dropped."""
    count = len(ids) // window
    return torch.from_numpy(ids[: count * window].astype(np.int64)).view(count, window)


@torch.no_grad()
@torch.compiler.set_stance(
    "force_eager"
)  # other shapes than in training: not worth a compilation
def mean_loss(
    model: LanguageModel,
    ids: np.ndarray,
    device: str,
    window: int = WINDOW,
    batch: int = 64,
) -> float:
    """Mean cross-entropy in nats; every window predicts all of its tokens but the first."""
    total = 0.0
    count = 0
    for block in windows(ids, window).split(batch):
        block = block.to(device)
        losses = next_token_losses(
            model.features(block[:, :-1]), model.embedding_weight(), block[:, 1:]
        )
        total += float(losses.double().sum())
        count += losses.numel()
    return total / count


def saved_model(folder: Path, device: str) -> LanguageModel:
    """The checkpoint of a folder in our own modules: FP16 values, computed in float32."""
    model = language_model(AutoConfig.from_pretrained(folder))
    model.load_state_dict(
        {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    )
    return model.to(device)


def test_report(
    folder: Path, ids: np.ndarray, facts: Mapping[str, Mapping[str, int]], device: str
) -> dict[str, float]:
    """Token perplexity of the saved FP16 weights on WikiText-2 test, and the same per word."""
    torch.set_float32_matmul_precision("highest")
    loss = mean_loss(saved_model(folder, device), ids, device)
    sizes = facts["test/wikitext2"]
    return {
        "window": WINDOW,
        "loss": loss,
        "token_perplexity": math.exp(loss),
        "word_perplexity": math.exp(loss * sizes["tokens"] / sizes["words"]),
        "bits_per_character": loss * sizes["tokens"] / sizes["characters"] / math.log(2),
    }
