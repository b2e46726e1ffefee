"""Writes the tokenizer as OpenVINO graphs, which OpenVINO GenAI needs beside the model."""

from __future__ import annotations

import logging
import tempfile
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from kl_lens.base.errors import one_line
from kl_lens.targets.openvino.folder import DETOKENIZER_FILE, TOKENIZER_FILE
from kl_lens.targets.openvino.rewrites import number_names
from kl_lens.targets.tokenizer import other_ids, varied_strings

CHECKED_STRINGS = 300


def write_tokenizer(tokenizer: Any | None, place: Path) -> str | None:
    """Writes tokenizer and detokenizer as IR. Returns None, or one line that says why there are none.

    The converted tokenizer is compared with transformers on a few hundred strings. One that differs is not written:
    a model that is fed other tokens answers badly, and nothing would say why.
    """
    none = f"no {TOKENIZER_FILE} was written, so OpenVINO GenAI cannot open this folder (kl-lens can): "
    if tokenizer is None:
        return f"{none}the checkpoint has no tokenizer"
    if find_spec("openvino_tokenizers") is None:
        return f"{none}openvino-tokenizers is missing; pip install 'kl-lens[openvino]' and export again"
    files, difference = _converted(tokenizer)
    if difference is not None:
        return f"{none}{_name(tokenizer)} {difference}"
    for name, content in files.items():
        (place / name).write_bytes(content)
    return None


@lru_cache(maxsize=1)
def _converted(tokenizer: Any) -> tuple[dict[str, bytes], str | None]:
    """The files by name, and how they differ from the tokenizer. Kept, because a run exports many plans."""
    import openvino_tokenizers

    logging.getLogger("openvino_tokenizers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / TOKENIZER_FILE, Path(folder) / DETOKENIZER_FILE
        try:
            graphs = openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
            for graph, path in zip(graphs, paths, strict=True):
                number_names(graph)
                ov.save_model(graph, path, compress_to_fp16=False)
            difference = first_difference(tokenizer, *paths)
        except Exception as error:  # the package raises anything over a tokenizer that it does not know
            difference = f"cannot be converted by openvino-tokenizers ({one_line(error)})"
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}, difference


def first_difference(
    tokenizer: Any, encoder: Path, decoder: Path, count: int = CHECKED_STRINGS
) -> str | None:
    """The first of `count` strings on which the graphs and the tokenizer differ, as a sentence; None if they agree."""
    core = ov.Core()  # a new one: only those made after importing openvino_tokenizers know its operations
    encode, decode = (core.compile_model(path, "CPU") for path in (encoder, decoder))
    special = sorted(set(map(str, tokenizer.get_added_vocab())))
    for text in varied_strings(count, special=special):
        expected = tokenizer(text)["input_ids"]
        ids = [int(token) for token in encode([text])["input_ids"][0]]
        if ids != list(expected):
            return f"splits text into other tokens than transformers: {other_ids(ids, expected, tokenizer)}"
        words = tokenizer.decode(expected, skip_special_tokens=True)
        if expected and words != (own := str(decode([np.array([expected])])["string_output"][0])):
            return (
                f"turns tokens into other text than transformers: {expected} becomes {own!r}, not {words!r}"
            )
    return None


def _name(tokenizer: Any) -> str:
    return f"{type(tokenizer).__name__} of {tokenizer.name_or_path or 'this checkpoint'}"
