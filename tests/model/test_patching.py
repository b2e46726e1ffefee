"""Another forward for a while, and the one before it afterwards, whatever happens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kl_lens.model.patching import has_own_forward, patched, with_globals


def _adding(module: nn.Module, amount: float):
    before = module.forward
    return lambda x: before(x) + amount


def test_blocks_nest_and_give_back_what_they_found() -> None:
    module, x = nn.Identity(), torch.zeros(1)
    with patched([(module, _adding(module, 1))]):
        with patched([(module, _adding(module, 10))]):
            assert module(x) == 11
        assert module(x) == 1
        assert not has_own_forward(module)
    assert module(x) == 0
    assert has_own_forward(module)


def test_one_module_twice_in_one_list_comes_back_too() -> None:
    module = nn.Identity()
    with patched((module, _adding(module, amount)) for amount in (1, 10)):
        assert module(torch.zeros(1)) == 11
    assert has_own_forward(module)


def test_forwards_come_back_when_the_block_fails_and_when_making_them_fails() -> None:
    first, second = nn.Identity(), nn.Identity()
    with pytest.raises(KeyError), patched([(first, _adding(first, 1))]):
        raise KeyError

    def pairs():
        yield first, _adding(first, 1)
        raise ValueError

    with pytest.raises(ValueError), patched(pairs()):
        pass
    assert has_own_forward(first)
    assert has_own_forward(second)


OFFSET = 1


def _offset(x: int, *, twice: bool = False) -> int:
    return x + OFFSET * (2 if twice else 1)


def test_a_copy_with_other_globals_leaves_the_function_alone() -> None:
    other = with_globals(_offset, {"OFFSET": 100})
    assert (other(1), other(1, twice=True)) == (101, 201)
    assert (_offset(1), _offset(1, twice=True)) == (2, 3)
