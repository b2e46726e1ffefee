"""What the benchmarks share: shapes, side-by-side timing, the machine's matmul rate."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# This folder holds gguf.py and openvino.py: installed packages of those names must win.
_HERE = Path(__file__).resolve().parent
sys.path = [place for place in sys.path if Path(place or ".").resolve() != _HERE] + [str(_HERE)]

from kl_lens.environment import set_defaults  # noqa: E402

set_defaults()

import torch  # noqa: E402
import transformers  # noqa: E402

from kl_lens.checkpoints import LoadedModel  # noqa: E402
from kl_lens.profiling.machine import matmul_rate as profiled_rate  # noqa: E402

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


SHAPES = {  # hidden size, layers, heads of Mamba-2
    "mamba-130m": (768, 24, None),
    "mamba-2.8b": (2560, 64, None),
    "mamba2-130m": (768, 24, 24),
    "mamba2-2.7b": (2560, 64, 80),
}


def shape(name: str) -> LoadedModel:
    """A model of a published shape with random weights: for speed, never for sensitivity."""
    torch.manual_seed(0)
    if name not in SHAPES:
        raise SystemExit(f"no shape is called {name!r}; there are {', '.join(SHAPES)}")
    hidden, layers, heads = SHAPES[name]
    if heads is None:
        config = transformers.MambaConfig(hidden_size=hidden, num_hidden_layers=layers, vocab_size=50280)
        model: torch.nn.Module = transformers.MambaForCausalLM(config)
    else:
        config2 = transformers.Mamba2Config(
            hidden_size=hidden, num_hidden_layers=layers, vocab_size=50288, num_heads=heads, head_dim=64,
            state_size=128, n_groups=1, chunk_size=256, tie_word_embeddings=True,
        )  # fmt: skip
        model = transformers.Mamba2ForCausalLM(config2)
    return LoadedModel(name, Path(), model.eval().requires_grad_(False), None, source=name)


def interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, taken A B A B so that a noisy machine hurts all alike; one warm-up each."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if repeat:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def matmul_rate(rows: int = 4096, inner: int = 768, columns: int = 3072) -> float:
    """Floating-point operations per second of a float32 product of this shape, all threads."""
    return profiled_rate(rows, inner, columns)


def machine() -> str:
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
