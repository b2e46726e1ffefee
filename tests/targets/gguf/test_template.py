"""A 16-bit GGUF as a template: matrices are found by value, all else is copied, and another model's file is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kl_lens.base.errors import CheckpointError, RunError, TargetError
from kl_lens.measuring.sweep import model_identity
from kl_lens.model import LoadedModel, load
from kl_lens.run.folder import Run
from kl_lens.run.records import Plan
from kl_lens.study.session import Session
from kl_lens.targets.gguf.activations import as_deployed
from kl_lens.targets.gguf.export import export
from kl_lens.targets.gguf.header import read_header
from kl_lens.targets.gguf.session import open_session
from tests.families import token_ids
from tests.targets.gguf.support import (
    _UNEVEN,
    families,
    kl,
    quantize_weights,
    tiny,
    torch_logits,
    uniform,
)

gguf = pytest.importorskip("gguf")

IDS = token_ids(1, 24)
_BOTH = (".weight", ".bias")
_TEXTS = {"general.name": "Anything", "tokenizer.chat_template": "{{ messages }}"}


def written(
    model: LoadedModel,
    path: Path,
    name: str,
    settings: dict[str, Any],
    kind: str = "F16",
    arranged: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, values: values,
) -> Path:
    """llama.cpp's 16-bit file of a model that KL Lens has no table for, by gguf's own map of names."""
    config = model.config
    writer = gguf.GGUFWriter(path, name)
    for key, value in _TEXTS.items():
        writer.add_string(key, value)
    writer.add_tokenizer_model("no_vocab")
    writer.add_array("tokenizer.ggml.tokens", [b"a", b"\xff\xfe", b"c"])
    common = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
    }
    for key, value in (common | settings).items():
        add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        add[type(value)](f"{name}.{key}", value)
    codes = {title: code for code, title in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(codes[name], config.num_hidden_layers)
    types = gguf.GGMLQuantizationType
    for parameter, values in model.model.state_dict().items():
        target = names.get_name(parameter, _BOTH)
        plain_values = arranged(parameter, values).float().numpy()
        stored = types[kind] if values.dim() > 1 else types.F32
        data = gguf.quantize(plain_values, stored)
        writer.add_tensor(target, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_NORM = {"attention.layer_norm_epsilon": 1e-5}
_ROPE = {"rope.freq_base": 5000.0}
_SIMILAR = families._bare(
    "StableLmConfig",
    **{key: value for key, value in _UNEVEN.items() if key != "head_dim"},
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
)
FAMILIES = {
    "stablelm": (
        _SIMILAR,
        {**_NORM, **_ROPE, "rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "starcoder2": (
        families._bare(
            "Starcoder2Config",
            **{key: value for key, value in _UNEVEN.items() if key != "head_dim"},
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        ),
        {**_NORM, **_ROPE},
    ),
    "glm4": (
        families._bare(
            "Glm4Config",
            **{**_UNEVEN, "head_dim": 16},
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        {
            **_ROPE,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.dimension_count": 8,
        },
    ),
}


def made(family: str, folder: Path, kind: str = "F16") -> tuple[LoadedModel, Path]:
    config, settings = FAMILIES[family]
    chosen = config()
    chosen.norm_epsilon = chosen.layer_norm_eps = chosen.rms_norm_eps = 1e-5
    model = tiny(chosen)
    path = written(model, folder / f"{family}-{kind}.gguf", family, settings, kind)
    return model, path


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("stablelm", "F16"),
        ("starcoder2", "BF16"),
        ("glm4", "F16"),
        pytest.param("glm4", "F32", marks=pytest.mark.slow),
    ],
)
def test_a_family_without_a_table_is_written_like_a_template(
    family: str, kind: str, tmp_path: Path
) -> None:
    model, template = made(family, tmp_path, kind)
    with pytest.raises(TargetError, match=r"only like another: .* --template"):
        export(model, uniform(model, "fp16"), tmp_path / "without")
    model = replace(model, template=str(template))
    expected = torch_logits(model, IDS)
    artifact = export(model, uniform(model, "q4_0"), tmp_path / "q4_0")
    assert {component.name for component in model.anatomy.candidates} <= {
        tensor.component for tensor in artifact.tensors if tensor.realised == "q4_0"
    }
    with as_deployed(model.model, quantize_weights(model, artifact)):
        rounded = torch_logits(model, IDS)
    file = tmp_path / "q4_0" / artifact.files[0]
    with open_session(file, threads=1, exact=True) as session:
        actual = session.logits(IDS[0].tolist())
    assert kl(rounded, actual)[0] < 0.1 * kl(expected, actual)[0] < 0.01


def test_all_but_matrices_is_copied(tmp_path: Path) -> None:
    model, template = made("starcoder2", tmp_path)
    model = replace(model, template=str(template))
    artifact = export(model, uniform(model, "q4_0"), tmp_path / "q4_0")
    before = read_header(template, whole=True, exact=True)
    after = read_header(tmp_path / "q4_0" / artifact.files[0], whole=True, exact=True)
    kept = {
        key: value for key, value in before.metadata.items() if "file_type" not in key
    }
    assert kept.items() <= after.metadata.items()
    assert {key: before.kinds[key] for key in kept}.items() <= after.kinds.items()
    assert [tensor.name for tensor in after.tensors] == [
        tensor.name for tensor in before.tensors
    ]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert new.shape == old.shape
        assert new.type == ("F32" if len(old.shape) == 1 else "Q4_0")
        if new.type == "F32":
            assert _bytes(new) == _bytes(old)


def _bytes(entry: Any) -> bytes:
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        return bytes(file.read(entry.bytes))


@pytest.mark.parametrize(
    "name",
    [
        "granitemoehybrid",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("llama tied, with biases", "qwen3_moe", "gemma3_text")
        ),
    ],
)
def test_rows_in_another_order_and_stacked_ones_are_found(
    name: str, tmp_path: Path
) -> None:
    """Like a file of ours with rotary rows, split experts and added ones: the same codes as from the family's table."""
    model = tiny(name)
    template = export(model, uniform(model, "fp16"), tmp_path / "template").files[0]
    plan = uniform(model, "q5_0")
    own = export(model, plan, tmp_path / "own")
    like = replace(model, template=str(tmp_path / "template" / template))
    copy = export(like, plan, tmp_path / "copy")
    expected = read_header(tmp_path / "own" / own.files[0])
    actual = read_header(tmp_path / "copy" / copy.files[0])
    stored = {tensor.name: tensor for tensor in actual.tensors}
    for tensor in expected.tensors:
        assert stored[tensor.name].type == tensor.type
        assert _bytes(stored[tensor.name]) == _bytes(tensor), tensor.name


