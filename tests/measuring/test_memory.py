"""How much runs at once in how much memory, counted by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kl_lens.base.system import DEFAULT_MEMORY
from kl_lens.measuring.engines import FastEngine, memory_on, ranges
from kl_lens.measuring.teacher import batch_tokens, logit_rows
from kl_lens.model import LoadedModel

CPU = torch.device("cpu")
GPU = torch.device("cuda")
GIB = 2**30


@pytest.mark.parametrize(
    ("free", "expected"),
    [(80 * GIB, 0.85 * 78.75 * GIB), (GIB, 0.85 * GIB / 4)],
    ids=["large", "small"],
)
def test_by_default_a_gpu_gives_most_of_what_is_free_there(
    free: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kl_lens.measuring.engines.free_memory", lambda device: free)
    assert memory_on(GPU, DEFAULT_MEMORY) == int(expected)
    assert memory_on(GPU, 10**9) == 10**9
    assert memory_on(CPU, DEFAULT_MEMORY) == DEFAULT_MEMORY


@pytest.mark.parametrize(
    ("vocabulary", "gpu_budget", "rows"),
    [
        (50_000, None, 335),  # 64 MiB of float32
        (100, None, 1024),
        (10**6, None, 64),
        (50_000, 16 * 10**9, 5000),
        (100, 16 * 10**9, 8192),
        (10**6, 10**6, 64),
    ],
)
def test_rows_of_logits_at_once(
    vocabulary: int, gpu_budget: int | None, rows: int
) -> None:
    assert logit_rows(vocabulary, gpu_budget) == rows


@pytest.mark.parametrize(
    ("device", "tokens_that_fit", "tokens"),
    [(CPU, 3000, 2048), (GPU, 3000, 3000), (GPU, 10**6, 16384), (GPU, 10, 256)],
)
def test_tokens_in_a_batch(
    device: torch.device, tokens_that_fit: int, tokens: int
) -> None:
    """A quarter of a GPU's memory holds ten tensors of the widest layer."""
    blocks = torch.nn.ModuleList([torch.nn.Linear(64, 256), torch.nn.Linear(128, 64)])
    task = SimpleNamespace(rows_at_once=2048)
    chain: Any = SimpleNamespace(device=device, task=task, blocks=blocks)
    assert batch_tokens(chain, 4 * 10 * 4 * 256 * tokens_that_fit) == tokens


def test_slabs_are_whole_batches_that_half_of_the_memory_holds(
    mamba: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = mamba.chain
    vocabulary, width = chain.head.weight.shape  # type: ignore[union-attr]
    size = 24 * (chain.state_size + 2 * width + vocabulary) * 4
    for batch, windows in ((100, 5), (2, 4), (3, 3)):
        monkeypatch.setattr("kl_lens.model.tasks.LanguageTask.rows_at_once", 24 * batch)
        engine = FastEngine(mamba, memory_budget=2 * 5 * size + 1)
        assert engine.slab_windows(24) == windows
    engine.sharers = 2
    assert engine.slab_windows(24) == 2
    assert FastEngine(mamba, memory_budget=1).slab_windows(24) == 1
    assert ranges(7, 3) == [range(3), range(3, 6), range(6, 7)]
