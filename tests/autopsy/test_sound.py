"""Files without a damaged tensor: sound, foreign, of coarse types, of another model, or not to be checked."""

import copy
import dataclasses
from pathlib import Path

import gguf
import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest
import torch

from kl_lens.autopsy.verdict import Evidence
from kl_lens.autopsy.weights import Weights
from kl_lens.base.errors import KLLensError
from kl_lens.model import LoadedModel, load
from kl_lens.run.autopsies import Autopsy, Step
from kl_lens.run.records import Estimate
from kl_lens.study.autopsy import AutopsyResult
from kl_lens.targets import dissected
from kl_lens.targets.openvino.folder import IR_FILE
from tests.autopsy import planting
from tests.autopsy.conftest import Examine, Sound

MATRICES = "ssm_in ssm_out attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down"


def unharmed(result: Autopsy, exit_code: int = 0) -> None:
    assert not result.faults, result.faults
    assert AutopsyResult(result).exit_code == exit_code


@pytest.mark.parametrize(
    ("target", "fmt"),
    [
        ("gguf", "q4_0"),
        ("mlx", ""),
        pytest.param("compressed-tensors", "", marks=pytest.mark.slow),
        pytest.param("openvino", "int8", marks=pytest.mark.slow),
    ],
)
def test_sound_files(sound: Sound, examine: Examine, target: str, fmt: str) -> None:
    result = examine(sound(target, fmt))
    unharmed(result)
    assert result.headline.startswith("Nothing is wrong: it loses what")
    assert [step.letter for step in result.steps if step.letter != "c"] == [*"abdefg"]
    compared = [
        tensor
        for tensor in result.tensors
        if not tensor.name.startswith(("kl_lens/", "Const"))
    ]
    assert all(tensor.error is not None for tensor in compared)
    kls = {step.letter: step.kl.value for step in result.steps if step.kl is not None}
    assert kls["a"] == 0 < kls["b"]
    assert result.rounding_kl is None or result.rounding_kl.value == pytest.approx(
        kls["b"], rel=1e-6
    )
    rounding = "c" if target == "gguf" else "b"  # llama.cpp always rounds
    assert kls["e"] == pytest.approx(kls[rounding], rel=0.2)


def test_what_the_runtime_adds_is_said_to_be_activations_and_weights_are_blamed_only_if_compared() -> (
    None
):
    kls = {"a": 0.0, "b": 0.000713, "d": 0.00253, "e": 0.00072}
    steps = {letter: Step(letter, "", Estimate(kl, 1e-5)) for letter, kl in kls.items()}
    headline, findings = Evidence(
        "OpenVINO", "", steps=steps, rounding=Estimate(0.000713, 1e-5)
    ).judged()
    assert not findings
    assert (
        "Its weights lose 0.000713; plain rounding to the same types loses 0.000713"
        in headline
    )
    assert "The rest, 0.00182, is activations" in headline
    assert "with exact settings it loses 0.00072" in headline
    steps = {letter: Step(letter, "", Estimate(0.0)) for letter in "ab"}
    steps["d"] = Step("d", "", Estimate(0.3), apart=Estimate(0.3), beside="b")
    headline, findings = Evidence(
        "", "", steps=steps, weights=Weights(uncompared=["x.A_log"])
    ).judged()
    assert "Not compared, and perhaps the cause: x.A_log" in headline
    sentences = [finding.words for finding in findings]
    assert "Not compared, because not found in the file: x.A_log" in sentences
    assert "It is not the weights" not in str(sentences)


# -- IRs of others -----------------------------------------------------------------------------------------------


def with_pixels(graph: ov.Model) -> None:
    """Adds an input that the logits are multiplied with."""
    pixels = ops.parameter(ov.PartialShape([1]), np.float32)
    pixels.output(0).get_tensor().set_names({"pixel_values"})
    end = graph.get_results()[0].input(0)
    product = ops.multiply(end.get_source_output(), pixels)
    product.output(0).get_tensor().set_names({"logits"})
    end.replace_source_output(product.output(0))
    graph.add_parameters([pixels])
    graph.validate_nodes_and_infer_types()


@pytest.mark.slow
@pytest.mark.parametrize("compressed", [False, True])
def test_a_foreign_ir(copied: Sound, examine: Examine, compressed: bool) -> None:
    """Without our record; also compressed by NNCF, in types that we do not write."""
    folder = copied("openvino")
    if compressed:
        import nncf

        planting.regraphed(folder, nncf.compress_weights)
    (folder / "artifact.json").unlink()
    result = examine(folder)
    unharmed(result)
    assert ("u8" in {tensor.type for tensor in result.tensors}) == compressed
    large = [
        tensor
        for tensor in result.tensors
        if "kl_lens/" not in tensor.name and tensor.bytes > 999
    ]
    assert all(tensor.component for tensor in large)


