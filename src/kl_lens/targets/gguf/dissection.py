"""A GGUF file taken apart: llama.cpp's tensors and metadata beside those that the original would give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kl_lens.base.errors import KLLensError
from kl_lens.targets import dissection, quarantine
from kl_lens.targets.dissection import (
    Disagreement,
    Dissection,
    Part,
    StoredTensor,
    Texts,
    setting,
)
from kl_lens.targets.gguf.header import TensorEntry, read_header
from kl_lens.targets.gguf.session import GGUFSession, try_out
from kl_lens.targets.gguf.template import architecture_of
from kl_lens.targets.gguf.tokenizer import (
    CHAT_TEMPLATE,
    PREFIX,
    UNUSED,
    sample_strings,
    tokenizer_data,
)
from kl_lens.targets.gguf.writer import ModelTensors
from kl_lens.targets.session import Session, SessionSettings
from kl_lens.targets.tokenizer import default_template, end_ids
from kl_lens.weights.formats import get_format, known_formats
from kl_lens.weights.formats.ggml_types import from_blocks, ggml_types
from kl_lens.weights.formats.gguf_blocks import gguf_module

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel

_HEAD = "output.weight"
# Read by people, or implied by the shapes of tensors.
WITHOUT_EFFECT = ("context_length", "feed_forward_length", "vocab_size")


class GGUFDissection(Dissection):
    def __init__(self, path: Path) -> None:
        self.info = read_header(path)
        self.path = self.info.paths[0]
        self.files = self.info.paths
        self.tensors = tuple(stored_tensor(entry) for entry in self.info.tensors)

    def parts(self, model: LoadedModel) -> list[Part]:
        shapes = ModelTensors(model).shapes
        stored = {tensor.name: tensor for tensor in self.tensors}
        rules = architecture_of(model).tensors(model.config, shapes)
        head = next(
            (rule for rule in rules if rule.name == _HEAD), replace(rules[0], name=_HEAD)
        )
        if _HEAD in stored and head not in rules:  # a tied head, stored once more
            rules = [*rules, head]
        return [
            Part(r.name, stored.get(r.name), r.parameter, r.arranged, r.factors)
            for r in rules
            if not r.further and (r.copied is None or r.parameter is not None)
        ]

    def settings(self, model: LoadedModel) -> list[Disagreement]:
        architecture = architecture_of(model)
        metadata = self.info.metadata
        name = architecture.name(model.config)
        prefix = self.info.architecture
        disagreements = []
        if name != prefix:
            advice = f"convert it as {name}"
            disagreements.append(setting("general.architecture", prefix, name, advice))
        for suffix, value in architecture.metadata(model.config).items():
            key = f"{prefix}.{suffix}"
            if suffix == "block_count":  # heads for further tokens are blocks too
                value += metadata.get(f"{prefix}.nextn_predict_layers") or 0
            actual = metadata.get(key)
            if not dissection.same(actual, value):
                # Of what is missing, llama.cpp has defaults.
                matters = suffix not in WITHOUT_EFFECT if key in metadata else None
                advice = self._advice(key, value)
                disagreements.append(setting(key, actual, value, advice, matters=matters))
        for reason in architecture.refusals(model.config):
            words = f"llama.cpp computes another model: {reason}"
            disagreements.append(Disagreement("llama.cpp", words, "use another runtime"))
        return disagreements

    def tokenizer(self, model: LoadedModel) -> Iterator[Disagreement]:
        try:
            tokenizer = model.require_tokenizer()
            wanted = self._tokenizer(tokenizer, end_ids(model.folder)).metadata
        except KLLensError:  # there is none, or llama.cpp has none of this kind
            return
        actual = read_header(self.path, whole=True).metadata
        lists = _lists(actual)
        if not lists["token"]:
            return
        original = _lists(wanted)
        used = [i for i, kind in original["token type"].items() if kind != UNUSED]
        for name in ("token", "token type"):
            original[name] = {i: original[name][i] for i in used}
        if not lists["token type"]:
            del lists["token type"]
        splitting = {PREFIX + key: wanted[PREFIX + key] for key in ("pre", "model")}
        keys = {key: value for key, value in wanted.items() if isinstance(value, int)}
        expected = Texts(
            original, splitting, keys, default_template(wanted[CHAT_TEMPLATE])
        )
        texts = Texts(lists, actual, actual, default_template(actual.get(CHAT_TEMPLATE)))
        yield from dissection.other_texts(texts, expected, self._advice)

    def _advice(self, key: str, value: Any) -> str:
        if value is not None:
            return f"gguf-set-metadata {self.path.name} {key} {value}"
        if "template" in key:
            return f"gguf-new-metadata --chat-template TEMPLATE {self.path.name} NEW.gguf"
        return "take the tokenizer from the original: convert it with --vocab-only and copy its keys"

    def open(self, settings: SessionSettings) -> Session:
        quarantine.require_opens(try_out, self.path, self.files, "llama.cpp")
        return GGUFSession(self.path, settings)

    def strings(self, tokenizer: Any) -> list[str]:
        return sample_strings(self._tokenizer(tokenizer).check)

    def _tokenizer(self, tokenizer: Any, ends: list[int] | None = None) -> Any:
        """The original's as a file should hold it. Rows that only one of the two has are not its concern."""
        return tokenizer_data(
            tokenizer, 1 + max(tokenizer.get_vocab().values(), default=0), ends or []
        )


def _lists(metadata: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    """What a file's tokenizer lists, by number."""
    names = {"token": "tokens", "merge": "merges", "token type": "token_type"}
    return {
        name: dict(enumerate(metadata.get(PREFIX + key, ())))
        for name, key in names.items()
    }


def stored_tensor(entry: TensorEntry) -> StoredTensor:
    format_name = dissection.known_name(entry.format)
    read = partial(_values, entry, format_name)
    return StoredTensor(
        entry.name,
        entry.type,
        entry.shape,
        entry.bytes,
        read,
        format_name,
    )


def _values(entry: TensorEntry, format_name: str) -> torch.Tensor:
    data = np.array(np.memmap(entry.path, np.uint8, "r", entry.offset, (entry.bytes,)))
    if format_name in ("fp32", "fp16"):
        values = data.view(np.float32 if format_name == "fp32" else np.float16)
        return torch.from_numpy(values).float().reshape(entry.shape)
    kind = ggml_types()[entry.type.lower()]
    blocks = data.reshape(-1, kind.bytes)
    with np.errstate(
        all="ignore"
    ):  # scales may be infinite; that is for the autopsy to say
        if format_name in known_formats():
            shape = (len(blocks), kind.block)
            stored = from_blocks(format_name, shape, torch.from_numpy(blocks))
            return get_format(format_name).dequantize(stored).reshape(entry.shape)
        values = gguf_module().dequantize(blocks, kind.number)
        return torch.from_numpy(values).float().reshape(entry.shape)
