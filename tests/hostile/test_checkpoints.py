"""Checkpoint folders with one thing changed: a value of the configuration, the index, the weights' file, the tokenizer;
plans, published files."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kl_lens.base.errors import KLLensError
from kl_lens.cli.main import main
from kl_lens.model import load
from kl_lens.planning import plan_path
from tests.byte_level import save_tokenizer
from tests.families import tiny_model
from tests.hostile.saying import cases, says_one_line
from tests.reporting.sample import make_run

Q8_0 = ["--target", "gguf", "--format", "q8_0"]
ODD: list[Any] = [
    None,
    "abc",
    -1,
    0,
    1.5,
    10**12,
    float("nan"),
    [],
    {},
    True,
    "\x1b[31m",
    [[]],
]
KEYS = [
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "state_size",
    "expand",
    "conv_kernel",
    "time_step_rank",
    "hidden_act",
    "layer_norm_epsilon",
    "model_type",
    "architectures",
    "torch_dtype",
    "auto_map",
    "tie_word_embeddings",
]


def changed_within(content: Any, draw: random.Random) -> Any:
    """A copy with another value at some place, however deep."""
    if isinstance(content, dict) and content and draw.random() < 0.8:
        key = draw.choice(sorted(content))
        return content | {key: changed_within(content[key], draw)}
    if isinstance(content, list) and content and draw.random() < 0.8:
        at = draw.randrange(len(content))
        return [*content[:at], changed_within(content[at], draw), *content[at + 1 :]]
    return draw.choice(ODD)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy") / "mamba"
    tiny_model("mamba").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "model"))


@cases(12, 700)
def test_changed_configurations(cases: int, folder: Path, healthy: Path, capsys) -> None:
    draw = random.Random(cases)
    config = json.loads((healthy / "config.json").read_text())
    for _ in range(cases):
        (folder / "config.json").write_text(
            json.dumps(config | {draw.choice(KEYS): draw.choice(ODD)})
        )
        says_one_line(["inspect", str(folder)], capsys, may_succeed=True)


@cases(4, 300)
def test_changed_indexes(cases: int, folder: Path, capsys) -> None:
    draw = random.Random(cases)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    with safe_open(folder / "part.safetensors", framework="numpy") as file:
        files = dict.fromkeys(file.keys(), "part.safetensors")
    for _ in range(cases):
        content = changed_within(
            {"metadata": {"total_size": 5}, "weight_map": files}, draw
        )
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        says_one_line(["inspect", str(folder)], capsys, may_succeed=True)


def test_links_to_elsewhere_are_not_followed(
    folder: Path, healthy: Path, tmp_path: Path, capsys
) -> None:
    for outside, word in (
        (tmp_path / "elsewhere", "outside its folder"),
        (tmp_path / "blobs", ""),
    ):
        outside.mkdir()
        shutil.copy(healthy / "model.safetensors", outside / "weights")
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(outside / "weights")
        assert word in says_one_line(
            ["inspect", str(folder)], capsys, may_succeed=not word
        )


@pytest.mark.parametrize("family", ["mamba", "jamba_experts"])
def test_a_tensor_that_is_missing_is_named(family: str, tmp_path: Path, capsys) -> None:
    """Each kind once: the embedding, a head that is not tied, a bias that some checkpoints do without, an expert."""
    tiny_model(family).save_pretrained(tmp_path / "model")
    whole = load_file(file := tmp_path / "model/model.safetensors")
    kinds = {re.sub(r"\.\d+\.", ".*.", name): name for name in whole}
    for name in kinds.values():
        save_file(
            {key: tensor for key, tensor in whole.items() if key != name},
            file,
            {"format": "pt"},
        )
        # Of down_proj, nothing but config.json says how many experts there are.
        named = (
            "experts.down_proj has shape (3,"
            if "experts.3.down_proj" in name
            else f"weights lack {name}"
        )
        for residence in ("memory", "disk")[: 1 + ("experts" in name)]:
            words = [
                "export",
                str(tmp_path / "model"),
                *Q8_0,
                "--out",
                str(tmp_path / "out"),
            ]
            assert named in says_one_line([*words, "--weights", residence], capsys)
    assert not (tmp_path / "out").exists()


FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [32, 32],
    "activation_scheme": "dynamic",
}
QUANTIZED: dict[str, tuple[str, str, torch.dtype, dict[str, Any] | None, str]] = {
    "int8 without scales": (
        "weight",
        "",
        torch.int8,
        None,
        "as I8, and the files hold no scales for it",
    ),
    "fp8 without scales": (
        "weight",
        "",
        torch.float8_e4m3fn,
        FP8,
        "as F8_E4M3, and the files hold no scales",
    ),
    "fp8 without a configuration": (
        "weight",
        "weight_scale_inv",
        torch.float8_e4m3fn,
        None,
        "config.json has no quantization_config",
    ),
    "gptq": (
        "qweight",
        "scales",
        torch.int32,
        {"quant_method": "gptq", "bits": 4, "group_size": 64},
        "gptq",
    ),
}


def quantize(
    folder: Path, weight: str, scale: str, dtype: torch.dtype, settings: Any
) -> None:
    """The large matrices of a tiny Mamba as other tools store them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [
        name for name in tensors if name.endswith(("in_proj.weight", "out_proj.weight"))
    ]:
        tensors[name.removesuffix("weight") + weight] = (
            (matrix := tensors.pop(name)).mul(100).to(dtype)
        )
        if scale:
            tensors[name.removesuffix("weight") + scale] = torch.full(
                [n // 32 for n in matrix.shape], 0.01
            )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | ({"quantization_config": settings} if settings else {}))
    )


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_never_taken_for_floats(
    name: str, folder: Path, tmp_path: Path, capsys
) -> None:
    *arguments, message = QUANTIZED[name]
    quantize(folder, *arguments)  # type: ignore[arg-type]
    words = ["measure", str(folder), "--run", str(tmp_path / "out")]
    for command in (
        words,
        [*words, "--weights", "disk"],
        ["export", str(folder), *Q8_0, "--out", words[-1]],
    ):
        assert message in says_one_line(command, capsys)
    assert not (tmp_path / "out").exists()


