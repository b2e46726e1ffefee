"""NVIDIA's ModelOpt: a `quant_cfg` that quantizes the weights of each layer as planned, and nothing else."""

from __future__ import annotations

from pathlib import Path

from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.model import LoadedModel
from kl_lens.planning.handover.base import Handover, Settings, as_json, is_integer, layers, own_rounding
from kl_lens.run.records import Plan
from kl_lens.weights.formats import Format

FILE = "quant_cfg.yaml"
_USE = """import yaml
import modelopt.torch.quantization as mtq
mtq.quantize(model, yaml.safe_load(open("FOLDER/quant_cfg.yaml")))"""


def write(model: LoadedModel, plan: Plan, folder: Path, statistics: StoredStatistics | None) -> Handover:
    quantized = layers("ModelOpt", model, plan, _settings)
    entries: list[Settings] = [
        {"quantizer_name": "*", "enable": False}
    ]  # later entries override earlier ones
    entries += [{"quantizer_name": f"{name}.weight_quantizer", "cfg": cfg} for name, cfg in quantized.items()]
    content = as_json({"quant_cfg": entries, "algorithm": "max"})
    # JSON is YAML, except that keys of JSON are never numbers and ModelOpt wants the axis as one.
    (folder / FILE).write_text(content.replace('"-1":', "-1:"), encoding="utf-8")
    return Handover(_USE, notes=own_rounding("ModelOpt", plan))


def _settings(fmt: Format) -> Settings | None:
    """ModelOpt's integers are symmetric."""
    if not is_integer(fmt) or not fmt.symmetric:
        return None
    shared = {"axis": 0} if fmt.group_size is None else {"block_sizes": {"-1": fmt.group_size}}
    return {"num_bits": fmt.bits, **shared}