def test_what_cannot_be_fed_is_not_checked(copied: Sound, examine: Examine) -> None:
    folder = copied("openvino")
    planting.regraphed(folder, with_pixels)
    (folder / "artifact.json").unlink()
    result = examine(folder)
    unharmed(result, 3)
    assert "not everything was checked: it was not run" in result.headline
    assert "'pixel_values'" in result.headline


# -- types and activations ---------------------------------------------------------------------------------------


def test_gates_in_two_bits(sound: Sound, examine: Examine) -> None:
    (fault,) = examine(sound("gguf", "", {"gate_proj": "q2_k"})).faults
    assert fault.step == "type"
    assert (
        "all gate_proj (Q2_K), at 2.6 bits where most of the file has 8.5" in fault.words
    )


def test_activations_that_eight_bits_cannot_hold(
    model: LoadedModel, sound: Sound, examine: Examine
) -> None:
    """Channels of huge values that the next matrix ignores: exact arithmetic does not notice them."""
    clipped = dataclasses.replace(model, model=copy.deepcopy(model.model))
    with torch.no_grad():
        for block in clipped.model.model.layers:
            block.mamba.D[0] = 1e9
            block.mamba.out_proj.weight[:, :32] = 0.0
    (fault,) = examine(sound("gguf", "", of=clipped), clipped).faults
    assert fault.step == "activations"
    assert "overflow, most of it before all out_proj (Q8_0)" in fault.words


def test_a_rescaled_file_is_sound(copied: Sound, examine: Examine) -> None:
    folder = copied("gguf")
    planting.change(folder, "blk.0.attn_norm.weight", lambda v: v * 2)
    for name in ("ssm_in", "attn_q", "attn_k", "attn_v"):
        planting.change(folder, f"blk.0.{name}.weight", lambda v: v / 2)
    result = examine(folder)
    assert not result.faults, result.faults
    assert any(
        "make up for each other, as after rescaling" in finding.words
        for finding in result.findings
    )


# -- another model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "says"),
    [
        (1.5, "Another model"),
        pytest.param(0.1, "Another version of the model", marks=pytest.mark.slow),
    ],
)
def test_other_weights_everywhere(
    copied: Sound, examine: Examine, noise: float, says: str
) -> None:
    folder = copied("gguf")
    draw = np.random.default_rng(0)
    for name in [
        f"blk.{block}.{part}.weight" for block in (0, 1) for part in MATRICES.split()
    ]:
        planting.change(
            folder, name, lambda v: v + noise * v.std() * draw.standard_normal(v.shape)
        )
    (fault,) = examine(folder).faults
    assert fault.words.startswith(f"{says}")
    assert ": check --model. 18 of 19 tensors" in fault.words


def test_another_architecture_and_a_chat_template_that_was_added(
    model: LoadedModel, sound: Sound, examine: Examine
) -> None:
    (fault,) = (result := examine(sound("gguf"), load("reference:mamba"))).faults
    assert result.headline.startswith("Another model: check --model.")
    assert fault.advice == "give the checkpoint that the file was made from"
    assert "general.architecture is falcon-h1 in the file, mamba in the original" in str(
        result.findings
    )
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = None
    result = examine(sound("gguf"), dataclasses.replace(model, tokenizer=tokenizer))
    assert not result.faults, result.faults
    assert "The chat template was added: the original has none" in str(result.findings)


# -- without an original, or without a file ----------------------------------------------------------------------


def test_a_file_alone(sound: Sound, copied: Sound, examine: Examine) -> None:
    assert {step.letter for step in examine(sound("gguf"), None).steps} == {"d", "f"}
    damaged = copied("gguf")
    planting.gguf_bytes(damaged, "blk.1.ssm_out.weight")[:2] = np.array(
        [np.inf], np.float16
    ).view(np.uint8)
    words = "blk.1.ssm_out.weight (Q8_0): 32 of 65,536 values are not finite"
    assert words in examine(damaged, None).headline


def test_a_type_that_does_not_fit_a_tensors_rows_is_named(
    copied: Sound, examine: Examine
) -> None:
    folder = copied("gguf")
    name = "blk.0.ssm_conv1d.weight"
    planting.retyped(folder, name, gguf.GGMLQuantizationType.Q4_0)
    with pytest.raises(KLLensError, match=f"{name} has 4 columns, which blocks of 32"):
        examine(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.gguf", b""),
        ("x.gguf", b"GGUF"),
        ("x.gguf", b"not a model at all, but long enough to be one"),
        (IR_FILE, b"<net>not a graph</net>"),
        ("model.safetensors", 8 * b"\x01" + b'{"__metadata__":{"format":"mlx"}}'),
    ],
)
def test_what_cannot_be_opened_gets_one_line(
    tmp_path: Path, folder: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(KLLensError, match=name) as error:
        dissected(tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(
        KLLensError, match="holds no model"
    ):  # the original has files as an MLX folder has them
        dissected(folder)
