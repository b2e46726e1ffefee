"""Streaming needs one tensor and one shard, whatever the size of the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

SCRIPT = """
import json, resource, sys
from kl_lens.run.records import Plan
from kl_lens.targets.gguf import export
from kl_lens.weights.formats import get_format
import torch
get_format("q8_0").roundtrip(torch.randn(64, 64))  # libraries that load on first use
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
plan = Plan("q8_0", json.load(open(sys.argv[3])), "test")
artifact = export(sys.argv[1], plan, sys.argv[2])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"before": before, "after": after, "file": artifact.realised_bytes}))
"""

MIB = 1 << 20


@pytest.mark.slow
def test_a_sharded_checkpoint_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """48 layers, four to a shard of 51 MiB: 618 MiB on disk."""
    config = transformers.MambaConfig(vocab_size=4096, hidden_size=1024, num_hidden_layers=48, state_size=16)
    shards, largest = _synthetic(tmp_path / "big", config, layers_per_shard=4)
    assert shards == 13
    total = sum(path.stat().st_size for path in (tmp_path / "big").glob("*.safetensors"))
    names = [
        f"backbone.layers.{i}.mixer.{kind}" for i in range(48) for kind in ("in_proj", "x_proj", "out_proj")
    ]
    (tmp_path / "plan.json").write_text(json.dumps(dict.fromkeys([*names, "backbone.embeddings"], "q8_0")))
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        str(tmp_path / "big"),
        str(tmp_path / "out"),
        str(tmp_path / "plan.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    used = seen["after"] - seen["before"]
    tensor = 4 * 4096 * 1024  # the largest matrix (in_proj, embedding), in float32
    # One shard that is mapped, one matrix in float32 and what quantizing it takes (copies of its size).
    assert used < largest + 6 * tensor, f"{used / MIB:.0f} MiB for a checkpoint of {total / MIB:.0f} MiB"
    assert used < total / 2


def _synthetic(folder: Path, config: transformers.MambaConfig, layers_per_shard: int) -> tuple[int, int]:
    """A checkpoint in shards, written one by one; the number of shards and the size of the largest."""
    folder.mkdir()
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in transformers.MambaForCausalLM(config).state_dict().items()}
    shapes.pop("lm_head.weight")
    groups: dict[int, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        index = 1 + int(parts[2]) // layers_per_shard if parts[1] == "layers" else 0
        groups.setdefault(index, {})[name] = shape
    weight_map = {}
    for index, members in groups.items():
        file = f"model-{index:05d}.safetensors"
        save_file(
            {n: torch.randn(s, dtype=torch.float32).half() / 30 for n, s in members.items()}, folder / file
        )
        weight_map |= dict.fromkeys(members, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return len(groups), max(path.stat().st_size for path in folder.glob("*.safetensors"))
