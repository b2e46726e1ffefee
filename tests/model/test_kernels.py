"""The fast kernels against the plain recurrence in double precision; and only right ones are used."""

import functools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kl_lens.model import Chain
from kl_lens.model.kernels import swap
from kl_lens.model.kernels.chunked_scan import chunked_scan
from kl_lens.model.kernels.head_scan import head_scan
from kl_lens.model.kernels.selective_scan import causal_convolution, selective_scan
from tests.families import CONFIGS, slow, tiny_model, token_ids
from tests.planted import growing, larger


def recurrence(x, dt, a, b, c):
    """Token by token, in double precision. x, dt: (batch, time, channels); a: (channels, states); b, c: (batch, time,
    states), or (batch, time, channels, states)."""
    x, dt, a, b, c = (tensor.double() for tensor in (x, dt, a, b, c))
    b, c = (tensor[:, :, None] if tensor.dim() == 3 else tensor for tensor in (b, c))
    h = x.new_zeros(len(x), *a.shape)
    outputs = []
    for t in range(x.shape[1]):
        h = (
            torch.exp(dt[:, t, :, None] * a) * h
            + (dt[:, t] * x[:, t])[..., None] * b[:, t]
        )
        outputs.append((h * c[:, t]).sum(-1))
    return torch.stack(outputs, 1)