def test_fp8_weights_are_multiplied_with_their_scales(
    folder: Path, tmp_path: Path
) -> None:
    quantize(folder, "weight", "weight_scale_inv", torch.float8_e4m3fn, FP8)
    name = "backbone.layers.0.mixer.in_proj.weight"
    model = load(folder)
    stored = load_file(folder / "model.safetensors")[name]
    assert torch.equal(model.tensor(name), stored.float() * 0.01)
    model.model.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    assert load_file(tmp_path / "saved/model.safetensors")[name].dtype == torch.float32


def test_weights_too_large_to_compute_with(folder: Path) -> None:
    """Each number is finite, what they give is not."""
    weights = load_file(folder / "model.safetensors")
    weights["backbone.layers.0.mixer.in_proj.weight"].fill_(3e38)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(KLLensError, match=r"layers\.0: its output is not finite"):
        load(folder).chain  # noqa: B018


@pytest.mark.parametrize("causal", [False, True])
def test_an_encoder_is_not_measured_as_a_causal_model(
    causal: bool, tmp_path: Path, capsys
) -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = transformers.BertConfig(vocab_size=97, is_decoder=causal, **sizes)
    transformers.BertLMHeadModel(config).save_pretrained(tmp_path)
    line = says_one_line(["inspect", str(tmp_path)], capsys, may_succeed=causal)
    assert ("BertLMHeadModel is not causal" in line) != causal