def test_a_template_of_another_revision_names_what_differs(tmp_path: Path) -> None:
    _, template = made("starcoder2", tmp_path)
    config = FAMILIES["starcoder2"][0]()
    config.norm_epsilon = 1e-5
    other = tiny(config)
    other.model.get_parameter("model.layers.1.mlp.c_fc.weight").data[3, 5] += 1.0
    with pytest.raises(TargetError) as caught:
        export(
            replace(other, template=str(template)),
            Plan("p", {}, "test"),
            tmp_path / "out",
        )
    line = str(caught.value)
    assert "of another revision than tiny: 1 of its 20 matrices" in line
    assert "blk.1.ffn_up.weight" in line
    assert "model.layers.1.mlp.c_fc.weight with 159 of its 160 rows" in line


def test_a_template_of_another_model_is_refused(tmp_path: Path) -> None:
    _, template = made("starcoder2", tmp_path)
    other = replace(tiny("qwen3"), template=str(template))
    with pytest.raises(TargetError, match="of another model than tiny: 20 of its 20"):
        export(other, Plan("p", {}, "test"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_quantized_template_is_refused(tmp_path: Path) -> None:
    model, template = made("starcoder2", tmp_path, "Q8_0")
    with pytest.raises(TargetError, match=r"is no template: token_embd\.weight is Q8_0"):
        export(
            replace(model, template=str(template)),
            Plan("p", {}, "test"),
            tmp_path / "out",
        )


def test_a_template_that_llama_cpp_computes_otherwise_is_refused(tmp_path: Path) -> None:
    """The right weights, and another base of rope and size of heads."""
    config, settings = FAMILIES["starcoder2"]
    model = tiny(config())
    wrong = settings | {"rope.freq_base": 3.0, "attention.layer_norm_epsilon": 3.0}
    template = written(model, tmp_path / "wrong.gguf", "starcoder2", wrong)
    with pytest.raises(TargetError, match="computes something else than PyTorch"):
        export(
            replace(model, template=str(template)),
            Plan("p", {}, "test"),
            tmp_path / "out",
        )


def test_a_run_keeps_its_template(tmp_path: Path) -> None:
    model, template = made("starcoder2", tmp_path)
    model.model.save_pretrained(tmp_path / "model")
    folder = tmp_path / "run"
    identity = model_identity(load(tmp_path / "model", template=template))
    assert identity["template"] == str(template.resolve())
    with Run.create(folder) as run:
        run.identify(identity)
        assert Session().model_of(run).template == str(template.resolve())
        template.write_bytes(template.read_bytes() + bytes(32))
        with pytest.raises(RunError, match=r"is not the template of .*--template"):
            Session().model_of(run)
    with pytest.raises(CheckpointError, match=r"none\.gguf: no such file"):
        load(tmp_path / "model", template=tmp_path / "none.gguf")
