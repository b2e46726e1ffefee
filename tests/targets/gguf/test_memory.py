"""Streaming needs one tensor and one shard, whatever the size of the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

SCRIPT = """
import json, resource, sys
from pathlib import Path
from kl_lens.run.records import Plan
from kl_lens.targets.gguf.export import export
from kl_lens.weights.formats import get_format
import torch
get_format("q8_0").roundtrip(torch.randn(64, 64))  # libraries that load on first use
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
plan = Plan("q8_0", json.load(open(sys.argv[3])), "test")
artifact = export(Path(sys.argv[1]), plan, Path(sys.argv[2]))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"before": before, "after": after, "file": artifact.realised_bytes}))
"""

MIB = 1 << 20


@pytest.mark.slow
def test_a_sharded_checkpoint_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """48 layers in shards of 50 MiB: 618 MiB on disk."""
    config = transformers.MambaConfig(vocab_size=4096, hidden_size=1024, num_hidden_layers=48, state_size=16)
    model = transformers.MambaForCausalLM(config).half()
    model.save_pretrained(tmp_path / "big", max_shard_size="52MB")
    sizes = [path.stat().st_size for path in (tmp_path / "big").glob("*.safetensors")]
    assert len(sizes) > 10
    total, largest = sum(sizes), max(sizes)
    names = [
        f"backbone.layers.{i}.mixer.{kind}" for i in range(48) for kind in ("in_proj", "x_proj", "out_proj")
    ]
    (tmp_path / "plan.json").write_text(json.dumps(dict.fromkeys([*names, "backbone.embeddings"], "q8_0")))
    places = [str(tmp_path / name) for name in ("big", "out", "plan.json")]
    command = [sys.executable, "-c", SCRIPT, *places]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    used = seen["after"] - seen["before"]
    tensor = 4 * 4096 * 1024  # the largest matrix (in_proj, embedding), in float32
    # One shard that is mapped, one matrix in float32 and what quantizing it takes (copies of its size).
    assert used < largest + 6 * tensor, f"{used / MIB:.0f} MiB for a checkpoint of {total / MIB:.0f} MiB"
    assert used < total / 2
