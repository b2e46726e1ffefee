"""The tokenizer of an exported model that comes without its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kl_lens.errors import TargetError
from kl_lens.evaluation.judged import JudgedArtifact


class VocabularyTokenizer:
    """The vocabulary inside a GGUF file, read by llama.cpp, with as much of transformers' interface as we use."""

    bos_token_id = None

    def __init__(self, session: Any) -> None:
        self._session = session
        self.eos_token_id = session.file.metadata.get("tokenizer.ggml.eos_token_id")

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(token) for token in self._session.tokenize(text)]

    def decode(self, ids: list[int], **_: Any) -> str:
        return str(self._session.detokenize(ids))

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}


def artifact_tokenizer(judged: JudgedArtifact, place: str | None = None) -> Any:
    """The tokenizer beside an artifact, the one at `place` when given, or the vocabulary inside a GGUF file."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if place and not Path(place).exists():
        try:
            return AutoTokenizer.from_pretrained(place)  # a hub id
        except (OSError, ValueError) as error:
            raise TargetError(f"--tokenizer {place}: no such file, and no tokenizer on the hub") from error
    folder = Path(place) if place else judged.path
    if folder.suffix == ".json" and folder.is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(folder))
    folder = folder.parent if folder.is_file() else folder
    if (folder / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if place:
        raise TargetError(f"{folder} holds no tokenizer; pass one with --tokenizer")
    session: Any = judged.open()
    # A runtime may abort the process when it is asked for the tokens of a file without a vocabulary.
    if not hasattr(session, "tokenize") or _has_no_vocabulary(session):
        session.close()
        raise TargetError(f"{judged.path} holds no tokenizer; pass one with --tokenizer")
    return VocabularyTokenizer(session)


def _has_no_vocabulary(session: Any) -> bool:
    return session.file.metadata.get("tokenizer.ggml.model", "no_vocab") in ("no_vocab", "none")
