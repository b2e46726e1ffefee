"""Converts a Hugging Face tokenizer to GGUF metadata, or says why llama.cpp has no equivalent.

llama.cpp knows pre-tokenizers by name. With a wrong name it silently splits text in other places. So the name is
derived from what the tokenizer does, and the written file is compared with the tokenizer on sample strings.
"""

from __future__ import annotations

import json
import re
import unicodedata
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kl_lens.base.errors import TargetError, UnsupportedError
from kl_lens.targets.tokenizer import varied_strings

PREFIX = "tokenizer.ggml."
CHAT_TEMPLATE = "tokenizer.chat_template"
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
BYTE_LEVEL = "gpt2"
SENTENCEPIECE = "llama"  # tokenizer.ggml.model
SPACES = "default"  # SentencePiece's pre-tokenizer: only spaces
# Of an artifact's settings: input of `differing_string`.
TOKENIZER_CHECK = "tokenizer_check"

# Special tokens: llama.cpp's names → transformers'.
SPECIAL = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}

# llama.cpp opens no file without merges. Text is merged from single characters on, so this one never happens.
_NO_MERGES = (("[NO]", "[MERGE]"),)
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The pattern in front of a byte-level step, and whether whole words of the vocabulary are taken before merging
# (ignore_merges) → llama.cpp's name.
SPLITS = {
    (_LLAMA3, True): "llama-bpe",
    (_LLAMA3, False): "dbrx",
    (_QWEN2, False): "qwen2",
    (_QWEN35, False): "qwen35",
    (_TEKKEN, True): "tekken",
    (_O200K, False): "gpt-4o",
}
# Differences in llama.cpp, by its name for the pre-tokenizer or the scheme of spaces.
_NOTES = {
    "NFC": "the tokenizer composes characters first (NFC) and llama.cpp does not: text with combining marks "
    "is split differently unless it is composed already",
    **dict.fromkeys(
        ("tekken", "gpt-4o"),
        "llama.cpp sees the case of ASCII letters only, and no combining marks: words of other scripts that "
        "change case or carry such marks are split differently",
    ),
    "always": "llama.cpp, like SentencePiece, puts a space before a text that begins with one, transformers does not",
    "first": "llama.cpp puts no space before a text, transformers does (in chats, which begin with a special token, "
    "neither does)",
}
# The kind of sample strings that can still be compared under each note.
_FORMS = {"tekken": "ascii", "gpt-4o": "ascii", "always": "unspaced", "first": "spaced"}


@dataclass(frozen=True)
class TokenizerData:
    """A tokenizer as a file holds it."""

    metadata: dict[str, Any]  # in the order of the file
    check: dict[str, Any]  # input of `differing_string`
    notes: tuple[str, ...] = ()


