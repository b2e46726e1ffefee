"""States that are rounded after every token: the kernel is the recurrence, written plainly."""

from __future__ import annotations

import pytest
import torch

from kl_lens.base.errors import FormatError
from kl_lens.model.kernels.rounded_scan import rounded_scan
from kl_lens.model.states import GGML, StateFormat, keeping, running_format
from kl_lens.run.records import KEYS, STATE
from kl_lens.weights.formats import get_format
from tests.families import normal

FORMATS = (
    "fp16",
    "bf16",
    "fp8",
    "int8",
    "int4-head",
    "int4-32",
    "int8+feedback",
    "fp8-head+feedback",
)
# heads, width, states, groups; Mamba-1's decay differs from state to state
MAMBA = (24, 1, 16, 1)
MAMBA2 = (4, 8, 64, 2)


def scan_inputs(shape: tuple[int, int, int, int], time: int) -> tuple[torch.Tensor, ...]:
    """x, dt, a, b, c and skip of two sequences."""
    heads, width, states, groups = shape
    random = torch.Generator().manual_seed(3)
    x = torch.randn(2, time, heads, width, generator=random)
    dt = torch.rand(2, time, heads, generator=random)
    a = -torch.rand(heads, states if width == 1 else 1, generator=random)
    b, c = torch.randn(2, 2, time, groups, states, generator=random)
    return x, dt, a, b, c, torch.randn(heads, generator=random)


def plain_step(storage, state, lost, x, dt, a, b, c, skip):
    """One token: outputs, the stored state, what it lost."""
    inflow = (dt[..., None] * x)[..., None] * b[:, :, None, :]
    value = torch.exp(dt[..., None] * a)[:, :, None, :] * state + inflow + lost
    stored = storage.rounded(value)
    lost = (
        storage.rounded(value - stored) if storage.feedback else torch.zeros_like(stored)
    )
    return (value * c[:, :, None, :]).sum(-1) + skip[:, None] * x, stored, lost


@pytest.mark.parametrize("shape", [MAMBA, MAMBA2], ids=["mamba", "mamba2"])
@pytest.mark.parametrize("name", FORMATS)
def test_each_token_is_the_plain_recurrence(
    name: str, shape: tuple[int, int, int, int]
) -> None:
    heads, width, states, groups = shape
    storage = StateFormat.parse(name)
    time = 12
    x, dt, a, b, c, skip = scan_inputs(shape, time)
    stored = torch.zeros(2, heads, 2, width, states)
    for t in range(time):
        y, after = rounded_scan(
            x[:, : t + 1],
            dt[:, : t + 1],
            a,
            b[:, : t + 1],
            c[:, : t + 1],
            storage,
            skip=skip,
        )
        current = (
            vectors[:, t].repeat_interleave(heads // groups, 1) for vectors in (b, c)
        )
        wanted, expected, lost = plain_step(
            storage,
            stored[:, :, 0],
            stored[:, :, 1],
            x[:, t],
            dt[:, t],
            a,
            *current,
            skip,
        )
        torch.testing.assert_close(y[:, t], wanted, rtol=1e-5, atol=1e-5)
        # Where a value lies between two levels, the last bit of the arithmetic decides.
        assert ((after[:, :, 0] - expected).abs() > 1e-6).float().mean() < 1e-2
        if storage.feedback:
            assert (
                (after[:, :, 1] - lost).abs() > 1e-3 * expected.abs().max()
            ).float().mean() < 1e-2
        stored[:, :, : after.shape[2]] = after


def test_bits_count_scales_and_kept_errors() -> None:
    names = ("fp16", "int8", "int4-32", "int8-head+feedback")
    bits = {name: StateFormat.parse(name).bits((4, 64, 128)) for name in names}
    assert bits == {
        "fp16": 16,
        "int8": 8.125,
        "int4-32": 4.5,
        "int8-head+feedback": 2 * (8 + 16 / 8192),
    }
    caches = {
        name: StateFormat.parse(name, KEYS).bits((4, 64))
        for name in ("int4", "q8_0", "iq4_nl", "u8", "u4-32")
    }
    assert caches == {"int4": 4.25, "q8_0": 8.5, "iq4_nl": 4.5, "u8": 9, "u4-32": 6}


def test_caches_have_the_formats_of_runtimes() -> None:
    keys = normal(2, 3, 5, 64, seed=1)
    for name in GGML:
        expected = get_format(name).roundtrip(keys.reshape(-1, 64)).reshape(keys.shape)
        assert torch.equal(StateFormat.parse(name, KEYS).rounded(keys), expected)
    low = keys.amin(-1, keepdim=True)
    high = keys.amax(-1, keepdim=True)
    levels = ((keys - low) / (high - low) * 15).round()
    torch.testing.assert_close(
        StateFormat.parse("u4", KEYS).rounded(keys), low + levels * (high - low) / 15
    )
    q8_0 = StateFormat.parse("q8_0", KEYS)
    assert (q8_0.fits((1, 48)) or "").startswith("48 numbers per head do not divide")
    assert q8_0.fits((3, 64)) is None


def test_a_row_is_cut_into_groups_of_32_only_if_that_works_out() -> None:
    groups = {"int4-32": (16, 32, 40), "int4": (16, 64, 40), "int4-head": (48, 192, 120)}
    for name, sizes in groups.items():
        storage = StateFormat.parse(name)
        assert tuple(storage.group(3, states) for states in (16, 64, 40)) == sizes, name


def test_only_the_blocks_that_are_named_are_rounded() -> None:
    blocks = [torch.nn.Linear(2, 2) for _ in range(2)]
    formats: list[StateFormat | None] = []
    for block in blocks:
        block.register_forward_hook(
            lambda *_: formats.append(running_format(STATE, 4, 1, 16))
        )
    int8 = StateFormat.parse("int8")
    with keeping(blocks, {0: {}, 1: {STATE: int8}}) as shapes:
        for block in blocks:
            block(torch.zeros(1, 2))
        assert running_format(STATE, 1) is None  # between blocks
    blocks[1](torch.zeros(1, 2))
    assert formats == [None, int8, None]
    assert shapes == {0: {STATE: (4, 1, 16)}, 1: {STATE: (4, 1, 16)}}


@pytest.mark.parametrize(
    "name", ["int5", "int8-7", "fp16-head", "int8+more", "q8_0", "u8"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match=r"for state; there are .*int8\+feedback"):
        StateFormat.parse(name)
