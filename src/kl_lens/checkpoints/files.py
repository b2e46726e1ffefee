"""Looks at a checkpoint's files before anything is loaded, so that what is wrong is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kl_lens.errors import CheckpointError

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE = ("model.safetensors", "pytorch_model.bin")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dictionary."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no model: it has no config.json; give a Hugging Face model folder"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is no valid JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, safetensors before pickles; every one of them exists."""
    for name in _INDEXES:
        index = folder / name
        if index.is_file():
            return _shards(index)
    for name in _SINGLE:
        if (folder / name).is_file():
            return [folder / name]
    raise CheckpointError(
        f"{folder} has a config.json but no weights ({' or '.join(_SINGLE)}, or shards with an index); "
        "download the weights too"
    )


def check_weight_files(folder: Path) -> None:
    """Refuses a missing shard and a truncated or foreign safetensors file."""
    for path in weight_files(folder):
        if path.suffix != ".safetensors":
            continue
        try:
            with safe_open(path, framework="numpy") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is no complete safetensors file ({error}); download it again"
            ) from error


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is no valid shard index ({error}); download it again") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: shard {missing[0]} of {len(names)} is missing"
            f"{f' (and {len(missing) - 1} more)' if len(missing) > 1 else ''}; finish the download"
        )
    return [index.parent / name for name in names]
