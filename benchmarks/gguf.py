"""Speed and memory of GGUF files in llama.cpp: formats side by side, in one run.

    python benchmarks/gguf.py [--quick] [--threads N] [--shapes mamba-130m,mamba2-130m,mamba2-2.7b]
                              [--libraries FILE,FOLDER] [--load read,mapped] [--write docs/results/speed.csv]

Models have the shapes of the published ones and random weights: speed does not depend on the values. Every figure
comes from a fresh process; rounds go through all formats, libraries and ways of loading in turn, so that whatever else
the machine does hits all alike.

Printed per format: size, decode and prefill tokens per second with the spread over rounds, speed against F16,
memory above what Python itself takes, bytes that one decoded token has to move (weights once, state in and out),
and the share of the machine's measured read bandwidth that this makes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# This file has the name of a package that it needs: installed packages come first.
HERE = Path(__file__).resolve().parent
sys.path[:] = [*(entry for entry in sys.path if Path(entry or ".").resolve() != HERE), str(HERE)]

from result_files import add_option, write_speed  # noqa: E402

# Hidden size and layers.
MAMBA2 = {
    "mamba2-130m": (768, 24), "mamba2-370m": (1024, 48), "mamba2-1.3b": (2048, 48), "mamba2-2.7b": (2560, 64)
}  # fmt: skip
# What plans for Mamba look like: the sensitive small matrices and the head at 8 bits, the rest at 4.
MIXED = {"in_proj": "q4_k", "out_proj": "q4_k"}
MIB = 1 << 20


def configuration(shape: str) -> Any:
    import transformers

    mamba2 = {"n_groups": 1, "head_dim": 64, "state_size": 128, "tie_word_embeddings": True}
    if shape in MAMBA2:
        width, layers = MAMBA2[shape]
        return transformers.Mamba2Config(
            vocab_size=50288, hidden_size=width, num_hidden_layers=layers, num_heads=width // 32, **mamba2
        )
    shapes = {
        "mamba-130m": lambda: transformers.MambaConfig(
            vocab_size=50280, hidden_size=768, num_hidden_layers=24, state_size=16, time_step_rank=48
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
    """The file of one shape and format, and the bytes that one decoded token moves.

    Files of a single type are copies of the Q8_0 file with one row repeated: 2.7 billion weights take seconds so."""
    from kl_lens.formats import get_format
    from kl_lens.targets.gguf.header import read_header
    from kl_lens.targets.gguf.uniform import uniform_copy

    config, path = configuration(shape), folder / f"{shape}-{name}.gguf"
    if not path.exists() and name in ("q8_0", "mixed"):
        _export(config, shape, name, path)
    elif not path.exists():
        base = Path(write(shape, "q8_0", folder)["path"])
        quantized = [entry.name for entry in read_header(base).tensors if entry.type == "Q8_0"]
        uniform_copy(base, path, get_format(name), quantized)
    tensors = read_header(path).tensors
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "moved": sum(entry.bytes for entry in tensors) + 2 * state_bytes(config),
    }


def _export(config: Any, shape: str, name: str, path: Path) -> None:
    from kl_lens.records import Plan
    from kl_lens.targets.gguf.export import export_weights
    from kl_lens.weights import WeightStore

    weights = RandomWeights(config)
    kinds = ("in_proj", "x_proj", "dt_proj", "out_proj", "embeddings")
    assignment = {}
    for component in weights.parameters:
        kind = component.rpartition(".")[2]
        if kind in kinds:
            assignment[component] = MIXED.get(kind, "q8_0") if name == "mixed" else name
    plan, store = Plan(name, assignment, "benchmark"), WeightStore(weights, memory_budget=0)
    export_weights(weights, store, config, plan, path, name=shape)


def state_bytes(config: Any) -> int:
    """The float32 state of all layers: convolution inputs and the state proper."""
    inner = config.hidden_size * config.expand
    channels = inner + 2 * config.state_size * getattr(config, "n_groups", 1) * (
        config.model_type == "mamba2"
    )
    return 4 * config.num_hidden_layers * (inner * config.state_size + channels * (config.conv_kernel - 1))


def child(path: str, load: str, threads: int, prompt: int, tokens: int) -> None:
    """In a process of its own: load, prefill, decode; prints JSON."""
    from kl_lens.environment import set_defaults

    set_defaults()  # as the command line does
    from kl_lens.profiling.memory import resident
    from kl_lens.targets.gguf.library import find_library
    from kl_lens.targets.gguf.session import open_session

    find_library()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    started = time.perf_counter()
    with open_session(path, threads=threads, load=load) as session:
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


@dataclass(frozen=True)
class Way:
    """How a file is run."""

    library: str  # empty: the one that is found
    load: str
    threads: int

    def run(self, path: str, prompt: int, tokens: int) -> dict[str, Any]:
        words = ["--child", path, self.load, str(self.threads), str(prompt), str(tokens)]
        environment = os.environ | ({"LLAMA_CPP_LIB": self.library} if self.library else {})
        done = subprocess.run(
            [sys.executable, __file__, *words], capture_output=True, text=True, env=environment
        )
        if done.returncode:
            raise SystemExit(f"{path}: {(done.stderr.strip().splitlines() or [done.returncode])[-1]}")
        return json.loads(done.stdout.splitlines()[-1])


def measure(shape: str, options: argparse.Namespace, folder: Path, bandwidth: dict[int, float]) -> None:
    threads = [int(each) for each in options.threads.split(",")]
    ways = [
        Way(library, load, count)
        for library in options.libraries.split(",")
        for load in options.load.split(",")
        for count in threads
    ]
    files = {name: write(shape, name, folder) for name in options.formats.split(",")}
    rows = {(name, way): Row(file, []) for name, file in files.items() for way in ways}
    for _ in range(options.rounds):
        for count, best in bandwidth.items():  # the best of all rounds: others may want the memory meanwhile
            bandwidth[count] = max(best, _bandwidth(count, options.quick))
        for (name, way), row in rows.items():
            row.runs.append(way.run(files[name]["path"], options.prompt, options.tokens))
    print(f"{shape}: decode {options.tokens} tokens, prompt {options.prompt}")
    for count, best in bandwidth.items():
        print(f"  read bandwidth, best so far: {best / 1e9:.1f} GB/s on {count} thread(s)")
    first = next(iter(rows.values())).middle("decode")
    for (name, way), row in rows.items():
        decode, found = row.middle("decode"), row.runs[0]["description"]
        variant = f"{name.upper()}, {found['library']}, {found['load_mode']}"
        numbers = {
            (variant, "MiB"): f"{row.file['bytes'] / MIB:.1f}",
            (variant, "moved MiB/token"): f"{row.file['moved'] / MIB:.1f}",
            (variant, "decode tokens/s"): f"{decode:.2f} ± {row.spread('decode'):.2f}",
            (variant, "decode, times the first"): f"{decode / first:.2f}",
            (variant, "prompt tokens/s"): f"{row.middle('prefill'):.1f} ± {row.spread('prefill'):.1f}",
            (variant, "memory MiB"): f"{row.middle('memory') / MIB:.0f}",
            (variant, "share of bandwidth"): f"{decode * row.file['moved'] / bandwidth[way.threads]:.2f}",
            ("", "read bandwidth GB/s"): f"{bandwidth[way.threads] / 1e9:.1f}",
        }
        shown = ", ".join(f"{quantity} {number}" for (_, quantity), number in numbers.items())
        print(
            f"  {variant}, {way.threads} thread(s): {shown} ({found['found']}; {found['version']})",
            flush=True,
        )
        write_speed(
            options.write, {"benchmark": "gguf", "model": shape, "threads": str(way.threads)}, numbers
        )
    if options.folder is None:
        for file in folder.glob(f"{shape}-*.gguf"):
            file.unlink()


def _bandwidth(threads: int, quick: bool) -> float:
    from kl_lens.profiling.machine import read_bandwidth

    return read_bandwidth(threads, buffer_bytes=64 * MIB if quick else None).best


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, few tokens: shows that it works")
    parser.add_argument("--shapes", default=None, help="comma-separated, as are the next options")
    parser.add_argument("--formats", default="fp16,q8_0,q4_0,q4_k,mixed")
    parser.add_argument("--threads", default=str(len(os.sched_getaffinity(0))))
    parser.add_argument("--libraries", default="", help="default: the one that is found")
    parser.add_argument("--load", default="auto", help="ways of loading, as of kl-lens benchmark")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="keep the files here")
    add_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.prompt, options.rounds = 16, 32, 2
    default = "mamba-small,mamba2-small" if options.quick else "mamba-130m,mamba2-130m,mamba2-2.7b"
    shapes = (options.shapes or default).split(",")

    from kl_lens.profiling.machine import last_level_cache

    bandwidth = {int(count): 0.0 for count in options.threads.split(",")}
    print(f"last-level cache: {(last_level_cache() or 0) / MIB:.0f} MiB")
    with tempfile.TemporaryDirectory() as temporary:
        for shape in shapes:
            measure(shape, options, options.folder or Path(temporary), bandwidth)


if __name__ == "__main__":
    main()
