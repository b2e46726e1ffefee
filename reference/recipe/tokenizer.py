"""The byte-level BPE vocabulary of the reference checkpoints, and text to token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from data import END_OF_TEXT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
_BATCH_CHARACTERS = 16_000_000  # bounds the memory of the tokenizer's offset records


def train_tokenizer(documents: Iterable[str], vocabulary: int) -> Tokenizer:
    """GPT-2 style byte-level BPE; ``<|endoftext|>`` is token 0."""
    tokenizer = Tokenizer(models.BPE())
    # GPT-2's own split pattern: what llama.cpp calls the `gpt-2` pre-tokenizer.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=True
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes what ``AutoTokenizer`` needs; compact JSON, because the folder has a size limit."""
    content = json.loads(tokenizer.to_str())
    _write(
        folder / "tokenizer.json",
        json.dumps(content, ensure_ascii=False, separators=(",", ":")),
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
    }
    _write(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """Every document preceded by ``<|endoftext|>``, as one array of uint16."""
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype=np.uint16)
    pieces: list[np.ndarray] = []
    for batch in _batches(documents):
        for encoding in tokenizer.encode_batch_fast(batch):
            pieces += [end, np.array(encoding.ids, dtype=np.uint16)]
    return np.concatenate(pieces)


def encode_text(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """One text as it is, with no token added."""
    return np.array(tokenizer.encode(text).ids, dtype=np.uint16)


def _batches(documents: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _write(path: Path, content: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(content, encoding="utf-8")
    temporary.replace(path)
