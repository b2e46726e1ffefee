"""The part of a GGUF file that one token reads, from llama.cpp's tensor names."""

from __future__ import annotations

import math
import re

from kl_lens.targets.contents import BODY, HEAD, LOOKUP, Contents, StoredWeight
from kl_lens.targets.gguf.header import FileInfo


def file_contents(info: FileInfo) -> Contents:
    """States are F32; keys and values are F16 by default."""
    prefix = info.architecture
    shapes = {entry.name: entry.shape for entry in info.tensors}
    chosen_experts = expert_share(info)
    untied = "output.weight" in shapes
    weights = []
    for entry in info.tensors:
        role, share = BODY, 1.0
        if entry.name == "output.weight" or (entry.name == "token_embd.weight" and not untied):
            role = HEAD
        elif entry.name == "token_embd.weight":
            role, share = LOOKUP, 1 / entry.shape[0]
        elif "_exps." in entry.name:
            share = chosen_experts
        weights.append(StoredWeight(entry.name, entry.bytes, math.prod(entry.shape), role, share))
    inner = info.metadata.get(f"{prefix}.ssm.inner_size", 0)
    state = info.metadata.get(f"{prefix}.ssm.state_size", 0)
    fixed, growing = 0, 0
    for name, shape in shapes.items():
        if name.endswith(".ssm_conv1d.weight"):
            channels, kernel = shape[0], shape[-1]
            fixed += 4 * (inner * state + channels * (kernel - 1))
        elif re.search(r"\.attn_[kv]\.weight$", name):
            growing += 2 * shape[0]
        elif name.endswith(".attn_qkv.weight"):
            growing += 2 * (shape[0] - info.metadata.get(f"{prefix}.embedding_length", 0))
    return Contents(tuple(weights), fixed, growing)


def expert_share(info: FileInfo) -> float:
    """The share of the experts that one token reads; 1 for a model without experts."""
    experts = info.metadata.get(f"{info.architecture}.expert_count") or 0
    chosen = info.metadata.get(f"{info.architecture}.expert_used_count") or experts
    return chosen / experts if experts else 1.0
