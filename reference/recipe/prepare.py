"""From the text archive to token ids on disk, and the n-gram yardstick over the same ids.

Run as a script with a work folder, it computes the yardstick (``train.py`` does so beside the
training, on the CPU).
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import ngram
import numpy as np
import tokenizer as bpe
from data import Corpus
from tokenizers import Tokenizer


def tokenise(
    corpus_path: Path,
    work: Path,
    tokenizer_file: Path | None,
    share: float,
    vocabulary: int,
) -> None:
    """Writes tokenizer, ids of every text and their sizes to ``work``, unless already there."""
    if (work / "facts.json").exists():
        return
    work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    corpus = Corpus(corpus_path)
    documents = corpus.training_documents()
    if share < 1:  # whole documents from the front, up to that share of the characters
        documents |= {
            name: first_share(documents[name], share) for name in ("enwik8", "gutenberg")
        }
    print(f"corpus read, {time.monotonic() - started:.0f} s", flush=True)
    if tokenizer_file is not None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    else:
        tokenizer = bpe.train_tokenizer(
            (text for texts in documents.values() for text in texts), vocabulary
        )
    bpe.save_tokenizer(tokenizer, work)
    print(f"tokenizer ready, {time.monotonic() - started:.0f} s", flush=True)

    facts: dict[str, dict[str, int]] = {}
    ids = {
        name: bpe.encode_documents(tokenizer, texts) for name, texts in documents.items()
    }
    for name, texts in documents.items():
        facts[name] = {
            "documents": len(texts),
            "characters": sum(map(len, texts)),
            "tokens": len(ids[name]),
        }
    held_out = {f"valid/{name}": text for name, text in corpus.validation_texts().items()}
    held_out["test/wikitext2"] = corpus.test_text()
    for name, text in held_out.items():
        ids[name] = bpe.encode_text(tokenizer, text)
        facts[name] = {
            "words": len(text.split()),
            "characters": len(text),
            "tokens": len(ids[name]),
        }
    np.savez_compressed(
        work / "ids.npz", **{name.replace("/", "."): array for name, array in ids.items()}
    )
    (work / "facts.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    print(f"tokenised, {time.monotonic() - started:.0f} s: {facts}", flush=True)


def first_share(documents: list[str], share: float) -> list[str]:
    ends = np.cumsum([len(text) for text in documents])
    return documents[: int(np.searchsorted(ends, share * ends[-1])) + 1]


def load(work: Path) -> dict[str, np.ndarray]:
    with np.load(work / "ids.npz") as stored:
        return {name.replace(".", "/"): stored[name] for name in stored.files}


def facts(work: Path) -> dict[str, dict[str, int]]:
    return json.loads((work / "facts.json").read_text(encoding="utf-8"))


def copy_tokenizer(work: Path, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(work / name, folder / name)


def ngram_result(work: Path) -> dict[str, float]:
    return json.loads((work / "ngram.json").read_text(encoding="utf-8"))


def measure_ngrams(work: Path) -> None:
    """WikiText-2 test perplexity of 5-grams on WikiText-2 alone and on all the training text."""
    ids = load(work)
    test = ids["test/wikitext2"]
    everything = np.concatenate([ids["enwik8"], ids["gutenberg"], ids["wikitext2"]])
    result = {
        "wikitext2": ngram.perplexity(ids["wikitext2"], test, bpe.VOCABULARY),
        "all": ngram.perplexity(everything, test, bpe.VOCABULARY),
    }
    (work / "ngram.json").write_text(json.dumps(result), encoding="utf-8")
    print("5-gram Kneser-Ney, WikiText-2 test token perplexity:", result, flush=True)


if __name__ == "__main__":
    measure_ngrams(Path(sys.argv[1]))
