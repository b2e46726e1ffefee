"""The chain: any stretch of blocks, run by itself, computes what the model computes."""

from __future__ import annotations

import pytest
import torch

from kl_lens.checkpoints import Chain, load
from kl_lens.errors import CheckpointError
from tests.families import CONFIGS, tiny_model, token_ids


@pytest.mark.parametrize("family", CONFIGS)
def test_two_halves_equal_the_whole(family: str) -> None:
    model, ids = tiny_model(family), token_ids(2, 37)
    chain = Chain(model, fast=False)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
    calls = chain.calls(ids)
    middle = len(chain) // 2
    half = chain.run(calls.hidden, calls, 0, middle)
    final = chain.run(half, calls, middle)
    logits = chain.logits(chain.finish(final, calls))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("family", CONFIGS)
def test_our_kernels_agree_with_the_librarys(family: str) -> None:
    model, ids = tiny_model(family), token_ids(2, 37)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
    logits = Chain(model, fast=True).full_logits(ids)
    # Two float32 computations of one function; deep hybrids amplify the last bits.
    assert (logits - expected).abs().max() <= 5e-5 * expected.abs().max()


@pytest.mark.parametrize("family", CONFIGS)
def test_stacked_copies_of_a_batch_give_each_copy_its_own_result(family: str) -> None:
    model, ids = tiny_model(family), token_ids(2, 19)
    chain = Chain(model)
    calls = chain.calls(ids)
    alone = chain.logits(chain.finish(chain.run(calls.hidden, calls, 0), calls))
    stacked = chain.run(calls.hidden.repeat(3, 1, 1), calls, 0)
    logits = chain.logits(chain.finish(stacked, calls))
    for copy in logits.split(2):
        torch.testing.assert_close(copy, alone, rtol=1e-5, atol=1e-5)


def test_what_enters_each_block_can_be_kept() -> None:
    chain, ids = Chain(tiny_model("mamba")), token_ids(1, 8)
    calls, kept = chain.calls(ids), {}
    final = chain.run(calls.hidden, calls, 0, keep=kept.__setitem__)
    assert sorted(kept) == [0, 1, 2, 3]
    torch.testing.assert_close(chain.run(kept[3], calls, 3).hidden, final.hidden)


def test_remote_code_with_meta_tokens_runs_through_the_same_path(remote_code_folder) -> None:
    model = load(remote_code_folder, trust_remote_code=True)
    chain, ids = model.chain, token_ids(2, 9)
    calls = chain.calls(ids)
    assert calls.hidden.shape[1] == 9 + 3, "three meta tokens stand in front"
    final = chain.run(chain.run(calls.hidden, calls, 0, 1), calls, 1)
    logits = chain.logits(chain.finish(final, calls))
    assert logits.shape == (2, 9, 97)
    torch.testing.assert_close(logits, chain.full_logits(ids))


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("mamba2")
    Chain(model).full_logits(token_ids(1, 5))
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_failing_block_leaves_the_model_as_it_was() -> None:
    model = tiny_model("mamba")
    chain = Chain(model)
    ids = token_ids(1, 5)
    calls = chain.calls(ids)
    with pytest.raises(RuntimeError):
        chain.run(torch.zeros(1, 5, 3), calls, 0)
    assert not any("forward" in vars(module) for module in model.modules())


def test_blocks_that_form_no_chain_are_refused() -> None:
    class Doubling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(11, 8)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])
            self.head = torch.nn.Linear(8, 11)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embedding

        def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> tuple[torch.Tensor]:
            hidden = self.embedding(input_ids)
            for layer in self.layers:
                hidden = layer(2 * hidden)  # changed between blocks
            return (self.head(hidden),)

    with pytest.raises(CheckpointError, match=r"layers\.1 does not take what layers\.0 gives"):
        Chain(Doubling())
