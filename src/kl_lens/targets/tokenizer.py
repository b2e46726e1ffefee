"""Finds the tokenizer of an exported model: beside it, inside it, or another; without transformers where possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from kl_lens.base.errors import TargetError
from kl_lens.targets.chat import (
    ArtifactTokenizer,
    chat_renderer,
    default_template,
    end_ids,
    read_json,
    special_texts,
    template_of,
)
from kl_lens.targets.registry import target_of
from kl_lens.targets.session import Session, TokenizingSession

TOKENIZER_FILE = "tokenizer.json"


def find_tokenizer(session: Session | None, artifact: Path, place: str | None = None) -> ArtifactTokenizer:
    """The tokenizer of an exported folder or a bare file; llama.cpp's sessions can tokenize by themselves.

    `place`: a folder, a tokenizer.json or a hub id to use instead of what comes with the artifact. transformers loads
    only for a hub id, and for a folder without tokenizer.json.
    """
    if (file := _file(artifact, place)) is not None:
        return _from_file(file)
    if place:
        return _from_transformers(place)
    if not isinstance(session, TokenizingSession):
        raise _none_at(artifact)
    return session.tokenizer()


class Openable(Protocol):
    """An artifact that can be opened, such as evaluation's subjects."""

    @property
    def path(self) -> Path: ...

    def open(self) -> Session: ...


class VocabularyTokenizer:
    """The vocabulary inside a file, read by its runtime, with the part of transformers' interface that we use."""

    bos_token_id = None

    def __init__(self, own: ArtifactTokenizer) -> None:
        self._own, self.eos_token_id = own, min(own.ends, default=None)

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._own.encode(text)

    def decode(self, ids: list[int], **_: Any) -> str:
        return self._own.decode(ids)

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}


def artifact_tokenizer(subject: Openable, place: str | None = None) -> Any:
    """The tokenizer for evaluation: transformers' own, which knows special tokens too, or the file's vocabulary."""
    beside = _file(subject.path, None)
    if chosen := place or (beside and beside.parent):
        from kl_lens.model import load_tokenizer

        return load_tokenizer(subject.path, chosen, trust_remote_code=False)
    if not target_of(subject.path).holds_vocabulary:
        raise _none_at(subject.path)
    session = subject.open()
    assert isinstance(session, TokenizingSession)
    try:
        return VocabularyTokenizer(session.tokenizer())
    except TargetError:
        session.close()
        raise


def _file(artifact: Path, place: str | None) -> Path | None:
    """The tokenizer's file: the given one, or the one in the given folder."""
    where = Path(place) if place else artifact
    if where.suffix == ".json":
        return where
    folder = where.parent if where.is_file() else where
    return folder / TOKENIZER_FILE if (folder / TOKENIZER_FILE).is_file() else None


def _none_at(artifact: Path) -> TargetError:
    return TargetError(f"{artifact} holds no tokenizer; pass one with --tokenizer")


def _from_file(path: Path) -> ArtifactTokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise TargetError(f"{path} cannot be read as a tokenizer: {error}; use --tokenizer") from error
    folder, special, template = path.parent, special_texts(path.parent), template_of(path.parent)
    cleaned = read_json(folder / "tokenizer_config.json").get("clean_up_tokenization_spaces")
    if cleaned and path.name == TOKENIZER_FILE and type(tokenizer.model).__name__ != "BPE":
        return _from_transformers(str(folder))  # only it knows which spaces to clean up
    # A file may hold truncation limits from training; prompts are not truncated.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = tokenizer.token_to_id(special.get("eos_token", ""))
    return ArtifactTokenizer(
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        begin=lambda text: list(tokenizer.encode(text).ids),
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        ends=frozenset([*end_ids(folder), *([] if end is None else [end])]),
        render=template and chat_renderer(template[1], special, str(template[0])),
    )


def _from_transformers(place: str) -> ArtifactTokenizer:
    from kl_lens.model import load_tokenizer

    tokenizer: Any = load_tokenizer(Path(place), place, trust_remote_code=False)
    end, template = tokenizer.eos_token_id, default_template(tokenizer.chat_template)
    return ArtifactTokenizer(
        encode=lambda text: [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]],
        begin=lambda text: [int(token) for token in tokenizer(text)["input_ids"]],
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        ends=frozenset() if end is None else frozenset([int(end)]),
        render=chat_renderer(template, tokenizer.special_tokens_map, place) if template else None,
    )
