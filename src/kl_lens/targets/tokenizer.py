"""Text for a session: the tokenizer beside an exported model, or the one inside it, without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_lens.errors import TargetError
from kl_lens.targets.session import Session

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class ArtifactTokenizer:
    """Tokens of a text, without beginning or end tokens, and the text of tokens."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]  # tokens behind which a text is over; empty where none is known


def find_tokenizer(session: Session, artifact: Path, place: str | None = None) -> ArtifactTokenizer:
    """The tokenizer of a session.

    Args:
        session: of the artifact; one of llama.cpp can tokenize by itself.
        artifact: an exported folder or a .gguf file.
        place: a folder, a tokenizer.json or a hub id to use instead of what comes with the artifact. transformers
            loads only for a hub id, and for a folder without tokenizer.json.
    """
    where = Path(place) if place else artifact
    if where.suffix == ".json":
        return _from_file(where)
    folder = where.parent if where.suffix == ".gguf" else where
    if (folder / TOKENIZER_FILE).is_file():
        return _from_file(folder / TOKENIZER_FILE)
    if place:
        return _from_transformers(place)
    if not hasattr(session, "tokenize"):
        raise TargetError(f"{folder} holds no tokenizer; pass one with --tokenizer")
    inside: Any = session
    end = inside.file.metadata.get("tokenizer.ggml.eos_token_id")
    ends = frozenset() if end is None else frozenset([int(end)])
    return ArtifactTokenizer(inside.tokenize, inside.detokenize, ends)


def _from_file(path: Path) -> ArtifactTokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more precise
        raise TargetError(
            f"{path} cannot be read as a tokenizer: {error}; pass one with --tokenizer"
        ) from error
    settings = _read(path.parent / "tokenizer_config.json")
    cleaned = path.name == TOKENIZER_FILE and settings.get("clean_up_tokenization_spaces")
    if cleaned and type(tokenizer.model).__name__ != "BPE":
        return _from_transformers(str(path.parent))  # it alone knows which spaces those are
    # A file may bring the limits of training along; a prompt is taken as it is.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return ArtifactTokenizer(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        ends=_ends(path.parent, tokenizer),
    )


def _ends(folder: Path, tokenizer: Any) -> frozenset[int]:
    """The end token that the tokenizer's files name, or else the ones of the model's own generation settings."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read(folder / name).get("eos_token")
        if isinstance(token, dict):  # written out, with how it is found in a text
            token = token.get("content")
        if token is not None:
            found = tokenizer.token_to_id(token)
            return frozenset() if found is None else frozenset([int(found)])
    ids = _read(folder / "generation_config.json").get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else [] if ids is None else [ids])


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TargetError(f"{path} cannot be read: {error}; copy the tokenizer's files again") from error
    return data if isinstance(data, dict) else {}


def _from_transformers(place: str) -> ArtifactTokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=Path(place).is_dir())
    except Exception as error:  # a broken file, no such folder, no such hub id, no network
        reason = str(error).strip().partition("\n")[0]
        raise TargetError(
            f"{place} holds no tokenizer that can be read ({reason}); give a folder, a tokenizer.json or a hub id"
        ) from error
    end = tokenizer.eos_token_id
    return ArtifactTokenizer(
        encode=lambda text: [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]],
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        ends=frozenset() if end is None else frozenset([int(end)]),
    )