def tokenizer_data(
    tokenizer: Any, vocabulary: int, ends: Sequence[int] = ()
) -> TokenizerData:
    """A transformers tokenizer for a model whose embedding has `vocabulary` rows. Rows without a token get a name that
    no text contains. `ends`: further tokens that end a text. TargetError: llama.cpp has no equivalent."""
    specification = _specification(tokenizer)
    model, pre, notes, switches = _splitting(specification)
    names = {index: text for text, index in specification["model"]["vocab"].items()}
    added = {token["id"]: token for token in specification.get("added_tokens", ())}
    highest = max([*names, *added])
    if highest >= vocabulary:
        raise TargetError(
            f"the tokenizer has a token {highest}, but the embedding only {vocabulary} rows; give the model's own "
            "tokenizer with --tokenizer; --without-tokenizer makes a file that works with token ids only"
        )
    tokens = []
    types = []
    for index in range(vocabulary):
        if index in added:
            tokens.append(added[index]["content"])
            types.append(CONTROL if added[index]["special"] else USER_DEFINED)
        elif index in names:
            tokens.append(names[index])
            byte = model == SENTENCEPIECE and re.fullmatch(
                "<0x[0-9A-F]{2}>", names[index]
            )
            types.append(BYTE if byte else NORMAL)
        else:
            tokens.append(f"[PAD{index}]")
            types.append(UNUSED)
    merges = [
        m.split(" ") if isinstance(m, str) else m
        for m in specification["model"]["merges"]
    ]
    ids_of = {
        name: getattr(tokenizer, f"{short}_token_id") for name, short in SPECIAL.items()
    }
    special = {name: int(index) for name, index in ids_of.items() if index is not None}
    template = getattr(tokenizer, "chat_template", None) or None
    if isinstance(template, dict):  # several, such as `default` and `tool_use`
        template = [{"name": name, "template": text} for name, text in template.items()]
    # If a file names no end token, llama.cpp takes token 11, whatever that is. Name one that no text contains.
    silent = [index for index, kind in enumerate(types) if kind in (CONTROL, UNUSED)]
    text_ends = [
        index
        for index in (special.get("eos"), *ends)
        if index is not None and index < vocabulary
    ]
    samples = [token["content"] for token in added.values()][:20]
    check = {
        "form": next((_FORMS[name] for name in notes if name in _FORMS), "all"),
        "special": samples,
    }
    ids = [
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in sample_strings(check)
    ]
    special |= _ends(list(dict.fromkeys(text_ends)) or silent[:1], tokens, template)
    values = {
        "model": model,
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(pair) for pair in merges or _NO_MERGES]
        if model == BYTE_LEVEL
        else [],
        "scores": _scores(tokens, merges) if model == SENTENCEPIECE else [],
        **{f"{name}_token_id": index for name, index in special.items()},
        **_added_around(tokenizer),
        **switches,
    }
    metadata = {f"{PREFIX}{key}": value for key, value in values.items()} | {
        CHAT_TEMPLATE: template
    }
    sentences = tuple(_NOTES[name] for name in notes)
    return TokenizerData(metadata, check | {"checksums": _checksums(ids)}, sentences)


def differing_string(
    encode: Callable[[str], list[int]], check: Mapping[str, Any]
) -> str | None:
    """The first sample string to which `encode` gives other ids than the exported tokenizer."""
    strings = sample_strings(check)
    checksums = _checksums([encode(text) for text in strings])
    expected = check["checksums"]
    digits = (slice(8 * index, 8 * index + 8) for index in range(len(strings)))
    return next(
        (
            text
            for text, at in zip(strings, digits, strict=True)
            if checksums[at] != expected[at]
        ),
        None,
    )


def sample_strings(check: Mapping[str, Any]) -> list[str]:
    """Strings that llama.cpp must tokenize like the model's tokenizer, except those that the notes mention."""
    form = check["form"]
    strings = varied_strings(300, special=() if form == "unspaced" else check["special"])
    strings = [unicodedata.normalize("NFC", text) for text in strings]
    if form == "ascii":
        return [text for text in strings if text.isascii()]
    bare = [text.lstrip(" ") for text in strings]
    return {"unspaced": bare, "spaced": [f" {text}" for text in bare]}.get(form, strings)


def _checksums(ids: Sequence[Sequence[int]]) -> str:
    """Eight hexadecimal digits per string."""
    return "".join(
        f"{zlib.crc32(json.dumps(list(tokens)).encode()):08x}" for tokens in ids
    )


