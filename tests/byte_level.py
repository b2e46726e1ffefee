"""A small byte-level tokenizer, which both runtimes take."""

from collections.abc import Sequence
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.families import VOCABULARY


def save_tokenizer(
    folder: Path, documents: Sequence[str], vocabulary: int = VOCABULARY
) -> None:
    """With 256 tokens and more it knows every byte; without, llama.cpp splits what it does not know differently."""
    alphabet = pre_tokenizers.ByteLevel.alphabet() if vocabulary >= 256 else []
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            limit_alphabet=len(alphabet) or 64,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(
        folder
    )