def test_tokens_without_a_row_in_the_embedding(
    folder: Path, tmp_path: Path, capsys
) -> None:
    """The text is refused, not the model: many tokenizers have tokens that no text contains."""
    out = str(tmp_path / "out")
    (tmp_path / "text.txt").write_text("The history of the city. " * 200)
    save_tokenizer(folder, [(tmp_path / "text.txt").read_text()], vocabulary=300)
    text = [
        "--text",
        str(tmp_path / "text.txt"),
        "--windows",
        "2",
        "--window-length",
        "16",
        "--run",
        out,
    ]
    named = r"'.+' is token 2\d\d, but the embedding of model has only 97 rows; .* with --tokenizer"
    for verb in ("measure", "calibrate"):
        assert re.search(named, says_one_line([verb, str(folder), *text], capsys))
    assert "but the embedding only 97 rows" in says_one_line(
        ["export", str(folder), *Q8_0, "--out", out], capsys
    )
    assert not Path(out).exists()


def test_a_model_is_not_overwritten(healthy: Path, tmp_path: Path, capsys) -> None:
    folder = str(tmp_path / "model")
    shutil.copytree(healthy, folder)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "text.txt").write_text("The history of the city. " * 200)
    save_tokenizer(tmp_path / "tokens", [(tmp_path / "text.txt").read_text()])
    before = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    text = [
        "--text",
        str(tmp_path / "text.txt"),
        "--tokenizer",
        str(tmp_path / "tokens"),
        "--windows",
        "2",
    ]
    text += ["--window-length", "16"]
    for words in (
        *(
            [verb, folder, *text, "--run", folder]
            for verb in ("measure", "calibrate", "run")
        ),
        *(
            ["export", folder, "--target", target, "--format", fmt, "--out", folder]
            for target, fmt in {
                "gguf": "q8_0",
                "openvino": "int8",
                "mlx": "affine4-g64",
            }.items()
        ),
    ):
        assert f"{folder} holds a model (config.json)" in says_one_line(words, capsys)
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == before


@cases(6, 300)
def test_changed_tokenizers(cases: int, healthy: Path, tmp_path: Path, capsys) -> None:
    draw = random.Random(cases)
    bytes_ = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    content = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0,
                "content": "<s>",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": bytes_,
        "post_processor": None,
        "decoder": bytes_,
        "model": {
            "type": "BPE",
            "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3},
            "merges": [["a", "b"]],
        },
    }
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    assert main(["inspect", str(healthy), "--tokenizer", str(file)]) == 0
    for _ in range(cases):
        file.write_text(json.dumps(changed_within(content, draw)))
        says_one_line(
            ["inspect", str(healthy), "--tokenizer", str(file)], capsys, may_succeed=True
        )


@cases(15, 2500)
def test_changed_weight_files(cases: int, folder: Path, healthy: Path, capsys) -> None:
    draw = random.Random(cases)
    data = (healthy / "model.safetensors").read_bytes()
    for _ in range(cases):
        changed = bytearray(data[: draw.choice([len(data), draw.randrange(len(data))])])
        if len(changed):
            changed[draw.randrange(min(1000, len(changed)))] = draw.randrange(256)
        (folder / "model.safetensors").write_bytes(changed)
        says_one_line(["inspect", str(folder)], capsys, may_succeed=True)


@cases(12, 900)
def test_changed_plans(cases: int, tmp_path: Path, capsys) -> None:
    draw = random.Random(cases)
    run = make_run(tmp_path / "run", stages=("plan",))
    path = plan_path(
        run / "plans", sorted(p.stem for p in (run / "plans").glob("*.json"))[0]
    )
    healthy = json.loads(path.read_text())
    for _ in range(cases):
        changed: Any = healthy | {draw.choice(sorted(healthy)): draw.choice(ODD)}
        if draw.random() < 0.3:
            names = dict(healthy["assignment"])
            names[draw.choice([*names, "nowhere", "../x"])] = draw.choice(ODD)
            changed = healthy | {"assignment": names}
        path.write_text(json.dumps(changed))
        export = ["export", "--run", str(run), "--target", "gguf", "--plan", path.stem]
        words = draw.choice([["report", "--run", str(run)], *[export] * 5])
        says_one_line(words, capsys, may_succeed=True)
