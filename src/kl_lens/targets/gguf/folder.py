"""A checkpoint folder's configuration, as the exporter reads it without opening the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from kl_lens.base.errors import CheckpointError
from kl_lens.model import mamba_ssm
from kl_lens.model.files import check_sizes, read_config, refuse_quantized
from kl_lens.model.opening import why_not_loaded
from kl_lens.targets.gguf.architectures import get_architecture


def read_configuration(folder: Path) -> Any:
    """The transformers configuration of a checkpoint folder, whichever library wrote it."""
    raw = read_config(folder)
    check_sizes(folder, raw)
    refuse_quantized(folder, raw, "give the original checkpoint, in 16 or 32 bits")
    if mamba_ssm.is_layout(raw):
        version2 = (raw.get("ssm_cfg") or {}).get("layer", "Mamba1") == "Mamba2"
        return mamba_ssm.mamba2_config(raw) if version2 else mamba_ssm.mamba1_config(raw)
    kind = str(raw.get("model_type"))
    text = raw.get("text_config")
    if isinstance(text, dict) and text.get("model_type") == f"{kind}_text":
        kind = f"{kind}_text"  # of a multimodal model, only the language model is exported
    get_architecture(kind)  # a clear refusal before transformers looks at it
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        return config.get_text_config() if isinstance(text, dict) else config
    except Exception as error:  # libraries raise all kinds of errors for odd settings
        raise CheckpointError(why_not_loaded(folder, raw, error)) from error
