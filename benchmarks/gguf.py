"""Speed and memory of GGUF files in llama.cpp: formats side by side, in one run.

    python benchmarks/gguf.py [--quick] [--threads N] [--shapes mamba-130m,mamba2-130m,mamba2-2.7b]

Models have the shapes of the published ones and random weights: speed does not depend on the values. Every figure
comes from a fresh process; rounds go through all formats in turn, so that whatever else the machine does hits all
alike (two OpenMP threads collapse when something else wants a core: leave the machine alone).

Printed per format: size, decode and prefill tokens per second with the spread over rounds, speed against F16,
memory above what Python itself takes, bytes that one decoded token has to move (weights once, state in and out),
and the share of the machine's measured read bandwidth that this makes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# This file is called like a package that it needs: its own folder must not be where that is looked for.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

FORMATS = ("fp16", "q8_0", "q4_0", "q4_k", "mixed")
ONLY_Q8 = ("mamba2-2.7b",)  # the shape of the Orange Pi figures; one format is enough and takes long enough
# What plans for Mamba look like: the sensitive small matrices and the head at 8 bits, the rest at 4.
MIXED = {"in_proj": "q4_k", "out_proj": "q4_k"}
MIB = 1 << 20


def configuration(shape: str) -> Any:
    import transformers

    mamba2 = {"n_groups": 1, "head_dim": 64, "state_size": 128, "tie_word_embeddings": True}
    shapes = {
        "mamba-130m": lambda: transformers.MambaConfig(
            vocab_size=50280, hidden_size=768, num_hidden_layers=24, state_size=16, time_step_rank=48
        ),
        "mamba2-130m": lambda: transformers.Mamba2Config(
            vocab_size=50288, hidden_size=768, num_hidden_layers=24, num_heads=24, **mamba2
        ),
        "mamba2-2.7b": lambda: transformers.Mamba2Config(
            vocab_size=50288, hidden_size=2560, num_hidden_layers=64, num_heads=80, **mamba2
        ),
        "mamba-small": lambda: transformers.MambaConfig(
            vocab_size=4096, hidden_size=256, num_hidden_layers=4, state_size=16
        ),
        "mamba2-small": lambda: transformers.Mamba2Config(
            vocab_size=4096, hidden_size=256, num_hidden_layers=4, num_heads=8, **mamba2
        ),
    }
    return shapes[shape]()


class RandomWeights:
    """A checkpoint that exists one tensor at a time, the same whenever it is read."""

    def __init__(self, config: Any) -> None:
        import torch
        import transformers

        from kl_lens.checkpoints.anatomy import component_name

        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        self.device = torch.device("cpu")
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.aliases = {"lm_head.weight": "backbone.embeddings.weight"}
        self.shapes.pop("lm_head.weight")
        self.parameters = {component_name(name, len(shape)): name for name, shape in self.shapes.items()}

    def place(self, name: str) -> int:
        return 0

    def read(self, name: str) -> Any:
        import torch

        drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if name.endswith("A_log"):
            return torch.rand(self.shapes[name], generator=drawn)
        if "norm" in name or name.endswith(".D"):
            return torch.ones(self.shapes[name])
        return torch.randn(self.shapes[name], generator=drawn) * self.shapes[name][-1] ** -0.5

    def weight(self, component: str) -> Any:
        return self.read(self.parameters[component])

    def state(self, component: str) -> None:
        return None

    def close(self) -> None:
        pass


def write(shape: str, name: str, folder: Path) -> dict[str, Any]:
    """The file of one shape and format, and what one decoded token moves."""
    from kl_lens.records import Plan
    from kl_lens.targets.gguf.export import export_weights
    from kl_lens.weights import WeightStore

    config = configuration(shape)
    weights = RandomWeights(config)
    kinds = ("in_proj", "x_proj", "dt_proj", "out_proj", "embeddings")
    assignment = {}
    for component in weights.parameters:
        kind = component.rpartition(".")[2]
        if kind in kinds:
            assignment[component] = MIXED.get(kind, "q8_0") if name == "mixed" else name
    path = folder / f"{shape}-{name}.gguf"
    started = time.perf_counter()
    plan, store = Plan(name, assignment, "benchmark"), WeightStore(weights, memory_budget=0)
    artifact = export_weights(weights, store, config, plan, path, name=shape)
    return {
        "path": str(path),
        "bytes": artifact.realised_bytes,
        "moved": sum(t.bytes for t in artifact.tensors) + 2 * state_bytes(config),
        "fallbacks": artifact.settings["fallbacks"],
        "export_seconds": time.perf_counter() - started,
    }


def state_bytes(config: Any) -> int:
    """The float32 state of all layers: convolution inputs and the state proper."""
    inner = config.hidden_size * config.expand
    channels = inner + 2 * config.state_size * getattr(config, "n_groups", 1) * (
        config.model_type == "mamba2"
    )
    return 4 * config.num_hidden_layers * (inner * config.state_size + channels * (config.conv_kernel - 1))


def child(path: str, threads: int, prompt: int, tokens: int) -> None:
    """In a process of its own: load, prefill, decode; prints JSON."""
    from kl_lens.profiling.memory import resident
    from kl_lens.targets.gguf.library import find_library
    from kl_lens.targets.gguf.session import open_session

    find_library()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    started = time.perf_counter()
    with open_session(path, threads=threads) as session:
        loaded = time.perf_counter()
        session.prefill([1] * 8)  # pages in the file
        session.reset()
        begun = time.perf_counter()
        session.prefill([(7 * i) % session.vocabulary for i in range(prompt)])
        prefilled = time.perf_counter()
        for index in range(tokens):
            session.step((13 * index) % session.vocabulary)
        decoded = time.perf_counter()
        description = session.description
    after = resident("VmHWM")
    result = {
        "load": loaded - started,
        "prefill": prompt / (prefilled - begun),
        "decode": tokens / (decoded - prefilled),
        "memory": after - before,
        "description": description,
    }
    print(json.dumps(result))


@dataclass
class Row:
    file: dict[str, Any]
    runs: list[dict[str, Any]]

    def middle(self, key: str) -> float:
        return statistics.median(run[key] for run in self.runs)

    def spread(self, key: str) -> float:
        values = [run[key] for run in self.runs]
        return (max(values) - min(values)) / 2


def run_child(path: str, threads: int, prompt: int, tokens: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", path, str(threads), str(prompt), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{path}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(shape: str, options: argparse.Namespace, folder: Path, peak: float) -> dict[str, Row]:
    names = [n for n in FORMATS if n == "q8_0" or shape not in ONLY_Q8]
    rows = {name: Row(write(shape, name, folder), []) for name in names}
    for _ in range(options.rounds):
        for row in rows.values():
            row.runs.append(run_child(row.file["path"], options.threads, options.prompt, options.tokens))
    base = rows[names[0]].middle("decode")
    print(f"\n{shape}: decode {options.tokens} tokens, prefill {options.prompt}, {options.threads} thread(s)")
    print(
        "format      MiB   decode/s        ×F16   prefill/s       memory MiB  moved MiB/token  share  fallbacks"
    )
    for name, row in rows.items():
        decode, prefill = row.middle("decode"), row.middle("prefill")
        ratio = f"{decode / base:5.2f}" if names[0] == "fp16" else "    –"
        print(
            f"{name:6s} {row.file['bytes'] / MIB:8.1f} {decode:8.2f} ±{row.spread('decode'):6.2f} {ratio} "
            f"{prefill:9.1f} ±{row.spread('prefill'):6.1f} {row.middle('memory') / MIB:11.0f} "
            f"{row.file['moved'] / MIB:15.1f} {decode * row.file['moved'] / peak:7.2f} {row.file['fallbacks']:9d}"
        )
        Path(row.file["path"]).unlink()
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], *map(int, sys.argv[3:6]))
        return
    import os

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, few tokens: shows that it works")
    parser.add_argument("--shapes", default=None, help="comma-separated")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="write all figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.prompt, options.rounds = 16, 32, 2
    default = "mamba-small,mamba2-small" if options.quick else "mamba-130m,mamba2-130m,mamba2-2.7b"
    shapes = (options.shapes or default).split(",")

    from kl_lens.profiling.machine import read_bandwidth
    from kl_lens.targets.gguf.library import find_library

    library = find_library()
    buffer = (64 if options.quick else 512) * MIB
    peak = read_bandwidth(options.threads, buffer_bytes=buffer).best
    one = read_bandwidth(1, buffer_bytes=buffer).best
    print(f"library: {library.path.name} (found: {library.origin}; {library.version})")
    print(f"build: {library.system_info}")
    print(
        f"read bandwidth: {peak / 1e9:.1f} GB/s on {options.threads} thread(s), {one / 1e9:.1f} GB/s on one"
    )
    print("load mode: the library's default (memory-mapped; memory counts mapped pages and repacked copies)")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            rows = measure(shape, options, Path(folder), peak)
            results[shape] = {name: {"file": row.file, "runs": row.runs} for name, row in rows.items()}
    if options.json:
        record = {"bandwidth": {"all_threads": peak, "one_thread": one}, "results": results}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
