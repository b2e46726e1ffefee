"""The chain: any stretch of blocks, run by itself, computes what the model computes."""

import pytest
import torch
from torch import Tensor

from kl_lens.base.errors import CheckpointError
from kl_lens.model import Chain
from tests.families import CONFIGS, UNUSUAL, tiny_model, token_ids

LINKED = [family for family in UNUSUAL if family != "rwkv"]


@pytest.mark.parametrize("family", [*CONFIGS, *LINKED])
def test_two_halves_and_stacked_copies_equal_the_whole(family: str) -> None:
    model = tiny_model(family)
    ids = token_ids(2, 37)
    chain = Chain(model, fast=False)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
    calls = chain.calls(ids)
    middle = len(chain) // 2
    half = chain.run(calls.hidden, calls, 0, middle)
    logits = chain.logits(chain.finish(chain.run(half, calls, middle), calls))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-6)
    stacked = chain.run(calls.hidden.repeat(3, 1, 1), calls, 0)
    for copy in chain.logits(chain.finish(stacked, calls)).split(2):
        torch.testing.assert_close(copy, logits, rtol=1e-5, atol=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("mamba2")
    chain = Chain(model)
    with pytest.raises(RuntimeError):  # whatever happens
        chain.run(torch.zeros(1, 5, 3), chain.calls(token_ids(1, 5)), 0)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )


class Linked(torch.nn.Module):
    """Three blocks; each gives keys and values besides the hidden states, and `link` says what becomes of them."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.key, self.value = (torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, hidden, shared=None, notes=None):
            states = (self.key(hidden), self.value(hidden))
            key, value = states if shared is None else shared
            if notes is not None:
                notes["last"] = key = notes.get("last", 0) + key
            return hidden + torch.tanh(self.mix(hidden)) * key.cumsum(1) + value, states

    def __init__(self, link) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(97, 8)
        self.layers = torch.nn.ModuleList([self.Block() for _ in range(3)])
        self.head = torch.nn.Linear(8, 97)
        self.link = link

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> tuple[Tensor]:
        hidden = self.embedding(input_ids)
        shared = None
        notes = {} if self.link == "notes" else None
        for layer in self.layers:
            states = (
                self.link(shared) if callable(self.link) and shared is not None else None
            )
            hidden, shared = layer(hidden, states, notes=notes)
        return (self.head(hidden),)


@pytest.mark.parametrize(
    "link", [lambda shared: (shared[0], shared[1]), "notes"], ids=["tuple", "dictionary"]
)
def test_what_blocks_hand_to_each_other_is_carried_along(link) -> None:
    chain = Chain(Linked(link))
    ids = token_ids(2, 12)
    calls = chain.calls(ids)
    half = chain.run(calls.hidden, calls, 0, 1)
    assert half.carried, "something besides the hidden states leaves the first block"
    for _ in range(2):  # nothing is left over from the first time
        logits = chain.logits(chain.finish(chain.run(half, calls, 1), calls))
        torch.testing.assert_close(logits, chain.full_logits(ids))
    assert chain.doubt(ids) is None


class Aside(Linked):
    """A first block whose output the model adds behind the last: nothing that a block is called with shows it."""

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> tuple[Tensor]:
        hidden = first = self.embedding(input_ids)
        for index, layer in enumerate(self.layers):
            hidden, _ = layer(hidden)
            first = hidden if index == 0 else first
        return (self.head(hidden + first),)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Linked(lambda shared: (2 * shared[0], shared[1])), "cannot be run in parts"),
        (Aside(None), "off by"),
    ],
)
def test_what_is_changed_on_its_way_or_kept_by_the_model_raises_a_doubt(
    model: Linked, reason: str
) -> None:
    doubt = Chain(model).doubt(token_ids(2, 12))
    assert reason in str(doubt)
    assert "\n" not in str(doubt)


def test_which_arguments_follow_the_batch_is_learnt_at_the_length_in_use() -> None:
    """A mask for a sliding window is there only when the text is longer than the window."""
    chain = Chain(tiny_model("mistral"))
    for length in (5, 24):
        calls = chain.calls(token_ids(2, length))
        copies = chain.run(calls.hidden.repeat(3, 1, 1), calls, 0)
        alone = chain.run(calls.hidden, calls, 0)
        torch.testing.assert_close(
            copies.hidden, alone.hidden.repeat(3, 1, 1), rtol=1e-5, atol=1e-5
        )


def test_a_model_that_changes_states_between_its_blocks_is_refused() -> None:
    with pytest.raises(
        CheckpointError,
        match=r"blocks\.2 does not take the output of .*blocks\.1.*open it in float32",
    ):
        Chain(tiny_model("rwkv"))
