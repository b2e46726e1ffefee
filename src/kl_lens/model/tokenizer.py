"""The tokenizer of a checkpoint, or one that the user gives instead."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from kl_lens.base.errors import CheckpointError, one_line
from kl_lens.base.files import damage
from kl_lens.model.files import refusing
from kl_lens.model.hub import download

_MARKED = re.compile(r"<.+>|\[.+\]")
_ENDS = ("<eos>", "</s>", "<|endoftext|>", "[EOS]", "[SEP]")
_LARGEST_TOKEN = 2**24  # sixty times the largest known vocabulary
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(
    folder: Path, override: str | Path | None, trust_remote_code: bool
) -> Any | None:
    """The tokenizer of a checkpoint, or the one at `override`: a folder, a tokenizer.json, a list of tokens (.txt), a
    hub id."""
    path = folder if override is None else Path(override)
    is_file = os.path.isfile(path)
    if override is not None and not is_file and not os.path.isdir(path):
        path = download(str(override), weights=False)  # weights may be gigabytes
    if not is_file and not any((path / name).is_file() for name in _FILES):
        if override is None:
            return None
        raise CheckpointError(
            f"{override} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)"
        )
    # tokenizers raises bare Exception on a broken tokenizer.json
    with refusing(lambda error: f"{_unreadable(path)} ({one_line(error)})"):
        if is_file and path.suffix == ".txt":
            tokenizer: Any = _listed_tokenizer(path)
        elif is_file:
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            tokenizer = _from_folder(path, trust_remote_code)
        # Tokenizers fill all gaps below a huge token id, which takes gigabytes.
        largest = max(tokenizer.get_vocab().values(), default=0)
        if largest > _LARGEST_TOKEN:
            raise ValueError(
                f"it has a token with the id {largest}, larger than any vocabulary"
            )
        tokenizer("a")  # some settings only matter once it is used
        return tokenizer


def _from_folder(folder: Path, trust_remote_code: bool) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code
    )
    # Some classes bring their own pattern: a Qwen 3.5 whose files name Qwen2Tokenizer would be split as Qwen 2.
    file = folder / _FILES[0]
    fast = transformers.PreTrainedTokenizerFast
    if isinstance(tokenizer, fast) and file.is_file():
        used = _patterns(tokenizer.backend_tokenizer.to_str())
        if used != _patterns(file.read_text(encoding="utf-8")):
            return fast.from_pretrained(folder, local_files_only=True)
    return tokenizer


def _unreadable(place: Path) -> str:
    """What is wrong with a tokenizer."""
    for path in [place, *sorted(place.glob("*token*.json"))]:
        if path.suffix != ".json":
            continue
        with suppress(OSError, ValueError):
            content = json.loads(path.read_text(encoding="utf-8"))
            if content and isinstance(content, dict):
                continue
        return f"{path} {damage(path)}"
    if place.is_file():
        return f"{place} could not be read"
    return f"the tokenizer in {place} could not be read: copy its files again"


def _patterns(specification: str) -> list[str]:
    """The patterns at which a tokenizer.json splits text."""
    splitter = json.loads(specification).get("pre_tokenizer") or {}
    return [
        step["pattern"]["Regex"]
        for step in splitter.get("pretokenizers", [splitter])
        if "Regex" in step.get("pattern", ())
    ]


def _listed_tokenizer(path: Path) -> transformers.PreTrainedTokenizerFast:
    """From a list of tokens, one a line in the order of their ids: letters, and longer tokens such as `<eos>`. Nothing
    is merged. Characters that are not listed are dropped, here and in llama.cpp; text with such letters is refused."""
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    for number, line in enumerate(lines, 1):
        if not line or not line.isascii() or lines.count(line) > 1:
            raise ValueError(
                f"line {number}, {line!r}, is empty, there twice, or not ASCII"
            )
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = {
        line: bytewise.pre_tokenize_str(line)[0][0] for line in lines if len(line) == 1
    }
    vocabulary = {letters.get(line, line): index for index, line in enumerate(lines)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = bytewise
    backend.decoder = decoders.ByteLevel()
    ends = [line for line in lines if line in _ENDS]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **({"eos_token": ends[0]} if ends else {})
    )
    words = [line for line in lines if line not in letters]
    words.sort(key=lambda word: _MARKED.fullmatch(word) is None)  # special ones first
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(
                word, special=_MARKED.fullmatch(word) is not None, normalized=False
            )
            for word in words
        ]
    )
    return tokenizer
