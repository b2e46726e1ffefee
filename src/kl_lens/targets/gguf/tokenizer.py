"""A Hugging Face tokenizer as GGUF metadata, or a reason why llama.cpp would split text differently.

A wrong `tokenizer.ggml.pre` makes llama.cpp split text in other places and say nothing, so only those
pre-tokenizers are written whose results a test has compared with Hugging Face's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kl_lens.errors import TargetError, UnsupportedError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Split patterns in front of a byte-level step → llama.cpp's name.
_SPLITS = {
    rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_TAIL}": "llama-bpe",
    rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_TAIL}": "qwen2",
}


@dataclass(frozen=True)
class TokenizerData:
    """What goes into the file."""

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    special: dict[str, int]  # bos, eos, pad, unknown → id
    add_bos: bool
    notes: tuple[str, ...] = ()


def tokenizer_data(tokenizer: Any, vocabulary: int) -> TokenizerData:
    """The tokenizer for a model whose embedding has `vocabulary` rows.

    Raises:
        TargetError: for tokenizers that llama.cpp has no proven equal of.
    """
    specification = _specification(tokenizer)
    pre, notes = _pre_tokenizer(specification)
    model = specification["model"]
    names = {index: text for text, index in model["vocab"].items()}
    added = {token["id"]: token for token in specification.get("added_tokens", ())}
    highest = max([*names, *added])
    if highest >= vocabulary:
        raise TargetError(
            f"the tokenizer has a token {highest} and the model only {vocabulary} rows; give the model's own tokenizer"
        )
    tokens, types = [], []
    for index in range(vocabulary):
        if index in added:
            tokens.append(added[index]["content"])
            types.append(CONTROL if added[index]["special"] else USER_DEFINED)
        elif index in names:
            tokens.append(names[index])
            types.append(NORMAL)
        else:
            tokens.append(f"[PAD{index}]")
            types.append(UNUSED)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return TokenizerData(pre, tokens, types, merges, _special(tokenizer), _adds_bos(tokenizer), notes)


def _specification(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedError(
            f"{type(tokenizer).__name__} has no tokenizer.json behind it, which GGUF needs; "
            "--without-tokenizer makes a file that works with token ids alone"
        )
    specification: dict[str, Any] = json.loads(backend.to_str())
    kind = specification["model"].get("type")
    if kind != "BPE":
        raise _unknown(f"its model is {kind}, not BPE")
    if not specification["model"].get("merges"):
        raise _unknown("it is a BPE without merges, which llama.cpp does not open")
    if specification["model"].get("byte_fallback"):
        raise _unknown("it is a SentencePiece-like BPE with byte fallback")
    return specification


def _pre_tokenizer(specification: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """llama.cpp's name for how text is split before the merges, and what it does differently."""
    notes: tuple[str, ...] = ()
    kinds = [step["type"] for step in _steps(specification.get("normalizer"), "normalizers")]
    if kinds and set(kinds) != {"NFC"}:
        raise _unknown(f"it normalises with {'+'.join(kinds)}")
    if kinds:
        notes = (
            "the tokenizer composes characters first (NFC) and llama.cpp does not: text with combining marks "
            "is split differently unless it is composed already",
        )
    steps = _steps(specification.get("pre_tokenizer"), "pretokenizers")
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise _unknown(f"its pre-tokenizer is {_names(steps)}")
    if len(steps) == 1 and steps[0].get("use_regex", True):
        return ("mpt" if kinds else "gpt-2"), notes
    if len(steps) == 2 and steps[0]["type"] == "Split" and not steps[1].get("use_regex", True):
        pattern = (steps[0].get("pattern") or {}).get("Regex", "")
        name = _SPLITS.get(pattern)
        plain = steps[0].get("behavior") == "Isolated" and not steps[0].get("invert")
        # llama.cpp takes whole words from the vocabulary before merging with llama-bpe, and only with that.
        whole_words = bool(specification["model"].get("ignore_merges"))
        if name and plain and whole_words == (name == "llama-bpe"):
            return name, notes
    raise _unknown(f"its pre-tokenizer is {_names(steps)}")


def _steps(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return list(step[inner]) if step["type"] == "Sequence" else [step]


def _names(steps: list[dict[str, Any]]) -> str:
    described = [
        f"{step['type']}({str((step.get('pattern') or {}).get('Regex', ''))[:40]})"
        if step["type"] == "Split"
        else step["type"]
        for step in steps
    ]
    return "+".join(described) or "none"


def _unknown(reason: str) -> TargetError:
    return UnsupportedError(
        f"no proven llama.cpp tokenizer equals this model's: {reason}; known are byte-level BPE of the GPT-2, "
        "GPT-NeoX, Llama-3 and Qwen-2 kind; --without-tokenizer makes a file that works with token ids alone"
    )


def _special(tokenizer: Any) -> dict[str, int]:
    special = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "padding": tokenizer.pad_token_id,
        "unknown": tokenizer.unk_token_id,
    }
    return {name: int(index) for name, index in special.items() if index is not None}


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer itself puts a beginning token in front."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    return bool(len(full) > len(plain) and full[0] == tokenizer.bos_token_id)
