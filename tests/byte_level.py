"""A small byte-level tokenizer, which both runtimes take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.families import VOCABULARY


def save_tokenizer(folder: Path, documents: Sequence[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents, trainers.BpeTrainer(vocab_size=VOCABULARY, limit_alphabet=64, show_progress=False)
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
