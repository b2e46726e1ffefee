"""A folder running in transformers, and taken apart, whoever made it."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.utils.match import match_name

from kl_lens.base.errors import TargetError, one_line
from kl_lens.model import LoadedModel
from kl_lens.model.anatomy import normalise_per_group
from kl_lens.model.files import LEFT_OUT
from kl_lens.targets.compressed_tensors.export import checkpoint_names
from kl_lens.targets.compressed_tensors.schemes import configuration
from kl_lens.targets.dissection import (
    FolderDissection,
    Part,
    StoredTensor,
    known_name,
    unpacked,
)
from kl_lens.targets.exporting import CONFIG_FILE
from kl_lens.targets.session import Logits, Session, SessionSettings

_PACKED = re.compile(r"(.*\.weight)_(packed|scale|shape|zero_point|g_idx)")
_STATES = ("past_key_values", "cache_params")  # what models call theirs


@contextmanager
def initialising_safely() -> Iterator[None]:
    """transformers 5.22 visits all modules to initialise what a file lacks. Mamba's and Mamba-2's code then sets
    `out_proj.weight`, which a packed layer does not have; everything of such a mixer comes from the file.
    docs/targets.md has the report for transformers, and a test notices when this is not needed any more."""
    usual = transformers.PreTrainedModel._initialize_weights

    def initialize(model: Any, module: Any, *arguments: Any, **options: Any) -> None:
        try:
            usual(model, module, *arguments, **options)
        except AttributeError:
            if not any(hasattr(child, "weight_packed") for child in module.children()):
                raise
            module._is_hf_initialized = True

    with patch.object(transformers.PreTrainedModel, "_initialize_weights", initialize):
        yield


def opened(folder: Path) -> Any:
    """The model in float32. There the products of codes and float16 scales are exact."""
    with redirect_stderr(io.StringIO()), initialising_safely():  # a bar for every stage
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        model, report = load(
            folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
        unexpected = [key for key in report["unexpected_keys"] if not LEFT_OUT.match(key)]
        if wrong := sorted({*report["missing_keys"], *unexpected}):
            raise KeyError(f"{wrong[0]}: missing in the file, or unknown to the model")
        model.eval().requires_grad_(False)
        normalise_per_group(model)
        model(torch.zeros((1, 1), dtype=torch.long))  # unpacks the weights
    return model


class TransformersSession(Session):
    """One sequence at a time, on a CPU."""

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        self.path = folder
        self._threads = torch.get_num_threads()
        torch.set_num_threads(threads or self._threads)
        try:
            self._model = opened(folder)
        except Exception as error:  # transformers raises anything over a strange folder
            torch.set_num_threads(self._threads)
            reason = f"{type(error).__name__} {one_line(error)}"
            raise TargetError(
                f"{folder}: transformers cannot load it: {reason}"
            ) from error
        self.vocabulary = int(self._model.get_output_embeddings().weight.shape[0])
        self._steps = True
        (*_, whole) = self.logits([0, 1, 0])
        stepped = [self.prefill([0, 1]), self.step(0)][1]
        self._steps = bool(
            np.allclose(whole, stepped, rtol=1e-3, atol=1e-3)
        )  # Bamba forgets between calls
        self.reset()

    @property
    def description(self) -> dict[str, Any]:
        return {
            "runtime": "transformers",
            "version": metadata.version("transformers"),
            "compressed_tensors": metadata.version("compressed-tensors"),
            "torch": torch.__version__,
            "device": "CPU",
            "threads": torch.get_num_threads(),
            "arithmetic": "float32",
            "file": self.path.name,
        }

    def reset(self) -> None:
        self._fed: list[int] = []
        self._states: dict[str, Any] = {}

    @torch.no_grad()
    def feed(self, tokens: list[int], *, every: bool) -> Logits:
        if self._model is None:
            raise self.closed()
        new = len(tokens)
        self._fed += tokens
        # After states, Mamba and Jamba would start again: once more from the start.
        if new > 1 or not self._steps:
            tokens = self._fed
            self._states = {}
        output = self._model(torch.tensor([tokens]), use_cache=not every, **self._states)
        self._states = {
            name: output[name] for name in _STATES if output.get(name) is not None
        }
        return output.logits[0, -new if every else -1 :].numpy()

    def close(self) -> None:
        self.reset()
        self._model = None
        torch.set_num_threads(self._threads)


class CompressedTensorsDissection(FolderDissection):
    def stored(self, tensors: dict[str, torch.Tensor]) -> Iterator[StoredTensor]:
        packed: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            if part := _PACKED.fullmatch(name):
                packed[part[1]][f"weight_{part[2]}"] = tensor
            else:
                yield unpacked(name, tensor)
        for name, parts in packed.items():
            yield self._packed(name, parts)

    def parts(self, model: LoadedModel) -> list[Part]:
        stored = {tensor.name: tensor for tensor in self.tensors}
        parameters = {c.weight: model.tensor(c.weight) for c in model.anatomy.components}
        names = checkpoint_names(model, parameters)
        return [Part(names[name], stored.get(names[name]), name) for name in parameters]

    def configuration(self, model: LoadedModel) -> dict[str, Any]:
        return configuration(model, {}, {})

    def open(self, settings: SessionSettings) -> Session:
        return TransformersSession(self.path, settings.threads)

    def _packed(self, name: str, parts: dict[str, torch.Tensor]) -> StoredTensor:
        module = name.removesuffix(".weight")
        groups = self.config["quantization_config"].get("config_groups", {}).values()
        schemes = [
            group
            for group in groups
            if any(t == "Linear" or match_name(module, t) for t in group["targets"])
        ]
        if not schemes:
            missing = f"{self.path / CONFIG_FILE} has no scheme for {module}"
            raise TargetError(f"{missing}; export or download it again")
        weights = QuantizationArgs(**schemes[0]["weights"])
        group = f"-g{weights.group_size}" if (weights.group_size or 0) > 0 else ""
        spelled = f"{'' if weights.symmetric else 'u'}int{weights.num_bits}{group}"
        size = sum(part.nbytes for part in parts.values())
        shape = tuple(parts["weight_shape"].tolist())
        read = partial(_values, parts, QuantizationScheme(targets=[], weights=weights))
        return StoredTensor(name, spelled, shape, size, read, known_name(spelled))


def _values(parts: dict[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    """As compressed-tensors unpacks it, in float32."""
    wide = parts | {"weight_scale": parts["weight_scale"].float()}
    values: torch.Tensor = PackedQuantizationCompressor.decompress(wide, scheme)["weight"]
    return values