def recurrence2(x, dt, a, b, c):
    """The same with the shapes of Mamba-2: heads that share a decay, groups that share b and c."""
    heads, width, states = *x.shape[2:], b.shape[3]
    b, c = (tensor.repeat_interleave(heads * width // b.shape[2], 2) for tensor in (b, c))
    dt = dt.repeat_interleave(width, 2)
    rates = a.repeat_interleave(width)[:, None].expand(-1, states)
    return recurrence(x.flatten(2), dt, rates, b, c).unflatten(2, (heads, width))


def _mamba1(batch: int, time: int, channels: int, states: int, step: float = -2.0):
    """x, dt, a, b, c."""
    torch.manual_seed(batch * time + channels)
    a = -torch.exp(
        torch.arange(1, states + 1.0).log().repeat(channels, 1)
        + 0.1 * torch.randn(channels, states)
    )
    dt = functional.softplus(torch.randn(batch, time, channels) + step)
    b, c = torch.randn(2, batch, time, states)
    return torch.randn(batch, time, channels), dt, a, b, c


def _mamba2(
    batch: int,
    time: int,
    heads: int,
    width: int,
    groups: int,
    states: int,
    strength: float = 1,
):
    torch.manual_seed(time + heads)
    dt = functional.softplus(torch.randn(batch, time, heads) - 2) + strength - 1
    b, c = torch.randn(2, batch, time, groups, states)
    return (
        torch.randn(batch, time, heads, width),
        dt,
        -strength * torch.arange(1.0, heads + 1),
        b,
        c,
    )


def _equal(result: Tensor, right: Tensor, rounding: float = 1e-5) -> None:
    largest = max(1.0, float(right.abs().max()))
    torch.testing.assert_close(
        result.double(), right, rtol=rounding, atol=rounding * largest
    )


@pytest.mark.parametrize(
    "shape",  # the last of them: exp underflows, and the state is forgotten at once
    [
        (1, 1, 1, 1),
        (2, 7, 3, 4),
        (3, 65, 129, 16),
        (1, 300, 256, 5),
        (2, 33, 64, 16, -12.0),
        (2, 33, 64, 16, 8.0),
    ],
)
def test_selective_scan_equals_the_recurrence(shape: tuple[int, ...]) -> None:
    inputs = _mamba1(*shape)
    _equal(selective_scan(*inputs), recurrence(*inputs))


@pytest.mark.parametrize(
    "shape",  # heads that straddle two blocks of channels, groups, states that are no multiple of four, strong decay
    [
        (2, 1, 4, 8, 1, 6),
        (2, 65, 4, 8, 2, 5),
        (1, 70, 3, 50, 1, 16),
        (1, 200, 6, 64, 2, 7),
        (1, 128, 4, 8, 1, 6, 50),
    ],
)
@pytest.mark.parametrize("scan", [head_scan, chunked_scan])
def test_scans_of_mamba2_equal_the_recurrence(scan, shape: tuple[int, ...]) -> None:
    inputs = _mamba2(*shape)
    if scan is chunked_scan:  # in the precision of its inputs
        inputs = tuple(tensor.double() for tensor in inputs)
    _equal(scan(*inputs), recurrence2(*inputs), 1e-5 if scan is head_scan else 1e-10)


def test_what_stands_around_a_scan_is_done_on_the_way() -> None:
    x, _, a, b, c = _mamba1(2, 33, 40, 7)
    raw, gate, (bias, skip) = *(6 * torch.randn(2, 2, 33, 40)), torch.randn(2, 40)
    y = selective_scan(
        x, raw, a, b, c, dt_bias=bias, dt_softplus=True, skip=skip, gate=gate
    )
    expected = recurrence(x, functional.softplus((raw + bias).double()), a, b, c)
    _equal(y, (expected + skip * x) * functional.silu(gate.double()))
    inputs = _mamba2(1, 33, 4, 8, 1, 6)
    _equal(
        head_scan(*inputs, skip=bias[:4]),
        recurrence2(*inputs) + bias[:4, None] * inputs[0],
    )


@pytest.mark.parametrize("with_silu", [True, False])
@pytest.mark.parametrize("bias", [torch.linspace(-1, 1, 37), None])
def test_convolution_equals_torchs(bias: Tensor | None, with_silu: bool) -> None:
    x = torch.randn(2, 9, 37)
    weight = torch.randn(37, 4)
    expected = functional.conv1d(
        x.transpose(1, 2), weight[:, None], bias, padding=3, groups=37
    )[..., :9]
    expected = (functional.silu(expected) if with_silu else expected).transpose(1, 2)
    torch.testing.assert_close(
        causal_convolution(x, weight, bias, with_silu=with_silu), expected
    )


def test_a_nan_that_enters_a_kernel_comes_out_of_it() -> None:
    """A broken weight must show in the logits, not be computed away."""
    for scan, sound in (
        (selective_scan, _mamba1(2, 33, 64, 16)),
        (head_scan, _mamba2(2, 33, 4, 16, 1, 8)),
    ):
        for broken in range(5):
            inputs = [tensor.clone() for tensor in sound]
            inputs[broken].view(-1)[-1] = float("nan")
            assert scan(*inputs).isnan().any()
    x = torch.randn(2, 40, 16)
    x[0, 5, 3] = float("nan")
    convolved = causal_convolution(x, torch.randn(16, 4), None, with_silu=True)
    assert convolved.isnan().any()


# -- checked before they are used ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "family", "plant", "gradients"),
    [
        ("selective_scan", "mamba", growing, False),
        ("head_scan", "mamba2", growing, False),
        ("causal_convolution", "mamba2", larger, False),
        ("tracked_scan", "mamba", growing, True),
        ("chunked_scan", "mamba2", growing, True),
    ],
)
def test_a_kernel_that_is_wrong_is_found_named_and_not_used(
    kernel: str, family: str, plant, gradients: bool, monkeypatch
) -> None:
    monkeypatch.setattr(swap, kernel, plant(getattr(swap, kernel), 1.0001))
    warnings: list[str] = []
    model = tiny_model(family)
    ids = token_ids(2, 140)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
    chain = Chain(model, warn=warnings.append)
    with chain.kernels(gradients=gradients):
        assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(chain.full_logits(ids), expected)
    (line,) = warnings
    assert line.startswith(chain.fault)
    assert "rounding allows 5" in line
    assert "\n" not in line


_WINDOW = torch.randn(1, 8, 5)  # (batch, channels, time)
_VECTORS = torch.randn(1, 5, 1, 4)
_HEADS = (
    torch.randn(1, 5, 2, 4),
    torch.rand(1, 5, 2),
    -torch.rand(2),
    _VECTORS,
    _VECTORS,
)
_CHANNELS = (_WINDOW, _WINDOW, -torch.rand(8, 4), _WINDOW[:, :4], _WINDOW[:, :4])


@pytest.mark.parametrize(
    ("kernel", "arguments", "options"),
    [
        ("mamba_selective_scan", _CHANNELS, {"return_last_state": True}),
        ("mamba_selective_scan", tuple(t.to("meta") for t in _CHANNELS), {}),
        ("mamba2_chunk_scan", (*_HEADS, 4), {"return_final_states": True}),
        ("mamba2_chunk_scan", (*_HEADS, 4), {"initial_states": _VECTORS}),
        ("causal_conv1d_fn", (_WINDOW, torch.randn(8, 4)), {"activation": "gelu"}),
        ("causal_conv1d_fn", (_WINDOW, torch.randn(8, 4)), {"seq_idx": torch.zeros(1)}),
        ("causal_conv1d_fn", (_WINDOW.to("meta"), torch.randn(8, 4)), {}),
        ("causal_conv1d_fn", (_WINDOW, torch.randn(8, 4, requires_grad=True)), {}),
    ],
)
def test_what_our_kernels_do_not_compute_the_library_gets_unchanged(
    kernel: str, arguments: tuple, options: dict
) -> None:
    calls = []

    def library(*args, **kwargs):
        calls.append((args, kwargs))
        return "computed by the library"

    assert swap.REPLACEMENTS[kernel](library)(*arguments, **options) == library()
    assert calls[0] == (arguments, options)
    assert len(calls) == 2


def test_a_wrong_gradient_is_found(monkeypatch) -> None:
    class Wrong(torch.autograd.Function):
        forward = staticmethod(lambda _, x: x.clone())
        backward = staticmethod(lambda _, gradient: 1.001 * gradient)

    sound = swap.tracked_scan
    monkeypatch.setattr(
        swap,
        "tracked_scan",
        lambda x, *more, **options: sound(Wrong.apply(x), *more, **options),
    )
    warnings: list[str] = []
    chain = Chain(tiny_model("mamba"), warn=warnings.append)
    assert chain.uses_kernels()
    assert not chain.uses_kernels(gradients=True)
    assert "Mamba-1 scan (gradients)" in warnings[0]


QUICK = ("mamba", "mamba2", "jamba_experts", "mamba2_groups")
SLOW = [
    *(
        (f, torch.float32)
        for f in ("zamba", "hymba", *sorted(CONFIGS.keys() - set(QUICK)))
    )
]
SLOW += [(family, torch.float16) for family in ("mamba", "mamba2", "hymba")] + [
    ("llama", torch.bfloat16)
]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in QUICK),
        ("mamba2", torch.bfloat16),
        *(slow(*case) for case in SLOW),
    ],
)
def test_right_kernels_are_found_right_in_every_precision(
    family: str, dtype: torch.dtype
) -> None:
    chain = Chain(tiny_model(family).to(dtype))
    comparisons = chain.compared_kernels()
    assert comparisons
    assert all(
        comparison.holds
        for comparison in (*comparisons, *chain.compared_kernels(gradients=True))
    )
    if dtype == torch.float32:
        assert all(
            comparison.error < comparison.limit / 5 for comparison in comparisons
        ), "far from the limit"


def test_what_is_wrong_around_the_kernels_shows_in_the_logits(monkeypatch) -> None:
    """A library whose mixers do something that our copies of them do not, for example by a decorator."""
    model = tiny_model("mamba")
    warnings = []
    mixer = type(model.backbone.layers[0].mixer)
    sound = mixer.forward

    @functools.wraps(sound)
    def decorated(*args, **options):
        return 1.05 * sound(*args, **options)

    monkeypatch.setattr(mixer, "forward", decorated)
    assert not Chain(model, warn=warnings.append).uses_kernels()
    assert "all layers together" in warnings[0]
