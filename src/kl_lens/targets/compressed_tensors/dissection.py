"""A compressed-tensors folder taken apart, whoever made it: every tensor in float32 beside the original's."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.utils.match import match_name
from safetensors import SafetensorError
from safetensors.torch import load_file

from kl_lens.base.errors import TargetError, one_line
from kl_lens.targets import dissection as general
from kl_lens.targets.compressed_tensors.export import checkpoint_names
from kl_lens.targets.compressed_tensors.schemes import configuration
from kl_lens.targets.compressed_tensors.session import TransformersSession
from kl_lens.targets.exporting import CONFIG_FILE
from kl_lens.targets.session import Session, SessionSettings
from kl_lens.targets.tokenizer import read_json
from kl_lens.weights.formats import known_formats

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel

# Settings of training and of files, which nothing is computed with.
_WITHOUT_EFFECT = re.compile(
    r"^_|dtype|version|use_cache|initializer|_token_id|dropout|architectures|quantiz"
)
_PACKED = re.compile(r"(.*\.weight)_(packed|scale|shape|zero_point|g_idx)")


class CompressedTensorsDissection(general.Dissection):
    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._config = read_json(folder / CONFIG_FILE)
        self.files = tuple(sorted(folder.glob("model*.safetensors")))
        packed: dict[str, dict[str, torch.Tensor]] = {}
        plain = []
        for file in self.files:
            try:
                tensors = load_file(file)
            except (OSError, SafetensorError) as error:
                damage = f"{file} is damaged: {one_line(error)}"
                raise TargetError(f"{damage}; export or download it again") from error
            for name, tensor in tensors.items():
                if part := _PACKED.fullmatch(name):
                    packed.setdefault(part[1], {})[f"weight_{part[2]}"] = tensor
                else:
                    plain.append(_unpacked(name, tensor))
        self.tensors = (
            *plain,
            *(self._packed(name, parts) for name, parts in packed.items()),
        )

    def parts(self, model: LoadedModel) -> list[general.Part]:
        stored = {tensor.name: tensor for tensor in self.tensors}
        parameters = {c.weight: model.tensor(c.weight) for c in model.anatomy.components}
        named = checkpoint_names(model, parameters)
        return [
            general.Part(named[name], stored.get(named[name]), name)
            for name in parameters
        ]

    def settings(self, model: LoadedModel) -> list[general.Disagreement]:
        return general.other_settings(
            self._config, configuration(model, {}, {}), _WITHOUT_EFFECT
        )

    def open(self, settings: SessionSettings) -> Session:
        return TransformersSession(self.path, settings.threads)

    def _packed(self, name: str, parts: dict[str, torch.Tensor]) -> general.StoredTensor:
        module = name.removesuffix(".weight")
        groups = self._config["quantization_config"].get("config_groups", {}).values()
        schemes = [
            g
            for g in groups
            if any(t == "Linear" or match_name(module, t) for t in g["targets"])
        ]
        if not schemes:
            missing = f"{self.path / CONFIG_FILE} has no scheme for {module}"
            raise TargetError(f"{missing}; export or download it again")
        weights = QuantizationArgs(**schemes[0]["weights"])
        group = f"-g{weights.group_size}" if (weights.group_size or 0) > 0 else ""
        spelled = f"{'' if weights.symmetric else 'u'}int{weights.num_bits}{group}"
        kind = spelled if spelled in known_formats() else ""
        size = sum(part.nbytes for part in parts.values())
        shape = tuple(parts["weight_shape"].tolist())
        read = partial(_values, parts, QuantizationScheme(targets=[], weights=weights))
        return general.StoredTensor(
            name, spelled, shape, size, read, kind, general.rounding(kind)
        )


def _unpacked(name: str, tensor: torch.Tensor) -> general.StoredTensor:
    kind = next(
        (kind for kind, dtype in general.DTYPES.items() if dtype == tensor.dtype), ""
    )
    spelled = kind or str(tensor.dtype)
    shape = tuple(tensor.shape)
    rounded = general.rounding(kind)
    return general.StoredTensor(
        name, spelled, shape, tensor.nbytes, tensor.float, kind, rounded
    )


def _values(parts: dict[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    """As compressed-tensors unpacks it, in float32."""
    wide = parts | {"weight_scale": parts["weight_scale"].float()}
    values: torch.Tensor = PackedQuantizationCompressor.decompress(wide, scheme)["weight"]
    return values
