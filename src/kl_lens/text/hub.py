"""Texts from the Hugging Face hub: Penn Treebank, C4, the Pile.

They are streamed with the `datasets` library, and only the beginning of the wanted split is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kl_lens.base.errors import TextError
from kl_lens.text.documents import Document, TextSource, documents_of

MOST_CHARACTERS = 16_000_000  # more than all of WikiText-2
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class HubText:
    repository: str
    files: dict[str, str]  # split → pattern of its files in the repository
    column: str
    evaluation_split: str
    revision: str | None = None


HUB_TEXTS = {
    "ptb": HubText(
        "ptb-text-only/ptb_text_only",
        {split: f"penn_treebank/{split}/*.parquet" for split in ("train", "validation", "test")},
        column="sentence",
        evaluation_split="test",
        # The main branch holds a loading script, which `datasets` refuses since version 4.
        revision="refs/convert/parquet",
    ),
    "c4": HubText(
        "allenai/c4",
        {split: f"en/c4-{split}.*.json.gz" for split in ("train", "validation")},
        column="text",
        evaluation_split="validation",
    ),
    "pile": HubText(
        "monology/pile-uncopyrighted",
        {"train": "train/*.jsonl.zst", "validation": "val.jsonl.zst", "test": "test.jsonl.zst"},
        column="text",
        evaluation_split="validation",
    ),
}


def open_hub_text(name: str, split: str, *, folder: Path | None = None) -> TextSource:
    """The beginning of a text on the hub; each row is a document.

    With `folder`, a downloaded copy of the repository is read, without network.
    """
    text = HUB_TEXTS[name]
    split = {"valid": "validation"}.get(split, split)
    if split not in text.files:
        raise TextError(f"{name}:{split}: no such split: use one of {', '.join(text.files)}")
    if folder is None:
        _check_reachable(name, text)
    documents: list[Document] = []
    characters = 0
    for document in documents_of(_rows(name, text, split, folder)):
        documents.append(document)
        characters += len(document.text)
        if characters >= MOST_CHARACTERS:
            break
    if not documents:
        raise TextError(f"{name}:{split}: {text.repository} gave no text: pass a local file instead")
    return TextSource(name, split, tuple(documents))


def _rows(name: str, text: HubText, split: str, folder: Path | None) -> Iterator[tuple[str, str]]:
    try:
        import datasets
    except ImportError:
        raise TextError(
            f"{name}:{split}: needs the `datasets` library: pip install 'kl-lens[eval]', or pass a local file"
        ) from None
    try:
        rows = datasets.load_dataset(
            text.repository if folder is None else str(folder),
            data_files={split: text.files[split]},
            revision=text.revision if folder is None else None,
            split=split,
            streaming=True,
        )
        for number, row in enumerate(rows, start=1):
            yield f"{name}:{split}, row {number}", row[text.column]
    except Exception as error:  # `datasets` passes on any error of its file systems and parsers
        raise TextError(
            f"{name}:{split}: {text.repository} cannot be read ({_first_line(error)}): pass a local file instead"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _check_reachable(name: str, text: HubText) -> None:
    """Tests the connection: `datasets` alone would retry for half a minute and print each failure."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(text.repository, revision=text.revision, timeout=_CONNECT_SECONDS)
    except HfHubHTTPError as error:
        reason = _first_line(error)
    except Exception as error:  # connection errors of the hub client's HTTP library
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}
        reason = "HF_HUB_OFFLINE is set" if offline else type(error).__name__
    else:
        return
    raise TextError(
        f"{name}: the Hugging Face hub cannot be reached ({reason}): "
        "pass a local .txt, .jsonl or .parquet file, or use wikitext2, which ships with kl-lens"
    )
