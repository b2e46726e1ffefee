"""Copies of an exported file with one format for all weights, to time that format.

Speed does not depend on values, so a copy's weights are one random row, quantized once and repeated. The checkpoint is
not needed, and a large model takes only the time to write its bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kl_lens.formats import Format
from kl_lens.formats.ggml import gguf_module
from kl_lens.formats.gguf_blocks import GGUFFormat
from kl_lens.recipes import Recipe
from kl_lens.targets.gguf.header import parts_of
from kl_lens.weights import GivenWeights, WeightStore

_OURS = ("GGUF.", "split.", "general.architecture")  # fields that the writer writes itself


def uniform_copy(source: Path, destination: Path, fmt: Format, weights: Collection[str]) -> dict[str, int]:
    """Writes the copy. Returns the bytes of each named tensor that has the format there."""
    gguf = gguf_module()
    readers = [gguf.GGUFReader(part) for part in parts_of(source)]
    writer = gguf.GGUFWriter(destination, readers[0].get_field("general.architecture").contents())
    for field in readers[0].fields.values():
        if not field.name.startswith(_OURS):
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
    kind = gguf.GGMLQuantizationType[fmt.name.upper().replace("FP16", "F16")]
    changed: dict[str, int] = {}
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        columns, *more = (int(size) for size in tensor.shape)
        rows = int(np.prod(more))
        if tensor.name in weights and fmt.fits((rows, columns)) is None:
            data = np.tile(_random_row(fmt, columns), (rows, 1)).reshape(*reversed(more), -1)
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
            changed[tensor.name] = data.nbytes
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return changed


def _random_row(fmt: Format, columns: int) -> npt.NDArray[np.uint8]:
    weight = torch.randn((1, columns), generator=torch.Generator().manual_seed(0)) * columns**-0.5
    if isinstance(fmt, GGUFFormat) and fmt.needs_importance:
        stored = fmt.quantize_with(weight, torch.ones(columns))
    else:
        stored = WeightStore(GivenWeights({"row": weight})).quantized("row", Recipe(fmt.name))
    return np.asarray(fmt.pack(stored)).reshape(1, -1).view(np.uint8)