def _specification(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedError(
            f"{type(tokenizer).__name__} has no tokenizer.json behind it, which GGUF needs; "
            "--without-tokenizer makes a file that works with token ids only"
        )
    specification: dict[str, Any] = json.loads(backend.to_str())
    kind = specification["model"].get("type")
    if kind != "BPE":
        raise _unknown(f"its model is {kind}, not BPE")
    return specification


def _splitting(
    specification: dict[str, Any],
) -> tuple[str, str, list[str], dict[str, bool]]:
    """llama.cpp's names for the tokenizer and its pre-tokenizer, names of notes, and switches."""
    if specification["model"].get("byte_fallback"):
        scheme = _space_scheme(specification)
        return (
            SENTENCEPIECE,
            SPACES,
            [scheme] if scheme in _NOTES else [],
            {"add_space_prefix": scheme in ("each", "always")},
        )
    kinds = [
        step["type"] for step in _steps(specification.get("normalizer"), "normalizers")
    ]
    if kinds and set(kinds) != {"NFC"}:
        raise _unknown(f"it normalises with {'+'.join(kinds)}")
    pre = _pre_tokenizer(specification, composes=bool(kinds))
    return BYTE_LEVEL, pre, [name for name in (*kinds[:1], pre) if name in _NOTES], {}


def _pre_tokenizer(specification: dict[str, Any], composes: bool) -> str:
    steps = _steps(specification.get("pre_tokenizer"), "pretokenizers")
    unknown = _unknown(f"its pre-tokenizer is {_names(steps)}")
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        raise unknown
    # Under some of its names llama.cpp takes whole words from the vocabulary, under others it does not.
    whole_words = bool(specification["model"].get("ignore_merges"))
    first = steps[0]
    by_pattern = steps[-1].get("use_regex", True)
    if len(steps) == 1 and by_pattern and not whole_words:
        return "mpt" if composes else "gpt-2"
    digits = first["type"] == "Digits" and first.get("individual_digits")
    if len(steps) == 2 and digits and by_pattern and not whole_words:
        return "starcoder"
    if len(steps) == 2 and first["type"] == "Split" and not by_pattern:
        pattern = (first.get("pattern") or {}).get("Regex", "")
        name = SPLITS.get((pattern, whole_words))
        # The two are equivalent here: these patterns match all text.
        isolates = (first.get("behavior"), bool(first.get("invert"))) in (
            ("Isolated", False),
            ("Removed", True),
        )
        if name and isolates:
            return name
    raise unknown


def _space_scheme(specification: dict[str, Any]) -> str:
    """Where a SentencePiece tokenizer puts a space: before a text and after every special token (`each`), the same
    unless there is one already (`always`), only before a text (`first`), or nowhere (`never`)."""
    normalizers = _steps(specification.get("normalizer"), "normalizers")
    steps = _steps(specification.get("pre_tokenizer"), "pretokenizers")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if steps in ([], [_GEMMA]) and normalizers in (
        [spaces],
        [{"type": "Prepend", "prepend": "▁"}, spaces],
    ):
        return "each" if len(normalizers) == 2 else "never"
    if (
        not normalizers
        and len(steps) == 1
        and steps[0]["type"] == "Metaspace"
        and not steps[0].get("split")
    ):
        return str(steps[0].get("prepend_scheme", "always"))
    raise _unknown(
        f"it is SentencePiece with the normalizer {_names(normalizers)} and the pre-tokenizer {_names(steps)}"
    )


# Of Gemma: splits nowhere, because the normalizer has replaced all spaces.
_GEMMA = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}


def _steps(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return list(step[inner]) if step["type"] == "Sequence" else [step]


def _names(steps: list[dict[str, Any]]) -> str:
    patterns = [str((step.get("pattern") or {}).get("Regex", ""))[:40] for step in steps]
    described = [
        step["type"] + f"({p})" * bool(p) for step, p in zip(steps, patterns, strict=True)
    ]
    return "+".join(described) or "none"


def _unknown(reason: str) -> TargetError:
    return UnsupportedError(
        f"llama.cpp has no equivalent of this tokenizer: {reason}. It supports byte-level BPE split as in GPT-2, "
        "GPT-NeoX, StarCoder, Llama 3, DBRX, Qwen 2, Qwen 3.5 and Mistral Nemo, and SentencePiece; --without-tokenizer "
        "makes a file that works with token ids only"
    )


def _scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> list[float]:
    """SentencePiece merges the pair whose result has the highest score, so scores follow the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _ends(
    ends: Sequence[int],
    tokens: Sequence[str],
    template: str | list[dict[str, str]] | None,
) -> dict[str, int]:
    """A file has room for three tokens that end a text: eos, eot (end of a turn) and eom. llama.cpp knows more by
    their names (`<|im_end|>`, `<|eot_id|>` and the like)."""
    text = (
        template
        if isinstance(template, str)
        else " ".join(entry["template"] for entry in template or ())
    )
    turn = next(
        (i for i in ends if tokens[i] in text), ends[1] if len(ends) > 1 else None
    )
    further = [i for i in ends[1:] if i != turn]
    special = {
        "eos": ends[0] if ends else None,
        "eot": turn,
        "eom": further[0] if further else None,
    }
    return {name: index for name, index in special.items() if index is not None}


def _added_around(tokenizer: Any) -> dict[str, bool]:
    """Whether the tokenizer itself puts a beginning or an end token around a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    longer = len(full) > len(plain)
    return {
        "add_bos_token": bool(longer and full[0] == tokenizer.bos_token_id),
        "add_eos_token": bool(longer and full[-1] == tokenizer.eos_token_id),
    }
