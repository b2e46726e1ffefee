"""Folders for mlx-lm, opened by `mlx_lm` itself; weights bit for bit, logits as in PyTorch, or refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from kl_lens.base.errors import CheckpointError, TargetError, UnsupportedError
from kl_lens.base.files import reference_path
from kl_lens.cli.main import main
from kl_lens.model import LoadedModel, load
from kl_lens.run.records import Plan
from kl_lens.targets import (
    SessionSettings,
    describe_target,
    export,
    get_target,
    open_session,
    read_artifact,
)
from kl_lens.targets.registry import target_of
from kl_lens.weights.recipes import FP16, Recipe
from tests.families import (
    CONFIGS,
    fed,
    in_turn,
    plain,
    tiny_model,
    token_ids,
    with_stored_weights,
)

mx = pytest.importorskip("mlx.core", reason="needs the extra mlx")

FORMATS = (
    "affine4-g32",
    "affine8-g64",
    "affine3-g32",
    "affine5-g32",
    "affine2-g32",
    "affine6-g32",
    FP16,
)
SLOW = (
    "falcon_mamba",
    "mamba2",
    "jamba",
    "nemotron_h",
    "lfm2",
    "lfm2_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "recurrent_gemma",
    "gemma3_text",
    "gpt_neox",
)


def _rows(values: torch.Tensor) -> set[bytes]:
    return {row.tobytes() for row in values.flatten(0, -2).numpy()}


@pytest.mark.parametrize(
    "family",
    [
        "mamba",
        "granitemoehybrid",
        *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW),
    ],
)
def test_a_family_as_mlx_lm_opens_it(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = tiny_model(family)
    # What is not quantized is float16 in the file.
    for name, parameter in net.named_parameters():
        # Qwen's norms are, too, after mlx-lm added 1 to them.
        parameter.data.copy_(
            (parameter * 512).round() / 512 if "norm" in name else parameter.half()
        )
    model = plain(LoadedModel(family, Path(), net, None))
    plan = in_turn(model, FORMATS)
    artifact = export(model, plan, "mlx", tmp_path)
    target = get_target("mlx")
    assert artifact.realised_bytes == target.file_bytes(model, plan)
    parts = target.dissect(tmp_path).parts(model)
    stored = {part.name: part.tensor for part in parts}
    assert all(part.constant is None for part in parts if "norm" in part.name)
    quantized = [t for t in artifact.tensors if t.realised.startswith("affine")]
    assert len(quantized) >= 4
    for tensor in quantized:
        apart = stored[tensor.runtime_name]
        assert apart is not None
        assert (apart.format, apart.bytes) == (tensor.realised, tensor.bytes)
        values = model.weights.values(tensor.component, Recipe(tensor.realised))
        # A matrix may be a part of its component: rows of a gate above those of the matrix beside it.
        assert _rows(apart.read()) <= _rows(values)
    ids = token_ids(1, 24)
    with torch.no_grad():
        with_stored_weights(model, artifact)
        expected = model.chain.full_logits(ids)[0].numpy()
    tokens = ids[0].tolist()
    with target.open(tmp_path, SessionSettings()) as session:
        whole = session.logits(tokens)
        approximate = family == "gpt_neox"  # mlx-lm computes its GELU with tanh
        np.testing.assert_allclose(whole, expected, atol=1e-3 if approximate else 2e-4)
        steps = fed(session, ids, 10, *[1] * 14)
        np.testing.assert_allclose(steps, whole[9:], atol=1e-4)
        monkeypatch.setattr("kl_lens.targets.mlx.session.BATCH", 7)
        np.testing.assert_allclose(session.logits(tokens), whole, atol=1e-4)
        np.testing.assert_allclose(fed(session, ids, 24), whole[-1:], atol=1e-4)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (
            "mamba2_groups",
            "computes something else than PyTorch",
        ),  # its norm ignores groups
        # It normalises the weights of chosen experts.
        ("jamba_experts", "computes something else than PyTorch"),
        ("zamba2", "Model type zamba2 not supported"),
    ],
)
def test_what_mlx_lm_computes_otherwise_is_refused(
    family: str, reason: str, tmp_path: Path
) -> None:
    model = plain(LoadedModel(family, Path(), tiny_model(family), None))
    with pytest.raises(UnsupportedError, match=reason):
        export(model, Plan("p", {}, "test"), "mlx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


ROTARY = {"rope_theta": 500.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("kind", "scaled"), [("default", False), ("linear", True), ("llama3", True)]
)
def test_rotary_settings_stand_where_mlx_lm_looks(kind: str, scaled: bool) -> None:
    from kl_lens.targets.mlx.layout import configuration_of

    net = tiny_model("llama")
    rotary = {"rope_type": kind, "factor": 2.0, **ROTARY}
    net.config.rope_parameters = rotary
    net.config.tie_word_embeddings = True
    config = configuration_of(LoadedModel("llama", Path(), net, None))
    assert ROTARY.items() <= config.items()
    assert config.get("rope_scaling") == (rotary if scaled else None)
    assert config["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("rhythm", "interval"),
    [("lflf", 2), ("lllf", 4), ("ff", 1), ("lfl", 2), ("", None), ("ll", 0), ("lff", 0)],
)
def test_attention_in_every_nth_layer(rhythm: str, interval: int | None) -> None:
    from kl_lens.targets.mlx.layout import _interval

    names = {"l": "linear_attention", "f": "full_attention"}
    config = {"layer_types": [names[letter] for letter in rhythm]}
    if interval == 0:
        with pytest.raises(UnsupportedError, match="attention in every n-th layer"):
            _interval(config)
    else:
        expected = {} if interval is None else {"full_attention_interval": interval}
        assert _interval(config) == expected


@pytest.fixture(scope="module")
def hybrid() -> LoadedModel:
    return plain(load("reference:hybrid"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("4bit", {"q_bits": 4}),
        ("mixed_3_6", {"quant_predicate": "mixed_3_6", "q_group_size": 64}),
    ],
)
def test_stock_recipes_are_what_mlx_lm_converts_to(
    name: str, settings: dict[str, Any], hybrid: LoadedModel, tmp_path: Path
) -> None:
    import mlx_lm

    target = get_target("mlx")
    stock = {recipe.name: recipe for recipe in target.stock_recipes(hybrid)}[name]
    export(hybrid, Plan(name, dict(stock.assignment), "test"), "mlx", tmp_path / "ours")
    original = tmp_path / "theirs"
    mlx_lm.convert(
        str(reference_path("hybrid")),
        str(original),
        quantize=True,
        dtype="float16",
        **settings,
    )
    exported_arrays, converted = (
        mx.load(str(tmp_path / side / "model.safetensors")) for side in ("ours", "theirs")
    )
    assert set(exported_arrays) == set(converted)
    for tensor, array in exported_arrays.items():
        assert array.dtype == converted[tensor].dtype
        assert bool(mx.array_equal(array, converted[tensor])), tensor
    _, tokenizer = mlx_lm.load(str(tmp_path / "ours"))
    assert (
        tokenizer.decode(tokenizer.encode("The history of the city"))
        == "The history of the city"
    )
    # What mlx-lm made is opened by its file, without a record of ours. Its config.json is the checkpoint's, in which
    # mlx-lm 0.32.2 does not find the base of the rotary embedding (rope_parameters): it silently takes another one.
    file = original / "model.safetensors"
    assert target_of(file) is target
    assert not target.is_all_floating(file)
    with open_session(file) as foreign, open_session(tmp_path / "ours") as session:
        np.testing.assert_array_equal(foreign.logits([1]), session.logits([1]))


def test_a_tied_matrix_that_a_checkpoint_holds_twice_is_stored_once(
    tmp_path: Path,
) -> None:
    from mlx_lm.utils import load_model

    net = tiny_model("mamba2")
    net.lm_head.weight.data.copy_(net.backbone.embeddings.weight)
    net.config.tie_word_embeddings = False
    net.save_pretrained(tmp_path / "checkpoint")
    model = plain(load(tmp_path / "checkpoint"))
    assert model.anatomy.head == model.anatomy.embedding
    folder = tmp_path / "mlx"
    export(model, in_turn(model, FORMATS), "mlx", folder)
    assert load_model(folder)[1]["tie_word_embeddings"] is True
    with safe_open(get_target("mlx").loaded_files(folder)[0], "np") as file:
        assert not [name for name in file.keys() if "head" in name]  # noqa: SIM118 (not a dict)


def test_multipliers_that_mlx_lm_folds_into_weights(tmp_path: Path) -> None:
    """Falcon-H1: rows of one matrix with factors of their own; quantized after that, as the file has them.

    mlx-lm forgets those of keys and values; our files have them.
    """
    torch.manual_seed(0)
    unusual = {
        "num_hidden_layers": 2,
        "mamba_n_groups": 1,
        "mamba_rms_norm": False,
        "tie_word_embeddings": False,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.6,
        "mlp_multipliers": [0.7, 1.4],
        "key_multiplier": 0.4,
        "attention_in_multiplier": 0.8,
    }
    config = transformers.FalconH1Config(**CONFIGS["falcon_h1"]().to_dict() | unusual)
    net = transformers.AutoModelForCausalLM.from_config(config).eval()
    net.requires_grad_(False)
    model = plain(LoadedModel("falcon_h1", Path(), net, None))
    plan = Plan("p", {c.name: "affine8-g32" for c in model.anatomy.candidates}, "test")
    artifact = export(model, plan, "mlx", tmp_path)
    folded = [
        t.component
        for t in artifact.tensors
        if t.realised == "affine8-g32" and not t.weights
    ]
    multiplied = {"in_proj", "out_proj", "gate_proj", "down_proj", "lm_head"}
    assert {name.rpartition(".")[2] for name in folded} >= multiplied
    ids = token_ids(1, 16)
    with torch.no_grad():
        expected = model.chain.full_logits(ids)[0].log_softmax(-1)
    with open_session(tmp_path) as session:
        logprobs = torch.from_numpy(session.logits(ids[0].tolist())).log_softmax(-1)
    assert float((expected.exp() * (expected - logprobs)).sum(-1).mean()) < 1e-4


def test_layers_that_the_weights_do_not_hold_are_refused_before_they_are_made(
    tmp_path: Path,
) -> None:
    mlx = get_target("mlx")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros(2)})
    config = {"model_type": "mamba", "num_hidden_layers": 400_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for opened in (mlx.dissect, lambda folder: mlx.open(folder, SessionSettings())):
        with pytest.raises(CheckpointError, match=r"400000, .* only 1 tensors"):
            opened(tmp_path)


def test_what_it_does_not_hold_is_said(hybrid: LoadedModel, tmp_path: Path) -> None:
    target = describe_target("mlx")
    name = hybrid.anatomy.candidates[1].name
    with pytest.raises(
        TargetError, match=r"MLX has no format 'q4_k'.*kl-lens plan --target mlx"
    ):
        export(hybrid, Plan("p", {name: "q4_k"}, "test"), "mlx", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(TargetError, match="--device NPU: MLX runs on CPU or GPU"):
        target.check_device(SessionSettings("NPU"))
    if not mx.is_available(mx.gpu):
        with pytest.raises(TargetError, match="MLX finds no GPU"):
            target.check_device(SessionSettings("GPU"))
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is damaged or incomplete"):
        open_session(tmp_path / "model.safetensors")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("mlx") / "run"
    words = "export reference:hybrid --target mlx --format affine4-g64"
    assert main([*words.split(), "--run", str(run)]) == 0
    return run / "artifacts/mlx/uniform_affine4-g64"


def test_a_folder_is_judged_beside_pytorch_and_generates(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {t.realised for t in read_artifact(exported).tensors} >= {"affine4-g64"}
    assert json.loads((exported / "config.json").read_text())["quantization"]["bits"] == 4
    words = "--prompt history --max-new-tokens 3"
    assert main(["generate", str(exported), *words.split()]) == 0
    judge = "--model reference:hybrid --perplexity wikitext2:test --divergence --window-length 64 --windows 1"
    assert main(["evaluate", str(exported), *judge.split()]) == 0
    assert "mlx" in capsys.readouterr().out.lower()
