"""What the benchmarks share: how they open models, and the shapes of published ones."""

from __future__ import annotations

import platform
import time
from pathlib import Path

from kl_lens.base.environment import set_defaults

set_defaults()

import torch  # noqa: E402
import transformers  # noqa: E402

from kl_lens.model import LoadedModel, load  # noqa: E402
from stress import STRESSED, plant  # noqa: E402

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

REFERENCES = ",".join(STRESSED)
ALL = ",".join((*STRESSED, *(f"stressed:{name}" for name in STRESSED)))

SHAPES = {  # hidden size, layers, heads of Mamba-2
    "mamba-130m": (768, 24, None),
    "mamba-2.8b": (2560, 64, None),
    "mamba2-130m": (768, 24, 24),
    "mamba2-370m": (1024, 48, 32),
    "mamba2-1.3b": (2048, 48, 64),
    "mamba2-2.7b": (2560, 64, 80),
}


# With transformers' own defaults, rounding to 8 bits changes the output entirely.
_LIKE_THE_AUTHORS = {"initializer_range": 0.02, "rescale_prenorm_residual": True}
EXPERTS = "granite-4.0-h-tiny"  # 40 blocks, four of them attention; 64 experts; 7 billion parameters


def models(names: str) -> list[str]:
    """A folder of models stands for all models in it."""
    sources: list[str] = []
    for name in names.split(","):
        sources += sorted(
            str(config.parent) for config in Path(name).glob("*/config.json")
        ) or [name]
    return sources


def shown(name: str) -> str:
    return Path(name).name if Path(name).is_dir() else name


def opened(name: str, device: str = "cpu") -> LoadedModel:
    """A reference, `stressed:` and a reference, a folder, or a published shape."""
    if name in (*SHAPES, EXPERTS):
        with torch.device(device):
            model = shape(name)
        model.model.to(device)
        return model
    base = name.removeprefix("stressed:")
    model = load(base, device=device)
    if base != name:
        plant(model, base)
    return model


def shape(name: str) -> LoadedModel:
    """A model of a published shape with random weights: for speed, never for sensitivity."""
    torch.manual_seed(0)
    if name == EXPERTS:
        return LoadedModel(
            name, Path(), _experts().eval().requires_grad_(False), None, source=name
        )
    if name not in SHAPES:
        raise SystemExit(
            f"no shape is called {name!r}; there are {', '.join((*SHAPES, EXPERTS))}"
        )
    hidden, layers, heads = SHAPES[name]
    if heads is None:
        config = transformers.MambaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            vocab_size=50280,
            **_LIKE_THE_AUTHORS,
        )
        model: torch.nn.Module = transformers.MambaForCausalLM(config)
    else:
        config2 = transformers.Mamba2Config(
            hidden_size=hidden,
            num_hidden_layers=layers,
            vocab_size=50288,
            num_heads=heads,
            head_dim=64,
            state_size=128,
            n_groups=1,
            chunk_size=256,
            tie_word_embeddings=True,
            **_LIKE_THE_AUTHORS,
        )
        model = transformers.Mamba2ForCausalLM(config2)
    return LoadedModel(
        name, Path(), model.eval().requires_grad_(False), None, source=name
    )


def _experts() -> torch.nn.Module:
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=100352,
        hidden_size=1536,
        intermediate_size=512,
        shared_intermediate_size=1024,
        num_hidden_layers=40,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=64,
        num_experts_per_tok=6,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_expand=2,
        tie_word_embeddings=True,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0078125,
        logits_scaling=6.0,
        position_embedding_type="nope",
        layer_types=[
            "attention" if block in (5, 15, 25, 35) else "mamba" for block in range(40)
        ],
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def matmul_rate(rows: int = 4096, inner: int = 768, columns: int = 3072) -> float:
    """Floating-point operations per second of a float32 product of this shape, all threads."""
    a = torch.randn(rows, inner)
    b = torch.randn(columns, inner)
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        a @ b.T
        seconds.append(time.perf_counter() - started)
    return 2 * rows * inner * columns / min(seconds)


def machine() -> str:
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
