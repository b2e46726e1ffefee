"""Parts of a block that see no difference are not run again; parts that do, are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kl_lens.measuring.engines import FastEngine
from kl_lens.measuring.perturbation import find_candidates
from kl_lens.measuring.products import InputMajor
from kl_lens.measuring.teacher import BlockMemo
from kl_lens.weights.recipes import Recipe
from tests.families import token_ids
from tests.measuring.conftest import loaded


class Part(nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(input)


class Block(nn.Module):
    """Two parts side by side, one behind them, and one whose weight is used without calling it."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.last, self.bare = (Part(8, 8) for _ in range(4))
        self.in_place = in_place

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        side = self.one(hidden)
        if self.in_place:
            side += 1
        return self.last(side + self.two(hidden) + hidden @ self.bare.weight)


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def _calls(block: Block) -> dict[str, int]:
    return {name: part.calls for name, part in block.named_children()}


@pytest.mark.parametrize(
    ("perturbed", "runs"),
    [("one", {"last"}), ("two", {"last"}), ("last", set()), ("bare", {"last"})],
)
@torch.no_grad()
def test_only_what_follows_the_perturbed_weight_runs(perturbed: str, runs: set[str], hidden) -> None:
    block = Block()
    memo = BlockMemo(block)
    with memo.recording():
        block(hidden)
    before = _calls(block)
    weight = getattr(block, perturbed).weight
    weight.data = weight.data + 1
    with memo.replaying({id(weight)}):
        found = block(hidden.clone())
    ran = {name for name, count in _calls(block).items() if count > before[name]}
    assert ran == runs | ({perturbed} - {"bare"})
    torch.testing.assert_close(found, block(hidden), rtol=0, atol=0)


@torch.no_grad()
def test_other_inputs_and_outputs_changed_in_place_are_never_answered_from_memory(hidden) -> None:
    block = Block(in_place=True)
    memo = BlockMemo(block)
    with memo.recording():
        expected = block(hidden).clone()
    other, before = hidden.clone(), _calls(block)
    other[1, 4, 7] += 1e-6
    with memo.replaying(set()):
        for _ in range(2):
            torch.testing.assert_close(block(hidden), expected, rtol=0, atol=0)
        after, found = _calls(block), block(other)
    assert after["one"] == before["one"] + 2, "its recorded output is not what it gave"
    assert after["two"] == before["two"]
    torch.testing.assert_close(found, block(other), rtol=0, atol=0)
    with pytest.raises(ZeroDivisionError), memo.replaying(set()):
        raise ZeroDivisionError
    assert not any("forward" in vars(module) for module in block.modules()), "the block is as it was"


@torch.no_grad()
def test_a_part_that_fills_a_dictionary_runs_every_time(hidden) -> None:
    class Writing(Part):
        def forward(self, input: torch.Tensor, notes: dict[str, torch.Tensor]) -> torch.Tensor:
            notes["seen"] = output = super().forward(input)
            return output

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.writing = Writing(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            notes: dict[str, torch.Tensor] = {"seen": hidden}
            return self.writing(hidden, notes) + notes["seen"]

    block = Reader()
    memo = BlockMemo(block)
    with memo.recording():
        expected = block(hidden)
    with memo.replaying(set()):
        torch.testing.assert_close(block(hidden), expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["falcon_h1", "mamba"])
def test_with_and_without_memory_the_same_bits(family: str) -> None:
    model, ids = loaded(family), token_ids(4, 24)
    candidates, _ = find_candidates(model.anatomy, [Recipe("int4")])
    perturbations = [candidate.perturbation for candidate in candidates]
    engine = FastEngine(model)
    engine.prepare(ids)
    assert all(memo is not None for memo in engine.teacher.batches[0].memos)
    remembered = engine.measure(perturbations)
    for batch in engine.teacher.batches:
        batch.memos = [None] * len(batch.memos)
    assert engine.measure(perturbations) == remembered


@torch.no_grad()
def test_copies_with_inputs_outermost_give_the_same_products(hidden) -> None:
    block = nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8, bias=False))
    expected = block(hidden)
    layout = InputMajor([block], most_bytes=10**6)
    assert layout.bytes == 2 * 8 * 12 * 4
    with layout.active():
        torch.testing.assert_close(block(hidden), expected)
        block[0].weight.data = block[0].weight.data * 2  # swapped in the meantime, as a candidate's is
        doubled = block(hidden)
    torch.testing.assert_close(doubled, block(hidden))
    assert not torch.allclose(doubled, expected)
    assert not any("forward" in vars(module) for module in block.modules())
    assert InputMajor([block], most_bytes=400).bytes == 384, "the first fits, the second does not"
