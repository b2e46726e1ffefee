"""The vocabulary of a GGUF file as a tokenizer of transformers: `tokenizer.py` backwards.

Where llama.cpp splits text in a way that is not known here, nothing is written, and the model has no tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kl_lens.targets.gguf.header import FileInfo
from kl_lens.targets.gguf.tokenizer import (
    BYTE_LEVEL,
    CHAT_TEMPLATE,
    CONTROL,
    NORMAL,
    PREFIX,
    SENTENCEPIECE,
    SPECIAL,
    SPLITS,
    UNUSED,
    USER_DEFINED,
)

_LLAMA3 = "llama-bpe"
# llama.cpp's further names for the same splitting.
_ALIASES = {
    **dict.fromkeys(("llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("smollm", "refact", "command-r"), "starcoder"),
    "olmo": "gpt-2",
}
_PATTERNS = {name: key for key, name in SPLITS.items()}


def write_tokenizer(info: FileInfo, folder: Path) -> None:
    vocabulary = {
        key.removeprefix(PREFIX): value
        for key, value in info.metadata.items()
        if key.startswith(PREFIX)
    }
    tokens = vocabulary.get("tokens", [])
    types = vocabulary.get("token_type", [NORMAL] * len(tokens))
    pre = _ALIASES.get(vocabulary.get("pre", ""), vocabulary.get("pre"))
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != UNUSED
    }
    if vocabulary.get("model") == SENTENCEPIECE:
        backend = _sentencepiece(vocabulary, ids)
        begins = True
    elif vocabulary.get("model") == BYTE_LEVEL and _is_known(pre):
        backend = _byte_level(vocabulary, ids, str(pre))
        begins = pre == _LLAMA3
    else:
        return
    for kind in (CONTROL, USER_DEFINED):
        added = [token for token, index in ids.items() if types[index] == kind]
        backend.add_tokens(
            [
                tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)
                for token in added
            ]
        )
    special = {
        f"{name}_token": tokens[vocabulary[f"{key}_token_id"]]
        for key, name in SPECIAL.items()
        if vocabulary.get(f"{key}_token_id", len(tokens)) < len(tokens)
    }
    around = [
        special[f"{name}_token"]
        if vocabulary.get(f"add_{name}_token", default) and f"{name}_token" in special
        else ""
        for name, default in (("bos", begins), ("eos", False))
    ]
    if any(around):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{around[0]} $A {around[1]}".strip(),
            pair=f"{around[0]} $A $B {around[1]}".strip(),
            special_tokens=[(token, ids[token]) for token in around if token],
        )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=info.metadata.get(CHAT_TEMPLATE),
        **special,
    ).save_pretrained(folder)


def _is_known(pre: Any) -> bool:
    return pre in (*_PATTERNS, "gpt-2", "mpt", "starcoder")


def _byte_level(vocabulary: dict[str, Any], ids: dict[str, int], pre: str) -> Any:
    merges = [tuple(pair.split(" ", 1)) for pair in vocabulary.get("merges", ())]
    known = [pair for pair in merges if {*pair, "".join(pair)} <= ids.keys()]
    pattern, whole_words = _PATTERNS.get(pre, ("", False))
    backend = tokenizers.Tokenizer(models.BPE(ids, known, ignore_merges=whole_words))
    steps: list[Any] = []
    if pattern:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    elif pre == "starcoder":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if steps[1:] else steps[0]
    if pre == "mpt":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: dict[str, Any], ids: dict[str, int]) -> Any:
    """Pairs are merged in the order of the scores of what they become."""
    scores = vocabulary["scores"]
    merges = [
        (token[:cut], token[cut:])
        for token, index in sorted(ids.items(), key=lambda item: -scores[item[1]])
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    unknown = vocabulary["tokens"][vocabulary.get("unknown_token_id", 0)]
    model = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    spaced = vocabulary.get("add_space_prefix", True)
    replaced = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), replaced] if spaced else [replaced]
    )
    steps: list[Any] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if spaced:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend
