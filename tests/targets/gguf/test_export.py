"""What is in the file: the integers of kl_lens.weights.formats, every component once, fallbacks in the open."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers

from kl_lens.base.errors import PlanError
from kl_lens.model.anatomy import component_name
from kl_lens.model.opening import load
from kl_lens.run.records import Artifact, Plan
from kl_lens.targets.gguf.export import export
from kl_lens.targets.gguf.writer import ModelTensors
from kl_lens.weights.formats import get_format
from tests import families
from tests.families import plain
from tests.targets.gguf import support
from tests.targets.gguf.support import small_mamba, tiny, uniform

gguf = pytest.importorskip("gguf")

PER_LAYER = {
    "in_proj": "q4_k",
    "x_proj": "q6_k",
    "dt_proj": "q8_0",
    "out_proj": "q4_0",
    "conv1d": "q8_0",
}


def test_the_file_holds_the_integers_of_formats_bit_for_bit(tmp_path: Path) -> None:
    """A tied Mamba with a plan of every format, and time-step matrices that no block fits."""
    model = small_mamba(hidden_size=256, num_hidden_layers=2)
    assignment = {
        f"backbone.layers.{i}.mixer.{kind}": name
        for i in range(2)
        for kind, name in PER_LAYER.items()
    }
    plan = Plan("mixed", assignment | {"backbone.embeddings": "q5_k"}, made_by="test")
    artifact = export(model, plan, tmp_path)
    assert artifact.model_fingerprint == model.fingerprint
    reader = gguf.GGUFReader(tmp_path / artifact.files[0])
    stored = {tensor.name: tensor for tensor in reader.tensors}
    parameters = dict(model.model.named_parameters())
    compared = set()
    for record in artifact.tensors:
        tensor = stored[record.runtime_name]
        assert tensor.n_bytes == record.bytes
        if record.realised == "fp32":
            assert tensor.tensor_type.name == "F32"
            continue
        fmt = get_format(record.realised)
        weight = parameters[f"{record.component}.weight"]
        assert np.array_equal(
            tensor.data.reshape(-1).view(np.uint8), fmt.pack(fmt.quantize(weight))
        )
        assert tensor.tensor_type.name == {"fp16": "F16"}.get(
            record.realised, record.realised.upper()
        )
        compared.add(record.realised)
    assert compared == {"q4_k", "q6_k", "q4_0", "q5_k", "fp16"}
    # What does not divide falls back in the open.
    record = next(
        t for t in artifact.tensors if t.component == "backbone.layers.0.mixer.dt_proj"
    )
    assert (record.planned, record.realised, record.bytes) == (
        "q8_0",
        "fp16",
        2 * 512 * 16,
    )
    assert "16 columns do not divide into blocks of 32" in record.reason
    assert artifact.settings["fallbacks"] == 2
    # State-space parameters and norms stay F32, whatever the plan says.
    kept = {
        t.runtime_name.rpartition("blk.0.")[2]: t
        for t in artifact.tensors
        if t.realised == "fp32"
    }
    assert {"ssm_conv1d.weight", "ssm_a", "ssm_d", "attn_norm.weight"} <= set(kept)
    assert kept["ssm_conv1d.weight"].planned == "q8_0"
    assert kept["ssm_conv1d.weight"].reason == "llama.cpp computes with it in F32"
    held = sum(tensor.bytes for tensor in artifact.tensors)
    assert (
        (tmp_path / artifact.files[0]).stat().st_size
        > held
        == artifact.settings["tensor_bytes"]
    )
    assert Artifact.from_json(json.loads(json.dumps(artifact.to_json()))) == artifact


def test_a_tied_head_may_be_called_by_either_name(tmp_path: Path) -> None:
    model = tiny("mamba")
    artifact = export(model, Plan("p", {"lm_head": "q8_0"}, "test"), tmp_path)
    assert (
        next(
            t for t in artifact.tensors if t.runtime_name == "token_embd.weight"
        ).realised
        == "q8_0"
    )
    with pytest.raises(PlanError, match="two formats"):
        export(
            model,
            Plan("p", {"lm_head": "q8_0", "backbone.embeddings": "q4_0"}, "test"),
            tmp_path,
        )


QUICK = (
    "mamba",
    "llama tied, with biases",
    "qwen3_moe",
    "falcon_h1 tied, without norm",
    "granitemoehybrid",
    "qwen3_5_moe_text",
    "bailing_hybrid",
)


@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else pytest.param(n, marks=pytest.mark.slow)
        for n in support.CONFIGS
        if n != "gpt2"  # whose matrices an opened model has turned
    ],
)
def test_every_component_is_in_the_file_from_memory_as_from_shards(
    name: str, tmp_path: Path
) -> None:
    """Weights on disk, in the names and shapes that checkpoints have there, give the same file."""
    model = tiny(name)
    folder = tmp_path / "tiny"
    model.model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    plan = uniform(model, "q8_0")
    one = export(model, plan, tmp_path / "memory")
    two = export(plain(load(folder, weights="disk")), plan, tmp_path / "disk")
    stored = _tensors(tmp_path / "memory" / one.files[0])
    assert stored == _tensors(tmp_path / "disk" / two.files[0])
    assert one.tensors == two.tensors
    assert ("output.weight" in stored) != bool(
        model.config.tie_word_embeddings
    )  # a tied head is one tensor
    components = {c.name for c in model.anatomy.components}
    buffers = dict(model.model.named_buffers())
    shapes = ModelTensors(model).shapes
    assert {
        component_name(n, len(shape)) for n, shape in shapes.items() if n not in buffers
    } == components
    assert components <= {t.component for t in one.tensors}


def test_plans_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    model = tiny("mamba")
    with pytest.raises(
        PlanError, match=r"plan x: the model has no component backbone\.layers\.9\.mixer"
    ):
        export(
            model,
            Plan("x", {"backbone.layers.9.mixer.in_proj": "q8_0"}, "test"),
            tmp_path,
        )
    name = "backbone.layers.0.mixer.in_proj"
    with pytest.raises(
        PlanError, match=r"GGUF has no format 'int4' .* kl-lens plan --target gguf"
    ):
        export(model, Plan("x", {name: "int4"}, "test"), tmp_path)
    assert not list(tmp_path.glob("*"))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_of_a_model_that_sees_images_the_language_model_is_exported(
    family: str, tmp_path: Path
) -> None:
    """Qwen3.5 as it is published: the language model under another name, beside a vision tower."""
    title = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[family]
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    text = families.OTHERS[f"{family}_text"]().to_dict()
    config = getattr(transformers, f"{title}Config")(
        text_config=text, vision_config=vision
    )
    getattr(transformers, f"{title}ForConditionalGeneration")(config).save_pretrained(
        tmp_path / "m"
    )
    model = plain(load(tmp_path / "m"))
    assert model.config.model_type == f"{family}_text"
    on_disk = plain(load(tmp_path / "m", weights="disk"))
    one = export(model, Plan("p", {}, "test"), tmp_path / "memory")
    two = export(on_disk, Plan("p", {}, "test"), tmp_path / "disk")
    files = tmp_path / "memory" / one.files[0], tmp_path / "disk" / two.files[0]
    assert files[0].read_bytes() == files[1].read_bytes()


def _tensors(path: Path) -> dict[str, bytes]:
    return {
        t.name: t.tensor_type.name.encode() + t.data.tobytes()
        for t in gguf.GGUFReader(path).tensors
    }
