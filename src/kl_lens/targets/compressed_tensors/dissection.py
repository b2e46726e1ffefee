"""A compressed-tensors folder taken apart, whoever made it: every tensor in float32 beside the original's."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.utils.match import match_name

from kl_lens.base.errors import TargetError
from kl_lens.targets.compressed_tensors.export import checkpoint_names
from kl_lens.targets.compressed_tensors.schemes import configuration
from kl_lens.targets.compressed_tensors.session import TransformersSession
from kl_lens.targets.dissection import (
    FolderDissection,
    Part,
    StoredTensor,
    known_name,
    unpacked,
)
from kl_lens.targets.exporting import CONFIG_FILE
from kl_lens.targets.session import Session, SessionSettings

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel

_PACKED = re.compile(r"(.*\.weight)_(packed|scale|shape|zero_point|g_idx)")


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
