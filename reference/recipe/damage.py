"""Every component of a checkpoint quantized alone, by plain forwards on a GPU: KL on one text, damage on another.

    python reference/recipe/damage.py --folder reference/hymba --windows windows.npz --out damage.json

What `kl-lens measure` and `kl-lens paper rank` do on any machine, without their CPU kernels' packages: for a GPU host
with torch, triton and transformers alone. `windows.npz` holds token ids: `calibration` and `test`, (windows, tokens)
each. Results are written after every format, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import models
import numpy as np
import torch
from torch import Tensor, nn

from kl_lens.model.architectures import hymba
from kl_lens.weights.formats import get_format

BATCH = 64


def components(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every matrix that is multiplied; the head is the embedding."""
    found = {
        n: m.weight
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and n != "lm_head"
    }
    return {"model.embed_tokens": model.get_input_embeddings().weight, **found}


@torch.no_grad()
def log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).logits.log_softmax(-1)


@torch.no_grad()
def compared(
    model: nn.Module, teacher: list[Tensor], ids: Tensor
) -> dict[str, list[float]]:
    """By window: mean KL(teacher‖student), and the change of cross-entropy of all tokens but the first."""
    result: dict[str, list[float]] = {"kl": [], "delta_cross_entropy": []}
    for before, block in zip(teacher, ids.split(BATCH), strict=True):
        after = log_probabilities(model, block)
        change = before - after
        # p (e^d − 1 − d) with d = log q − log p: positive term by term, so that nothing cancels.
        kl = (before.exp() * (torch.expm1(-change) + change)).sum(-1)
        result["kl"] += kl.mean(-1).tolist()
        paired = change[:, :-1].gather(-1, block[:, 1:, None])[..., 0]
        result["delta_cross_entropy"] += paired.mean(-1).tolist()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--windows", type=Path, required=True)
    parser.add_argument("--formats", nargs="+", default=["int4", "int8"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    hymba.mamba_selective_scan = models._hymba_scan
    hymba.causal_conv1d_fn = models._hymba_convolution
    model = (
        hymba.HymbaForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
        .to(args.device)
        .eval()
    )
    texts = {
        name: torch.from_numpy(ids).long().to(args.device)
        for name, ids in np.load(args.windows).items()
    }
    teachers = {
        name: [log_probabilities(model, block) for block in ids.split(BATCH)]
        for name, ids in texts.items()
    }
    base = {
        name: float(
            -torch.cat(
                [
                    t[:, :-1].gather(-1, b[:, 1:, None])
                    for t, b in zip(teachers[name], ids.split(BATCH), strict=True)
                ]
            ).mean()
        )
        for name, ids in texts.items()
    }
    started = time.monotonic()
    report = {"cross_entropy": base, "device": args.device, "results": {}}
    for fmt in args.formats:
        for name, parameter in components(model).items():
            kept = parameter.data
            parameter.data = get_format(fmt).roundtrip(kept.cpu()).to(kept)
            report["results"].setdefault(fmt, {})[name] = {
                text: compared(model, teachers[text], ids) for text, ids in texts.items()
            }
            parameter.data = kept
        args.out.write_text(json.dumps(report), encoding="utf-8")
        print(fmt, f"{time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
