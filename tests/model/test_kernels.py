"""The fast kernels against the plain recurrences beside them, in double precision where that can be had."""

from __future__ import annotations

import functools

import pytest
import torch

from kl_lens.model import Chain
from kl_lens.model.kernels import attention, fast_kernels, swap
from kl_lens.model.kernels.chunked_scan import chunked_scan
from kl_lens.model.kernels.convolution import causal_convolution
from kl_lens.model.kernels.head_scan import head_scan
from kl_lens.model.kernels.selective_scan import selective_scan
from tests.families import CONFIGS, tiny_model, token_ids
from tests.planted import growing, larger


def selective_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence as written above, in the dtype of its inputs: what `selective_scan` is tested against."""
    batch, time, channels = x.shape
    h = x.new_zeros(batch, channels, a.shape[1]) if initial_state is None else initial_state
    outputs = []
    for t in range(time):
        step = dt[:, t, :, None]
        h = torch.exp(step * a) * h + step * x[:, t, :, None] * b[:, t, None, :]
        outputs.append((h * c[:, t, None, :]).sum(-1))
    return torch.stack(outputs, 1), h


def causal_convolution_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, with_silu: bool = False
) -> torch.Tensor:
    """The same by torch's grouped convolution."""
    width = weight.shape[-1]
    y = torch.nn.functional.conv1d(
        x.transpose(1, 2), weight[:, None], bias, padding=width - 1, groups=x.shape[-1]
    )
    y = y[..., : x.shape[1]].transpose(1, 2)
    return torch.nn.functional.silu(y) if with_silu else y


