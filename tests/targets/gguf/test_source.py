"""A GGUF file as the model: what it was made from comes back, or one line says why not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kl_lens.base.errors import CheckpointError
from kl_lens.cli.main import main
from kl_lens.model import load
from kl_lens.run.records import Plan
from kl_lens.targets.gguf.export import export
from kl_lens.targets.gguf.header import read_header
from kl_lens.targets.gguf.vocabulary import write_tokenizer
from kl_lens.text.windows import beginning_of
from kl_lens.weights.formats import get_format
from tests.families import token_ids
from tests.targets.gguf.support import (
    CONFIGS,
    matrices,
    small_mamba,
    stored,
    tiny,
    torch_logits,
    uniform,
)

pytest.importorskip("gguf")
REFUSED = ("kimi_linear", "bailing_hybrid")
IDS = token_ids(1, 40)
# These stand for the others: experts, factors inside the weights, changed rows and columns, transposed matrices.
FIRST = (
    "llama 3",
    "phi3 tied, with longrope",
    "gpt2",
    "falcon_h1 tied, without norm",
    "granitemoehybrid",
    "qwen3_5_text, two value heads to a key head",
    "nemotron_h with experts",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow)
        for name in CONFIGS
        if not name.startswith(REFUSED)
    ],
)
def test_the_model_comes_back(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    artifact = export(model, uniform(model, "fp32"), tmp_path)
    opened = load(tmp_path / artifact.files[0])
    assert opened.original == ""
    assert f"{opened.name}.gguf" == artifact.files[0]
    limit = 1e-5 * max(1.0, float(np.ptp(torch_logits(model, IDS))) / 4)
    difference = torch_logits(opened, IDS) - torch_logits(model, IDS)
    assert np.abs(difference).max() < limit


@pytest.mark.parametrize("name", REFUSED)
def test_other_families_are_named_with_the_way_out(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    artifact = export(model, uniform(model, "fp32"), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"cannot open GGUF files of \S+ models; give .* --template"
    ):
        load(tmp_path / artifact.files[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of several parts, in Q8_0 and Q4_0."""
    place = tmp_path_factory.mktemp("parts")
    model = tiny("jamba with experts")
    plan = uniform(model, "q8_0")
    name = "model.layers.0.mamba.in_proj"
    plan = replace(plan, assignment=plan.assignment | {name: "q4_0"})
    export(model, plan, place, part_bytes=60_000)
    return place


def test_quantized_weights_are_the_files_own_wherever_they_are(folder: Path) -> None:
    """From a folder with parts, or one of them; read whole, or block by block."""
    part = sorted(folder.glob("*.gguf"))[1]
    model = tiny("jamba with experts")
    opened = load(part)
    streamed = load(folder, weights="disk")
    assert opened.original == "compared with this Q8_0 file, not with the original"
    assert opened.original in opened.notes
    for name in matrices(model):
        if name.endswith(("conv1d", "A_log", "router")):
            continue
        fmt = "q4_0" if name == "model.layers.0.mamba.in_proj" else "q8_0"
        component = model.anatomy.component(name)
        weight = model.tensor(component.weight)
        if get_format(fmt).fits(weight.shape):
            continue
        expected = get_format(fmt).roundtrip(weight)
        assert torch.equal(opened.tensor(component.weight), expected), name
        assert torch.equal(streamed.tensor(component.weight), expected), name
    assert opened.fingerprint == streamed.fingerprint


def _without(tensor: str) -> Callable[[bytes], bytes]:
    other = tensor[:-1] + ("x" if tensor[-1] != "x" else "y")
    return lambda data: data.replace(tensor.encode(), other.encode())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            _without("blk.0.ssm_out.weight"),
            r"lacks blk\.0\.ssm_out\.weight|ssm_out\.weighx has",
        ),
        (
            lambda data: data.replace(b"mamba.ssm.state_size", b"mamba.ssm.state_sizf"),
            r"cannot be opened|has shape|cannot be read",
        ),
        (lambda data: data.replace(b"architecture", b"architexture"), r"of \? models"),
    ],
)
def test_a_file_that_does_not_fit_itself_is_refused_in_one_line(
    change: Callable[[bytes], bytes], complaint: str, tmp_path: Path
) -> None:
    model = small_mamba()
    artifact = export(model, uniform(model, "fp32"), tmp_path)
    file = tmp_path / artifact.files[0]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=complaint) as caught:
        load(file)
    assert "\n" not in str(caught.value)


def test_bos_comes_back(tmp_path: Path) -> None:
    model = load("reference:mamba")
    artifact = export(model, Plan("p", {}, "test"), tmp_path)
    file = tmp_path / artifact.files[0]
    opened = load(file)
    assert opened.tokenizer.eos_token == model.tokenizer.eos_token
    assert beginning_of(opened.tokenizer) is None
    ids = model.tokenizer("A text.")["input_ids"]
    assert opened.tokenizer.decode(ids) == "A text."
    info = read_header(file, whole=True)
    begun = info.metadata | {
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    write_tokenizer(replace(info, metadata=begun), tmp_path / "begun")
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "begun")
    assert beginning_of(other) == 0


def test_a_file_is_its_own_template(tmp_path: Path) -> None:
    """Metadata that KL Lens does not know, and small tensors, are in the file that is made of it, byte for byte."""
    model = small_mamba()
    first = tmp_path / export(model, uniform(model, "q8_0"), tmp_path).files[0]
    content = first.read_bytes().replace(b"general.name", b"general.nome")
    first.write_bytes(content)
    opened = load(first)
    artifact = export(opened, uniform(opened, "q4_0"), tmp_path / "out")
    before = read_header(first, whole=True)
    after = read_header(tmp_path / "out" / artifact.files[0], whole=True)
    assert after.metadata["general.nome"] == before.metadata["general.nome"]
    small = {entry.name: entry for entry in before.tensors if entry.type == "F32"}
    assert "blk.0.ssm_a" in small
    for entry in after.tensors:
        assert entry.type in ("Q4_0", "F16") or stored(entry) == stored(small[entry.name])
    assert {c.name for c in opened.anatomy.components} <= {
        tensor.component for tensor in artifact.tensors
    }


def test_inspect_says_what_numbers_compare_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(folder)]) == 0
    said = capsys.readouterr()
    assert "compared with this Q8_0 file, not with the original" in said.out
