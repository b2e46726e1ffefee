"""A 16-bit GGUF as a template: matrices are found by value, all else is copied, and another model's file is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from kl_lens.base.errors import CheckpointError, RunError, TargetError
from kl_lens.cli.main import main
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
    kl,
    like_a_template,
    quantize_weights,
    stored,
    tiny,
    torch_logits,
    uniform,
)

gguf = pytest.importorskip("gguf")

IDS = token_ids(1, 24)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("stablelm", "F16"),
        ("starcoder2", "BF16"),
        ("glm4", "F16"),
        ("phi2", "F16"),
        pytest.param("glm4", "F32", marks=pytest.mark.slow),
    ],
)
def test_a_family_without_a_table_is_written_like_a_template(
    family: str, kind: str, tmp_path: Path
) -> None:
    model, template = like_a_template(family, tmp_path, kind)
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
    model, template = like_a_template("starcoder2", tmp_path)
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
            assert stored(new) == stored(old)


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
    copied = {tensor.name: tensor for tensor in actual.tensors}
    for tensor in expected.tensors:
        assert copied[tensor.name].type == tensor.type
        assert stored(copied[tensor.name]) == stored(tensor), tensor.name


def refused(model: LoadedModel, template: Path) -> str:
    """What is said, before anything is written."""
    folder = template.parent / "out"
    with pytest.raises(TargetError) as caught:
        export(replace(model, template=str(template)), Plan("p", {}, "test"), folder)
    assert not folder.exists()
    return str(caught.value)


def test_a_template_of_another_revision_names_what_differs(tmp_path: Path) -> None:
    model, template = like_a_template("starcoder2", tmp_path)
    model.model.get_parameter("model.layers.1.mlp.c_fc.weight").data[3, 5] += 1.0
    line = refused(model, template)
    assert "of another revision than tiny: 1 of its 20 matrices" in line
    assert "blk.1.ffn_up.weight" in line
    assert "model.layers.1.mlp.c_fc.weight with 159 of its 160 rows" in line


def test_what_is_no_template_of_this_model_is_refused(tmp_path: Path) -> None:
    """Of another model, already quantized, or one from which llama.cpp computes something else."""
    model, template = like_a_template("starcoder2", tmp_path)
    other = tiny("qwen3")
    assert "of another model than tiny: 20 of its 20" in refused(other, template)
    other.model.save_pretrained(tmp_path / "other")
    words = f"measure {tmp_path / 'other'} --template {template} --run {tmp_path / 'run'}"
    assert main(words.split()) == 1
    assert not (tmp_path / "run").exists()
    _, quantized = like_a_template("starcoder2", tmp_path, "Q8_0")
    line = refused(model, quantized)
    assert "is no template: token_embd.weight is Q8_0" in line
    wrong = {"rope.freq_base": 3.0, "attention.layer_norm_epsilon": 3.0}
    _, changed = like_a_template("starcoder2", tmp_path, **wrong)
    assert "computes something else than PyTorch" in refused(model, changed)


def test_a_tensor_of_several_parameters_has_one_type(tmp_path: Path) -> None:
    """The largest that was planned for one of them, and the others say so."""
    model, template = like_a_template("phi2", tmp_path)
    model = replace(model, template=str(template))
    plan = uniform(model, "q4_0")
    attention = "model.layers.1.self_attn"
    plan = replace(plan, assignment=plan.assignment | {f"{attention}.k_proj": "q8_0"})
    artifact = export(model, plan, tmp_path / "out")
    tensors = {tensor.component: tensor for tensor in artifact.tensors}
    joined = [tensors[f"{attention}.{part}_proj"] for part in "qkv"]
    assert {tensor.realised for tensor in joined} == {"q8_0"}
    assert joined[0].reason == f"{attention}.k_proj is in the same tensor"
    assert joined[1].reason is None
    entries = read_header(tmp_path / "out" / artifact.files[0]).tensors
    types = {entry.name: (entry.type, entry.shape) for entry in entries}
    assert types["blk.1.attn_qkv.weight"] == ("Q8_0", (160, 96))
    assert types["blk.0.attn_qkv.weight"] == ("Q4_0", (160, 96))


def test_a_run_keeps_its_template(tmp_path: Path) -> None:
    model, template = like_a_template("starcoder2", tmp_path)
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