def recurrence(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, token by token: what the scans in chunks and by heads must give."""
    batch, time, heads, width = x.shape
    groups, states = b.shape[2:]
    b = b.repeat_interleave(heads // groups, 2)
    c = c.repeat_interleave(heads // groups, 2)
    h = x.new_zeros(batch, heads, width, states) if initial_state is None else initial_state
    outputs = []
    for t in range(time):
        decay = torch.exp(dt[:, t] * a)[..., None, None]
        h = decay * h + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
        outputs.append((h * c[:, t, :, None, :]).sum(-1))
    return torch.stack(outputs, 1), h


def _mamba1_inputs(batch: int, time: int, channels: int, states: int, step: float = -2.0):
    generator = torch.Generator().manual_seed(batch * time + channels)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    a = -torch.exp(
        torch.log(torch.arange(1, states + 1.0)).repeat(channels, 1) + 0.1 * normal(channels, states)
    )
    dt = torch.nn.functional.softplus(normal(batch, time, channels) + step)
    return normal(batch, time, channels), dt, a, normal(batch, time, states), normal(batch, time, states)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 7, 3, 4), (3, 65, 129, 16), (1, 300, 256, 5)])
def test_selective_scan_equals_the_recurrence(shape: tuple[int, int, int, int]) -> None:
    inputs = _mamba1_inputs(*shape)
    y, state = selective_scan(*inputs)
    expected, last = selective_scan_reference(*(t.double() for t in inputs))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(state.double(), last, rtol=1e-5, atol=1e-5 * float(last.abs().max()))


@pytest.mark.parametrize("step", [-12.0, 8.0])
def test_selective_scan_holds_at_tiny_and_at_huge_time_steps(step: float) -> None:
    """Huge steps make exp underflow: the state is forgotten at once, and must not become NaN."""
    inputs = _mamba1_inputs(2, 33, 64, 16, step)
    y, _ = selective_scan(*inputs)
    expected, _ = selective_scan_reference(*(t.double() for t in inputs))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_selective_scan_goes_on_from_a_state() -> None:
    x, dt, a, b, c = _mamba1_inputs(2, 40, 24, 8)
    whole, last = selective_scan(x, dt, a, b, c)
    first, middle = selective_scan(x[:, :13], dt[:, :13], a, b[:, :13], c[:, :13])
    second, end = selective_scan(x[:, 13:], dt[:, 13:], a, b[:, 13:], c[:, 13:], middle)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(end, last)


def _mamba2_inputs(batch: int, time: int, heads: int, width: int, groups: int, states: int):
    generator = torch.Generator().manual_seed(time + heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    dt = torch.nn.functional.softplus(normal(batch, time, heads) - 2)
    a = -torch.arange(1, heads + 1, dtype=torch.float64)
    b, c = normal(batch, time, groups, states), normal(batch, time, groups, states)
    return normal(batch, time, heads, width), dt, a, b, c


@pytest.mark.parametrize("time", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("chunk", [16, 64])
def test_chunked_scan_equals_the_recurrence(time: int, groups: int, chunk: int) -> None:
    inputs = _mamba2_inputs(2, time, 4, 8, groups, 6)
    start = torch.randn(2, 4, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for state in (None, start):
        y, last = chunked_scan(*inputs, initial_state=state, chunk=chunk)
        expected, expected_last = recurrence(*inputs, initial_state=state)
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(last, expected_last, rtol=1e-10, atol=1e-10)


def test_chunked_scan_in_float32_does_not_overflow_at_strong_decay() -> None:
    x, dt, a, b, c = (t.float() for t in _mamba2_inputs(1, 128, 4, 8, 1, 6))
    y, _ = chunked_scan(x, dt + 20, a * 50, b, c)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize(
    "shape", [(2, 1, 4, 8, 1, 6), (2, 65, 4, 8, 2, 5), (1, 70, 3, 50, 1, 16), (1, 33, 6, 64, 2, 7)]
)
def test_head_scan_equals_the_recurrence(shape: tuple[int, ...]) -> None:
    """Heads that straddle two blocks of channels, groups, states that are no multiple of four."""
    batch, _, heads, width, _, states = shape
    x, dt, a, b, c = _mamba2_inputs(*shape)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(batch, heads, width, states, dtype=torch.float64, generator=generator)
    skip = torch.randn(heads, dtype=torch.float64, generator=generator)
    for state in (None, start):
        y, last = head_scan(x, dt, a, b, c, state, skip=skip)
        expected, expected_last = recurrence(x, dt, a, b, c, initial_state=state)
        expected = expected + skip[:, None] * x
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(last.double(), expected_last, rtol=1e-5, atol=1e-5)


def test_head_scan_holds_at_strong_decay() -> None:
    x, dt, a, b, c = _mamba2_inputs(1, 128, 4, 8, 1, 6)
    y, _ = head_scan(x, dt + 20, a * 50, b, c)
    expected, _ = recurrence(x, dt + 20, a * 50, b, c)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_what_stands_around_the_scan_can_be_done_on_the_way() -> None:
    x, _, a, b, c = _mamba1_inputs(2, 33, 40, 7)
    generator = torch.Generator().manual_seed(5)
    raw, gate = (6 * torch.randn(2, 33, 40, generator=generator) for _ in range(2))
    bias, skip = (torch.randn(40, generator=generator) for _ in range(2))
    y, _ = selective_scan(x, raw, a, b, c, dt_bias=bias, dt_softplus=True, skip=skip, gate=gate)
    step = torch.nn.functional.softplus((raw + bias).double())
    expected, _ = selective_scan_reference(*(t.double() for t in (x, step, a, b, c)))
    expected = (expected + skip.double() * x.double()) * torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("with_silu", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_equals_torchs(bias: bool, with_silu: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 37, generator=generator)
    weight = torch.randn(37, 4, generator=generator)
    offset = torch.randn(37, generator=generator) if bias else None
    ours = causal_convolution(x, weight, offset, with_silu=with_silu)
    torch.testing.assert_close(ours, causal_convolution_reference(x, weight, offset, with_silu=with_silu))


@pytest.mark.parametrize(
    "shape",  # batch, heads, shared heads, time, width, width of the values
    [
        (1, 1, 1, 1, 4, 4),
        (2, 4, 2, 17, 8, 8),
        (1, 6, 2, 130, 40, 24),
        (2, 2, 2, 64, 64, 64),
        (1, 2, 1, 200, 66, 130),
    ],
)
def test_attention_equals_torchs_in_double_precision(shape: tuple[int, ...]) -> None:
    batch, heads, shared, time, width, value_width = shape
    generator = torch.Generator().manual_seed(time)
    query = 3 * torch.randn(batch, time, heads, width, generator=generator).transpose(1, 2)
    key = torch.randn(batch, shared, time, width, generator=generator)
    value = torch.randn(batch, shared, time, value_width, generator=generator)
    ours = attention.causal_attention(query, key, value, scale=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(),
        key.double().repeat_interleave(heads // shared, 1),
        value.double().repeat_interleave(heads // shared, 1),
        is_causal=True,
        scale=0.3,
    )
    torch.testing.assert_close(ours.double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_attention_with_one_overwhelming_score_is_not_lost() -> None:
    query, key = torch.full((1, 1, 20, 4), 50.0), torch.zeros(1, 1, 20, 4)
    key[0, 0, 3] = 50.0
    value = torch.arange(20.0)[None, None, :, None].expand(1, 1, 20, 4)
    found = attention.causal_attention(query, key, value)[0, :, 0, 0]
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5, 1.0] + [3.0] * 17))


@pytest.mark.parametrize("family", ["falcon_h1", "zamba2", "jamba", "llama"])
def test_models_with_our_attention_give_the_same_logits(family: str, monkeypatch) -> None:
    monkeypatch.setattr(attention, "SHORTEST", 2)
    monkeypatch.setattr(attention.platform, "machine", lambda: "aarch64")
    calls = []
    ours = attention.causal_attention
    monkeypatch.setattr(
        "kl_lens.model.kernels.swap.causal_attention", lambda *given: calls.append(1) or ours(*given)
    )
    model, ids = tiny_model(family), token_ids(2, 40)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        with fast_kernels(model):
            found = model(ids, use_cache=False).logits
    assert calls
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_padding_and_masks_are_left_to_the_library(monkeypatch) -> None:
    monkeypatch.setattr(attention, "SHORTEST", 2)
    monkeypatch.setattr(attention.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr("kl_lens.model.kernels.swap.causal_attention", None)
    model, ids = tiny_model("llama"), token_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.inference_mode():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        with fast_kernels(model):
            found = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found, expected)


def test_kernels_are_swapped_in_one_model_only_and_only_inside_the_block() -> None:
    import transformers.models.mamba.modeling_mamba as library

    original = library.mamba_selective_scan
    model, other = tiny_model("mamba"), tiny_model("mamba")
    with fast_kernels(model) as layers:
        assert layers == 4
        assert library.mamba_selective_scan is original
        assert not any("forward" in vars(module) for module in other.modules())
        with fast_kernels(model) as again:
            assert again == 0, "already swapped"
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2", "falcon_h1", "jamba"])
def test_gradients_through_our_scans_are_the_librarys(family: str) -> None:
    model = tiny_model(family).requires_grad_(True)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(token_ids(2, 70), use_cache=False).logits.square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    with fast_kernels(model):
        found = gradients()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize("broken", range(5))
def test_a_nan_that_enters_a_scan_comes_out_of_it(broken: int) -> None:
    """A broken weight must show in the logits, not be computed away."""
    inputs = _mamba1_inputs(2, 33, 64, 16)
    inputs[broken].view(-1)[-1] = float("nan")
    assert selective_scan(*inputs)[0].isnan().any()
    inputs = tuple(t.float() for t in _mamba2_inputs(2, 33, 4, 16, 1, 8))
    inputs[broken].view(-1)[-1] = float("nan")
    assert head_scan(*inputs)[0].isnan().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "parameter", ["A_log", "dt_proj.weight", "dt_proj.bias", "conv1d.weight", "conv1d.bias"]
)
def test_a_broken_weight_of_a_mixer_shows_in_the_logits(parameter: str, value: float) -> None:
    model, ids = tiny_model("mamba"), token_ids(2, 40)
    with torch.inference_mode():
        model.get_parameter(f"backbone.layers.1.mixer.{parameter}").view(-1)[0] = value
        expected = model(ids, use_cache=False).logits.isfinite().all()
        with fast_kernels(model):
            found = model(ids, use_cache=False).logits.isfinite().all()
    assert bool(found) == bool(expected)


def test_a_nan_in_attention_and_convolution_comes_out() -> None:
    query, key, value = torch.randn(3, 1, 2, 40, 16).unbind()
    query[0, 0, 5, 3] = float("nan")
    assert attention.causal_attention(query, key, value, 0.25).isnan().any()
    assert causal_convolution(query[0], torch.randn(16, 4), None, with_silu=True).isnan().any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(2, 7, 3, 4), (3, 65, 129, 16)])
def test_the_gpus_scan_equals_the_recurrence(shape: tuple[int, int, int, int]) -> None:
    from kl_lens.model.kernels.triton_scan import selective_scan_gpu

    inputs = _mamba1_inputs(*shape)
    start = torch.randn(shape[0], shape[2], shape[3], generator=torch.Generator().manual_seed(1))
    y, state = selective_scan_gpu(*(t.cuda() for t in inputs), start.cuda())
    expected, last = selective_scan_reference(*(t.double() for t in inputs), start.double())
    torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(state.cpu().double(), last, rtol=1e-5, atol=1e-5 * float(last.abs().max()))


# -- checked before they are used ---------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.001, 1.0001])
@pytest.mark.parametrize(
    ("place", "family", "plant", "gradients"),
    [
        ("selective_scan", "mamba", growing, False),
        ("selective_scan", "hymba", growing, False),
        ("head_scan", "mamba2", growing, False),
        ("head_scan", "falcon_h1", growing, False),
        ("causal_convolution", "mamba", larger, False),
        ("causal_convolution", "mamba2", larger, False),
        ("causal_attention", "llama", larger, False),
        ("tracked_scan", "mamba", growing, True),
        ("chunked_scan", "mamba2", growing, True),
    ],
)
def test_a_kernel_that_is_wrong_is_found_named_and_not_used(
    place: str, family: str, plant, gradients: bool, factor: float, monkeypatch
) -> None:
    monkeypatch.setattr(attention.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(swap, place, plant(getattr(swap, place), factor))
    said: list[str] = []
    model, ids = tiny_model(family), token_ids(2, 140)
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
    chain = Chain(model, warn=said.append)
    with chain.kernels(gradients=gradients):
        assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(chain.full_logits(ids), expected)
    (line,) = said
    assert line.startswith(chain.fault)
    assert "rounding allows 5" in line
    assert "\n" not in line


def test_a_wrong_gradient_is_found(monkeypatch) -> None:
    class Wrong(torch.autograd.Function):
        forward = staticmethod(lambda _, x: x.clone())
        backward = staticmethod(lambda _, gradient: 1.001 * gradient)

    sound = swap.tracked_scan
    monkeypatch.setattr(
        swap, "tracked_scan", lambda x, *more, **options: sound(Wrong.apply(x), *more, **options)
    )
    said: list[str] = []
    chain = Chain(tiny_model("mamba"), warn=said.append)
    assert chain.uses_kernels()
    assert not chain.uses_kernels(gradients=True)
    assert "Mamba-1 scan (gradients)" in said[0]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in (*CONFIGS, "zamba", "hymba", "mamba2_groups")),
        *((family, torch.float16) for family in ("mamba", "mamba2", "hymba")),
        *((family, torch.bfloat16) for family in ("mamba", "mamba2", "llama")),
    ],
)
def test_right_kernels_are_used_in_every_precision(family: str, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(attention.platform, "machine", lambda: "aarch64")
    chain = Chain(tiny_model(family).to(dtype), warn=pytest.fail)
    assert chain.uses_kernels()
    assert chain.uses_kernels(gradients=True)
    found = chain.compared_kernels()
    if dtype == torch.float32:
        assert all(each.error < each.limit / 5 for each in found), "far from the limit"


def test_what_is_wrong_around_the_kernels_shows_in_the_logits(monkeypatch) -> None:
    """A library whose mixers do something that our copies of them do not, for example by a decorator."""
    model, said = tiny_model("mamba"), []
    mixer = type(model.backbone.layers[0].mixer)
    sound = mixer.forward

    @functools.wraps(sound)
    def decorated(*given, **options):
        return 1.05 * sound(*given, **options)

    monkeypatch.setattr(mixer, "forward", decorated)
    assert not Chain(model, warn=said.append).uses_kernels()
    assert "all layers together" in said[0]


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_double_precision_is_computed_in_double_precision(family: str, monkeypatch) -> None:
    """By the library's code, which converts to float32 by name; there and back, nothing is lost."""
    inputs = _mamba1_inputs(1, 70, 12, 4) if family == "mamba" else _mamba2_inputs(1, 70, 4, 8, 2, 6)
    x, dt, a, b, c = (t.double() for t in inputs)
    if family == "mamba":
        from transformers.models.mamba.modeling_mamba import mamba_selective_scan as library

        scan = swap.REPLACEMENTS["mamba_selective_scan"](library)
        found = scan(*(t.transpose(1, 2) for t in (x, dt)), a, *(t.transpose(1, 2) for t in (b, c)))
        found, (expected, _) = found.transpose(1, 2), selective_scan_reference(x, dt, a, b, c)
    else:
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan as library

        found = swap.REPLACEMENTS["mamba2_chunk_scan"](library)(x, dt, a, b, c, 16)
        expected, _ = recurrence(x, dt, a, b, c)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for name in ("selective_scan", "head_scan", "causal_convolution"):
        monkeypatch.setattr(swap, name, None)  # float32, and not called
    Chain(tiny_model(family).double()).full_logits(token_ids(1, 40))
