"""llama.cpp computes what PyTorch computes, for every architecture that is exported."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kl_lens.base.errors import TargetError
from kl_lens.run.records import Plan
from kl_lens.targets.gguf.activations import as_deployed
from kl_lens.targets.gguf.architectures import ARCHITECTURES, get_architecture
from kl_lens.targets.gguf.export import export
from kl_lens.targets.gguf.header import read_header
from kl_lens.targets.gguf.session import open_session
from kl_lens.targets.session import Session
from kl_lens.weights.formats import Quantized
from kl_lens.weights.formats.gguf_blocks import GGUFFormat
from tests.families import _COMMON, OTHERS, token_ids
from tests.targets.gguf import support
from tests.targets.gguf.support import (
    CONFIGS,
    FORMATS,
    kl,
    matrices,
    quantize_weights,
    small_mamba,
    tiny,
    torch_logits,
    uniform,
)

pytest.importorskip("gguf")

IDS = token_ids(1, 40)
SHORT = IDS.reshape(
    -1, 2
)  # prompts of two tokens: the second meets every state that the first left behind


def test_every_supported_architecture_has_a_parity_test() -> None:
    assert {CONFIGS[name]().model_type for name in CONFIGS} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_logits_equal_pytorch(name: str, tmp_path: Path) -> None:
    """F32 weights and F32 attention: whatever is left is the order of additions (logits have size 1)."""
    model = tiny(name)
    with as_deployed(model.model, {}):  # GELU from llama.cpp's table
        expected = torch_logits(model, IDS)
    artifact = export(model, uniform(model, "fp32"), tmp_path)
    with open_session(tmp_path / artifact.files[0], threads=1, exact=True) as session:
        assert isinstance(session, Session)
        found = session.logits(IDS[0].tolist())
        assert found.shape == expected.shape
        # A sum in another order, and the table's input is rounded the other way.
        table = model.config.model_type in ("gemma3_text", "gpt2")
        limit = (5e-4 if table else 2.5e-5) * max(4.0, float(np.ptp(expected)))
        assert np.abs(found - expected).max() < limit
        session.reset()
        first = session.prefill(IDS[0, :30].tolist())
        steps = np.stack([first, *(session.step(int(token)) for token in IDS[0, 30:])])
        assert np.abs(steps - expected[29:]).max() < limit
    with open_session(tmp_path / artifact.files[0], threads=1) as session:
        # llama.cpp's default: keys and values in F16, sums in F16 inside CPU flash attention.
        found = session.logits(IDS[0].tolist())
    attention = any("attn_q" in tensor.runtime_name for tensor in artifact.tensors)
    assert np.abs(found - expected).max() < (2e-2 if attention else 1e-4) * max(
        1.0, limit / 1e-4
    )
    assert (found.argmax(-1) == expected.argmax(-1)).mean() >= 0.95


def test_falcon_mamba_with_its_usual_two_epsilons_differs_a_little_and_says_so(
    tmp_path: Path,
) -> None:
    model = tiny(
        transformers.FalconMambaConfig(
            **_COMMON, num_hidden_layers=3, state_size=8, time_step_rank=5
        )
    )
    artifact = export(model, uniform(model, "fp32"), tmp_path)
    assert "epsilon 1e-05" in artifact.settings["notes"][0]
    with open_session(tmp_path / artifact.files[0], threads=1) as session:
        found = session.logits(IDS[0].tolist())
    difference = np.abs(found - torch_logits(model, IDS)).max()
    assert 1e-4 < difference < 1e-2


def test_heads_that_change_places_keep_their_bytes(tmp_path: Path) -> None:
    """Qwen3.5 with two value heads to a key head: llama.cpp has the columns of out_proj in another order."""
    model = tiny("qwen3_5_text, two value heads to a key head")
    artifact = export(model, uniform(model, "q4_k"), tmp_path)
    formats = {
        t.component: t.realised
        for t in artifact.tensors
        if t.component.endswith("out_proj")
    }
    assert set(formats.values()) == {"q5_0"}, "blocks of 256 are longer than a head"
    assert "longer than a head (32 columns)" in artifact.settings["notes"][0]
    with open_session(tmp_path / artifact.files[0], threads=1, exact=True) as session:
        short = _short_prompts(session)
    with as_deployed(model.model, quantize_weights(model, artifact)):
        expected = torch_logits(model, SHORT)
    assert _equal(short, expected, 1e-3) >= 0.75


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("mamba", "q8_0"),
        ("jamba", "fp16"),
        ("jamba with experts", "q8_0"),
        ("granitemoehybrid", "q4_0"),
        ("nemotron_h with experts", "q4_0"),
    ],
)
def test_quantized_logits_equal_pytorch_with_the_same_weights(
    name: str, format_name: str, tmp_path: Path
) -> None:
    """The same weights, and activations rounded as llama.cpp rounds them.

    A sum in another order rounds an activation in a thousand the other way; from there on, the states carry it to
    all later tokens. So two things are asked: of many short prompts, that nearly all agree to float32; of a long one,
    that what such roundings do to the distribution is far less than what quantization does.
    """
    model = tiny(name)
    original = torch_logits(model, IDS)
    artifact = export(model, uniform(model, format_name), tmp_path)
    with open_session(tmp_path / artifact.files[0], threads=1, exact=True) as session:
        found = np.stack([session.step(int(token)) for token in IDS[0]])
        short = _short_prompts(session)
    with as_deployed(model.model, quantize_weights(model, artifact)):
        expected = torch_logits(model, IDS)
        expected_short = torch_logits(model, SHORT)
    # Half precision rounds the other way more often, and by far less.
    assert _equal(short, expected_short, 1e-2 if format_name == "fp16" else 1e-4) >= 0.75
    assert kl(expected, found)[0] < (
        1e-6 if format_name == "fp16" else 0.1 * kl(original, found)[0]
    )


def _short_prompts(session: Session) -> np.ndarray:
    rows = []
    for prompt in SHORT.tolist():
        session.reset()
        rows += [session.step(token) for token in prompt]
    return np.stack(rows)


def _equal(found: np.ndarray, expected: np.ndarray, within: float = 1e-4) -> float:
    """The share of tokens whose logits (of size 1) agree; but for the order of additions, if nothing else is said."""
    return float((np.abs(found - expected).max(-1) < within).mean())


@pytest.mark.parametrize("format_name", ["fp16", "q4_0"])
def test_falcon_h1_with_its_factors_inside_the_weights(
    format_name: str, tmp_path: Path
) -> None:
    """Scaled weights have their scales rounded elsewhere, so logits agree only as well as the format is fine."""
    model = tiny("falcon_h1")
    original = torch_logits(model, IDS)
    artifact = export(model, uniform(model, format_name), tmp_path)
    with open_session(tmp_path / artifact.files[0], threads=1, exact=True) as session:
        found = session.logits(IDS[0].tolist())
    with as_deployed(model.model, quantize_weights(model, artifact)):
        expected = torch_logits(model, IDS)
    assert kl(expected, found)[0] < {"fp16": 2e-6, "q4_0": 3e-4}[format_name]
    assert kl(original, found)[0] < {"fp16": 2e-6, "q4_0": 0.1}[format_name]


REFUSED = {
    "twice 64": lambda: transformers.MambaConfig(
        **_COMMON, num_hidden_layers=1, state_size=8, expand=3
    ),
    "biases": lambda: transformers.MambaConfig(
        **_COMMON, num_hidden_layers=1, state_size=8, use_bias=True
    ),
    "limits time steps": lambda: transformers.Mamba2Config(
        **_COMMON,
        num_hidden_layers=1,
        num_heads=8,
        head_dim=16,
        n_groups=1,
        time_step_limit=(0.0, 1.0),
    ),
    "gates first": lambda: CONFIGS["falcon_h1"]().__class__(
        **_COMMON, mamba_rms_norm=True, mamba_norm_before_gate=True
    ),
    "llama.cpp's granite is dense": lambda: support._granite(
        layer_types=["attention"] * 4
    ),
    "only one kind per model": lambda: support._nemotron(
        "mlp", layers_block_type=["mamba", "mlp", "attention", "moe"]
    ),
    "latent space": lambda: support._nemotron("moe", moe_latent_size=32),
    "llama.cpp has no zamba2 architecture": lambda: transformers.Zamba2Config(**_COMMON),
    "their own latent": lambda: OTHERS["kimi_linear"](q_lora_rank=8),
    "layers without experts first": lambda: OTHERS["kimi_linear"](
        mlp_layer_types=["sparse", "dense"] * 2
    ),
    "KL Lens writes GGUF files of minimax models only like another": lambda: (
        transformers.MiniMaxConfig(**_COMMON)
    ),
    "it needs none for bailing_hybrid, bamba, falcon_h1": lambda: (
        transformers.MixtralConfig(**_COMMON)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_llama_cpp_would_compute_differently_is_refused_in_one_line(
    message: str,
) -> None:
    config = REFUSED[message]()
    with pytest.raises(TargetError) as caught:
        get_architecture(config.model_type).require(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


LONG = ["iq2_s", "iq2_xs"]


@pytest.mark.parametrize(
    "types",
    [
        [name for name in FORMATS if name not in LONG],
        pytest.param(LONG, marks=pytest.mark.slow),
    ],
    ids=["most", "with long tables"],
)
def test_every_type_in_one_file(
    types: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp loads and runs them, and computes with our values and rounded activations."""

    def evenly(self: GGUFFormat, weight: torch.Tensor, name: str = "weight") -> Quantized:
        return self.quantize_with(weight, torch.ones(weight.shape[-1]))

    # Some types cannot be made without importance: let every column have the same.
    monkeypatch.setattr(GGUFFormat, "needs_importance", False)
    monkeypatch.setattr(GGUFFormat, "quantize", evenly)
    layers = -(-len(types) // 2)
    model = small_mamba(hidden_size=256, num_hidden_layers=layers)
    places = [
        f"backbone.layers.{i}.mixer.{kind}"
        for i in range(layers)
        for kind in ("in_proj", "out_proj")
    ]
    exact = dict.fromkeys(matrices(model), "fp32")
    plan = Plan("p", exact | dict(zip(places, types, strict=False)), made_by="test")
    teacher = torch_logits(model, IDS)
    artifact = export(model, plan, tmp_path)
    file = read_header(tmp_path / artifact.files[0])  # gguf's own reader lacks Q2_0
    stored = {tensor.type for tensor in file.tensors}
    assert stored == {"F32", *(name.upper() for name in types)}
    with open_session(tmp_path / artifact.files[0], threads=1) as session:
        found = session.logits(IDS[0].tolist())
    formats = quantize_weights(model, artifact)
    with as_deployed(model.model, formats):
        expected = torch_logits(model, IDS)
    assert kl(expected, found)[0] < 0.01 * kl(teacher, found)[0]
