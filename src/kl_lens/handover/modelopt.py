"""NVIDIA's ModelOpt: a `quant_cfg` that quantizes the weights of each layer as planned, and nothing else."""

from __future__ import annotations

from pathlib import Path

from kl_lens.calibration import StoredStatistics
from kl_lens.checkpoints import LoadedModel
from kl_lens.formats import Format
from kl_lens.handover.base import Handover, Settings, as_json, is_integer, layers, own_rounding
from kl_lens.records import Plan

FILE = "quant_cfg.json"
_USE = """import json
import modelopt.torch.quantization as mtq
mtq.quantize(model, json.load(open("FOLDER/quant_cfg.json")))"""


def write(model: LoadedModel, plan: Plan, folder: Path, statistics: StoredStatistics | None) -> Handover:
    quantized = layers("ModelOpt", model, plan, _settings)
    entries: list[Settings] = [
        {"quantizer_name": "*", "enable": False}
    ]  # later entries override earlier ones
    entries += [{"quantizer_name": f"{name}.weight_quantizer", "cfg": cfg} for name, cfg in quantized.items()]
    (folder / FILE).write_text(as_json({"quant_cfg": entries, "algorithm": "max"}), encoding="utf-8")
    return Handover(_USE, notes=own_rounding("ModelOpt", plan))


def _settings(fmt: Format) -> Settings | None:
    """ModelOpt's integers are symmetric."""
    if not is_integer(fmt) or not fmt.symmetric:
        return None
    shared = {"axis": 0} if fmt.group_size is None else {"block_sizes": {"-1": fmt.group_size}}
    return {"num_bits": fmt.bits, **shared}
