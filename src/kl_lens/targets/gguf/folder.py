"""A checkpoint folder's configuration, as the exporter reads it without opening the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from kl_lens.checkpoints import mamba_ssm
from kl_lens.checkpoints.files import read_config
from kl_lens.targets.gguf.architectures import get_architecture


def read_configuration(folder: Path) -> Any:
    """The transformers configuration of a checkpoint folder, whichever library wrote it."""
    raw = read_config(folder)
    if mamba_ssm.is_layout(raw):
        version2 = (raw.get("ssm_cfg") or {}).get("layer", "Mamba1") == "Mamba2"
        return mamba_ssm.mamba2_config(raw) if version2 else mamba_ssm.mamba1_config(raw)
    get_architecture(str(raw.get("model_type")))  # a clear refusal before transformers looks at it
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
