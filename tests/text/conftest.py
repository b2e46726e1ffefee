"""A small tokenizer and small texts, so that the text room is tested without any download."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kl_lens.text.sources import Document, TextSource

WORDS = [
    f"{a}{b}{c}" for a in "bdfklmnprst" for b in "aeiou" for c in ("n", "r", "st", "lo")
]


def prose(words: int, seed: int) -> str:
    """Made-up prose: sentences of eight words, paragraphs of five sentences."""
    generator = random.Random(seed)
    sentences = [
        " ".join(generator.choices(WORDS, k=8)) + "." for _ in range(max(1, words // 8))
    ]
    return "\n\n".join(
        " ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5)
    )


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prose(2000, seed=0)], trainer)
    return tokenizer


@pytest.fixture(scope="session")
def source() -> TextSource:
    """Forty documents of some three hundred words."""
    documents = tuple(Document(f"made-up {n}", prose(300, seed=n)) for n in range(1, 41))
    return TextSource("made-up", None, documents)
