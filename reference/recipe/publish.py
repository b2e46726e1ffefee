"""Writes a Hugging Face folder and proves that transformers reads it as it was trained."""

from __future__ import annotations

from pathlib import Path

import evaluate
import numpy as np
import torch
from models import LanguageModel
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
)

MOST_BYTES = 12_000_000


def save_checkpoint(model: LanguageModel, config: PretrainedConfig, folder: Path) -> None:
    """FP16 weights without the head, which ``tie_word_embeddings`` restores on loading."""
    weights = {
        name: p.detach().half().cpu().contiguous()
        for name, p in model.state_dict().items()
    }
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise SystemExit(f"{name}: a weight is not finite in FP16; training diverged")
    temporary = folder / "model.safetensors.tmp"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(folder / "model.safetensors")
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0).save_pretrained(
        folder
    )


@torch.no_grad()
def verify_checkpoint(
    folder: Path, ids: np.ndarray, device: str, ships: bool, count: int = 8
) -> dict[str, float]:
    """Loads the folder with transformers alone and compares losses with our own modules."""
    torch.set_float32_matmul_precision("highest")
    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    wrong = {kind: keys for kind, keys in info.items() if keys and kind != "error_msgs"}
    if wrong:
        raise SystemExit(f"{folder}: transformers reports {wrong}")
    words = len(AutoTokenizer.from_pretrained(folder))
    if words != theirs.config.vocab_size if ships else words > theirs.config.vocab_size:
        raise SystemExit(f"{folder}: tokenizer and model disagree about the vocabulary")
    theirs = theirs.to(device).eval()
    block = evaluate.windows(ids)[:count].to(device)
    logits = theirs(block).logits[:, :-1].float()
    their_loss = float(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten())
    )
    our_loss = evaluate.mean_loss(
        evaluate.saved_model(folder, device),
        ids[: count * evaluate.WINDOW],
        device,
        batch=count,
    )
    if abs(their_loss - our_loss) > 1e-4:
        raise SystemExit(
            f"{folder}: transformers' loss {their_loss:.6f}, ours {our_loss:.6f}: not the same model"
        )
    size = sum(file.stat().st_size for file in folder.iterdir())
    if ships and size > MOST_BYTES:
        raise SystemExit(f"{folder}: {size} bytes; at most {MOST_BYTES} may ship")
    return {
        "transformers_loss": their_loss,
        "recipe_loss": our_loss,
        "folder_bytes": size,
    }
