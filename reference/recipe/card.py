"""The model card (README.md) of a reference checkpoint, from the numbers training left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data import MIXTURE

ARCHITECTURES = {
    "mamba": "`MambaForCausalLM`: 10 Mamba-1 blocks, state 16, time-step rank 16",
    "mamba2": "`Mamba2ForCausalLM`: 10 Mamba-2 blocks, 16 heads of 32, state 64, one group, chunk 64",
    "hybrid": (
        "`FalconH1ForCausalLM`: 6 blocks, each with attention (4 heads, 2 key/value heads) and "
        "Mamba-2 (8 heads of 32, state 32) side by side, then a gated feed-forward of 512"
    ),
    "hymba": (
        "`HymbaForCausalLM` (KL Lens's own): 8 blocks of attention (4 heads, 2 key/value heads) and Mamba-1 (state 16, "
        "time-step rank 8) side by side, then a gated feed-forward of 192; 32 meta tokens; blocks 0, 4 and 7 attend to "
        "everything, the others to 256 positions and the meta tokens; 1 to 3 share keys and values, and 5 and 6"
    ),
}

# Of the shipped folder, where they are not the defaults.
OPTIONS = {
    "hymba": " --share 0.2 --minutes 2.2 --evaluations 5 --tokenizer reference/mamba/tokenizer.json"
}


def write_json(path: Path, content: dict[str, Any]) -> None:
    _write(path, json.dumps(content, indent=1) + "\n")


def write_card(folder: Path, ngram: dict[str, float]) -> None:
    """Reads ``training.json`` in the folder and writes ``README.md`` beside it."""
    _write(
        folder / "README.md",
        card(json.loads((folder / "training.json").read_text("utf-8")), ngram),
    )


def card(report: dict[str, Any], ngram: dict[str, float]) -> str:
    name = report["model"]
    test = report["test"]
    data = report["data"]
    last = min(report["history"], key=lambda r: r["wikitext2"] + r["enwik8"])
    sources = "\n".join(
        f"| {title} | {licence} | {data[key]['documents']:,} | {data[key]['tokens'] / 1e6:.1f} M "
        f"| {MIXTURE[key]:.0%} | {MIXTURE[key] * report['tokens'] / data[key]['tokens']:.1f} |"
        for key, title, licence in (
            (
                "enwik8",
                "English Wikipedia of 2006 (enwik8, plain text)",
                "CC BY-SA / GFDL",
            ),
            ("gutenberg", "Books from Project Gutenberg", "public domain in the USA"),
            ("wikitext2", "WikiText-2 (raw) train", "CC BY-SA 3.0"),
        )
    )
    rates = (
        f"Muon (rate {report['muon_rate']}, momentum 0.95, weight decay 0.1) for the projection matrices, "
        f"AdamW (rate {report['adam_rate']}, betas 0.9 and 0.95) for the rest"
        if report["muon_rate"]
        else f"AdamW (rate {report['adam_rate']}, betas 0.9 and 0.95, weight decay 0.1)"
    )
    others = " and ".join(report["trained_beside"])
    tokens_of = (
        " (that of the others)"
        if name == "hymba"
        else " trained on the training text below"
    )
    beside = f", shared with the training of {others}" if others else ""
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [{name}, state-space-model, kl-lens, reference]
---

# KL Lens reference checkpoint: {name}

A small language model trained from scratch so that the whole of KL Lens can be tried, tested and
demonstrated offline. It writes English-looking text and knows next to nothing; do not use it for answers.

- {ARCHITECTURES[name]}; hidden size {128 if name == "hymba" else 256}.
- {report["parameters"]:,} parameters, embedding and head tied, stored in FP16.
- Byte-level BPE of 4,096 tokens{tokens_of}; `<|endoftext|>` is token 0.

## Quality

| model | WikiText-2 test, token perplexity |
|---|---|
| **this checkpoint** | **{test["token_perplexity"]:.2f}** |
| 5-gram, modified Kneser-Ney, all the training text | {ngram["all"]:.2f} |
| 5-gram, modified Kneser-Ney, WikiText-2 train only | {ngram["wikitext2"]:.2f} |

Protocol: WikiText-2 raw test, its non-empty rows joined by two newlines
({data["test/wikitext2"]["tokens"]:,} tokens); non-overlapping windows of {test["window"]} tokens, each
predicting all its tokens but the first from the window alone; FP16 weights, float32 arithmetic. The
5-grams read the same tokens with their four predecessors. Per word (whitespace-separated,
{data["test/wikitext2"]["words"]:,} words) the same loss is a perplexity of
{test["word_perplexity"]:.1f}, and {test["bits_per_character"]:.3f} bits per character. These figures use this
vocabulary and are not comparable with token perplexities of other tokenizers.

Validation at the kept step ({last["step"]:,} of {report["steps"]:,}), cross-entropy per token: WikiText-2
{last["wikitext2"]:.4f}, enwik8 {last["enwik8"]:.4f}; training mixture {last["training"]:.4f}.
`training.json` has the whole curve.

## Training

| data | licence | documents | tokens | share of windows | times seen |
|---|---|---|---|---|---|
{sources}

- {report["tokens"] / 1e6:.0f} million tokens: {report["steps"]:,} steps of {report["batch"]} windows of
  {report["window"]} tokens; seed {report["seed"]}.
- {rates}.
- 2 % linear warm-up, then linear decay to zero; gradients clipped at norm 1; bfloat16 autocast over
  float32 weights; the weights of the lowest validation loss are kept.
- {report["minutes"]:.1f} minutes on one {report["device"]}{beside}.
- No validation or test text was trained on.

```
python reference/recipe/train.py --corpus corpus.tar.xz --model {name} --out reference/{name}{OPTIONS.get(name, "")}
```

The code is Apache-2.0 and so are these weights, as far as that is ours to say; the texts keep their own licences.
"""


def _write(path: Path, content: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(path)
