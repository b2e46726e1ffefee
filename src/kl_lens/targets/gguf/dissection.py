"""A GGUF file taken apart: llama.cpp's tensors and metadata beside those that the original would give."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kl_lens.errors import KLLensError, TargetError, UnsupportedError
from kl_lens.formats import Quantized, get_format, known_formats
from kl_lens.formats.ggml import gguf_module
from kl_lens.targets.dissection import DTYPES, Disagreement, Dissection, Part, StoredTensor, rounding, same
from kl_lens.targets.gguf.architectures import get_architecture
from kl_lens.targets.gguf.general import end_tokens
from kl_lens.targets.gguf.header import TensorEntry, read_header
from kl_lens.targets.gguf.quarantine import require_opened
from kl_lens.targets.gguf.session import GGUFSession, open_session
from kl_lens.targets.gguf.tokenizer import differing_string, tokenizer_data
from kl_lens.targets.session import Session, SessionSettings

if TYPE_CHECKING:
    from kl_lens.checkpoints import LoadedModel

_HEAD = "output.weight"
# Read by people, or implied by the shapes of tensors.
_WITHOUT_EFFECT = ("context_length", "feed_forward_length", "vocab_size")


class GGUFDissection(Dissection):
    def __init__(self, path: Path) -> None:
        self.info = read_header(path)  # not check_file: what llama.cpp aborts on is a finding
        self.place, self.files = self.info.paths[0], self.info.paths
        self.tensors = tuple(_stored(entry) for entry in self.info.tensors)

    def parts(self, model: LoadedModel) -> list[Part]:
        from kl_lens.checkpoints.streaming import ModelTensors

        shapes = ModelTensors(model.model).shapes
        held = {tensor.name: tensor for tensor in self.tensors}
        rules = get_architecture(model.config.model_type).tensors(model.config, shapes)
        head = next((rule for rule in rules if rule.name == _HEAD), replace(rules[0], name=_HEAD))
        if _HEAD in held and head not in rules:  # a tied head, stored once more
            rules = [*rules, head]
        return [Part(r.name, held.get(r.name), r.parameter, r.arranged, r.factors) for r in rules]

    def disagreements(self, model: LoadedModel) -> list[Disagreement]:
        architecture, metadata = get_architecture(model.config.model_type), self.info.metadata
        own, found = architecture.name(model.config), []
        if own != self.info.architecture:
            found.append(Disagreement("general.architecture", self.info.architecture, own))
        for name, value in architecture.metadata(model.config).items():
            key = f"{self.info.architecture}.{name}"
            if key in metadata and not same(metadata[key], value):
                found.append(Disagreement(key, metadata[key], value, name not in _WITHOUT_EFFECT))
        for reason in filter(None, architecture.refusals(model.config)):
            found.append(Disagreement("llama.cpp's own rule", "another", reason))
        try:
            text = self._tokenizer(model.require_tokenizer(), end_tokens(model.folder))
        except KLLensError:
            return found
        wanted = {f"{name}_token_id": index for name, index in text.special.items()} | text.switches
        for name, value in wanted.items():
            key = f"tokenizer.ggml.{name}"
            if key in metadata and metadata[key] != value:
                found.append(Disagreement(key, metadata[key], value))
        return found

    def open(self, settings: SessionSettings) -> Session:
        require_opened(self.place)
        return open_session(
            self.place, threads=settings.threads, gpu_layers=settings.gpu_layers, load=settings.load,
            exact_attention=settings.exact,
        )  # fmt: skip

    def other_tokens(self, session: Session, tokenizer: Any) -> str | None:
        assert isinstance(session, GGUFSession)
        try:
            session.require_vocabulary()
        except TargetError as error:
            raise UnsupportedError(str(error)) from None
        return differing_string(session.tokenize, self._tokenizer(tokenizer).check)

    def _tokenizer(self, tokenizer: Any, ends: list[int] | None = None) -> Any:
        """The original's as a file should hold it. Rows that only one of the two has are not its concern."""
        return tokenizer_data(tokenizer, 1 + max(tokenizer.get_vocab().values(), default=0), ends or [])


def _stored(entry: TensorEntry) -> StoredTensor:
    name = {"F16": "fp16", "F32": "fp32", "BF16": "bf16"}.get(entry.type, entry.type.lower())
    known = name if name in (*known_formats(), *DTYPES) else ""
    return StoredTensor(
        entry.name,
        entry.type,
        entry.shape,
        entry.bytes,
        partial(_values, entry, known),
        known,
        rounding(known),
    )


def _values(entry: TensorEntry, known: str) -> torch.Tensor:
    data = np.array(np.memmap(entry.path, np.uint8, "r", entry.offset, (entry.bytes,)))
    if known in ("fp32", "fp16"):
        return (
            torch.from_numpy(data.view(np.float32 if known == "fp32" else np.float16))
            .float()
            .reshape(entry.shape)
        )
    kind = gguf_module().GGMLQuantizationType[entry.type]
    blocks = data.reshape(-1, gguf_module().GGML_QUANT_SIZES[kind][1])
    with np.errstate(all="ignore"):  # scales may be infinite; that is for the autopsy to say
        if known in known_formats():
            width = gguf_module().GGML_QUANT_SIZES[kind][0]
            stored = Quantized(known, (len(blocks), width), torch.from_numpy(blocks))
            return get_format(known).dequantize(stored).reshape(entry.shape)
        return torch.from_numpy(gguf_module().dequantize(blocks, kind)).float().reshape(entry.shape)
