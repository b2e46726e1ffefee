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
from kl_lens.text.documents import TextSource
from kl_lens.text.hub import HUB_TEXTS, open_hub_text
from kl_lens.text.reading import SUFFIXES, read_path

KNOWN_NAMES = (wikitext.NAME, *HUB_TEXTS)


def open_text(
    name: str | os.PathLike[str], split: str | None = None, *, for_evaluation: bool = False
) -> TextSource:
    """Opens a text by name (`wikitext2:train`), or by the path of a file or folder.

    Args:
        name: a known name, with or without `:split`, or a path.
        split: the split, if `name` has none.
        for_evaluation: default to the usual evaluation split instead of `train`.

    Raises:
        TextError: unknown name, or nothing readable.
    """
    name = os.fspath(name)
    base, _, named = name.partition(":")
    if base in KNOWN_NAMES:
        if split and named and split != named:
            raise TextError(f"{name}: two different splits, {named} and {split}: give one")
        usual = "train"
        if for_evaluation:
            usual = HUB_TEXTS[base].evaluation_split if base in HUB_TEXTS else "test"
        chosen = named or split or usual
        return open_hub_text(base, chosen) if base in HUB_TEXTS else wikitext.wikitext2(chosen)
    path = Path(name)
    looks_like_a_path = "/" in name or os.sep in name or path.suffix
    if not name or not (looks_like_a_path or path.exists()):
        raise TextError(
            f"{name or 'an empty name'}: no text of that name: use one of {', '.join(KNOWN_NAMES)} "
            f"(`wikitext2:test` for a split), or the path of a file ({SUFFIXES}) or folder"
        )
    return TextSource(name, split, tuple(read_path(path)))
