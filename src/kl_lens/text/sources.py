"""Text by name, as the command line gives it.

    wikitext2, wikitext2:test     the shipped copy
    c4:validation, ptb, pile      from the Hugging Face hub
    notes.txt, rows.jsonl, texts/ the user's own files and folders

A known name wins over a file of the same name; write `./c4` for the file.
"""

from __future__ import annotations

import os
from pathlib import Path

from kl_lens.base.errors import TextError
from kl_lens.text import wikitext
from kl_lens.text.documents import TextSource, collect
from kl_lens.text.files import read_path, supported_suffixes
from kl_lens.text.hub import HUB_TEXTS, open_hub_text

KNOWN_NAMES = (wikitext.NAME, *HUB_TEXTS)


def open_text(
    name: str | os.PathLike[str],
    split: str | None = None,
    *,
    for_evaluation: bool = False,
    max_characters: int | None = None,
) -> TextSource:
    """Opens a text by name (`wikitext2:train`), or by the path of a file or folder.

    Args:
        name: a known name, with or without `:split`, or a path.
        split: the split, if `name` has none.
        for_evaluation: default to the usual evaluation split instead of `train`.
        max_characters: stop after this much text (whole documents); hub texts stop at 16 million.

    Raises:
        TextError: unknown name, or nothing readable.
    """
    name = os.fspath(name)
    base, _, split_in_name = name.partition(":")
    if base in KNOWN_NAMES:
        if split and split_in_name and split != split_in_name:
            raise TextError(f"{name}: two different splits, {split_in_name} and {split}: give one")
        return _open_known(base, split_in_name or split, for_evaluation, max_characters)

    path = Path(name)
    if not name or (not path.exists() and not _looks_like_a_path(name)):
        raise TextError(
            f"{name or 'an empty name'}: no text of that name: use one of {', '.join(KNOWN_NAMES)} "
            f"(`wikitext2:test` for a split), or the path of a file ({supported_suffixes()}) or folder"
        )
    documents, complete = collect(read_path(path), max_characters)
    return TextSource(name, split, documents, complete)


def _open_known(base: str, split: str | None, for_evaluation: bool, max_characters: int | None) -> TextSource:
    if base != wikitext.NAME:
        customary = HUB_TEXTS[base].evaluation_split if for_evaluation else "train"
        return open_hub_text(base, split or customary, max_characters=max_characters)
    source = wikitext.wikitext2(split or ("test" if for_evaluation else "train"))
    if max_characters is None:
        return source
    documents, complete = collect(source.documents, max_characters)
    return TextSource(source.name, source.split, documents, complete)


def _looks_like_a_path(name: str) -> bool:
    return "/" in name or os.sep in name or bool(Path(name).suffix)
