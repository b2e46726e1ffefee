"""Stock recipes such as Q4_K_M, and what the targets say about themselves."""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import transformers

from kl_lens.model import LoadedModel
from kl_lens.run.records import Plan
from kl_lens.targets import TARGETS, describe_target, export, read_artifact
from kl_lens.targets.gguf.stock import FileTensors
from kl_lens.targets.openvino import stock
from kl_lens.weights.recipes import Recipe, fitting_recipe
from tests.families import _ATTENTION, _COMMON, plain, tiny_model
from tests.shipped import shipped_digests
from tests.targets.gguf.support import _falcon_h1, tiny


@pytest.fixture(scope="module")
def mamba() -> LoadedModel:
    return plain(LoadedModel("mamba", Path(), tiny_model("mamba"), None))


@pytest.fixture(scope="module")
def jamba() -> LoadedModel:
    return plain(LoadedModel("jamba", Path(), tiny_model("jamba"), None))


def recipes(target: str, model: LoadedModel) -> dict[str, dict[str, Recipe]]:
    stocked = describe_target(target).stock_recipes(model)
    assert all(recipe.origin for recipe in stocked)
    return {recipe.name: dict(recipe.assignment) for recipe in stocked}


@pytest.mark.parametrize("target", TARGETS)
def test_every_recipe_is_one_that_the_target_holds(
    target: str, mamba: LoadedModel, jamba: LoadedModel
) -> None:
    described = describe_target(target)
    for model in (mamba, jamba):
        shapes = {c.name: c.shape for c in model.anatomy.candidates}
        for assignment in recipes(target, model).values():
            assert set(assignment) == set(shapes)
            for name, recipe in assignment.items():
                assert described.holds(recipe.grid, shapes[name]) is None
    assert {recipe.grid.name for recipe in described.short_menu} < set(described.formats)
    for recipe in described.recipes((*described.formats, *described.small_formats)):
        assert described.holds(recipe.grid, (256, 256)) is None
    assert described.unsupported("mamba2") is None
    if target == "gguf":  # OpenVINO's graphs are proven, or refused, on the model itself
        assert "bert" in (described.unsupported("bert") or "")


def test_llama_cpp_treats_state_space_matrices_alike(mamba: LoadedModel) -> None:
    by_name = recipes("gguf", mamba)
    plain = [name for name in by_name if not name.endswith(".imatrix")]
    # the others need an importance matrix
    below = ["Q2_K", "IQ3_XS", "IQ3_S", "IQ3_M", "Q3_K_S", "Q3_K_M", "Q3_K_L"]
    assert plain == [*below, "Q4_0", "IQ4_XS", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"]
    # 64 and 128 columns hold no K-quant: what llama.cpp puts there instead. 5 columns of dt_proj hold no block.
    assert Counter(by_name["Q4_K_M"].values()) == {"q5_0": 12, "q8_0": 1, "fp16": 4}
    assert Counter(by_name["Q4_0"].values()) == {"q4_0": 12, "q8_0": 1, "fp16": 4}
    assert Counter(by_name["IQ4_XS"].values()) == {"iq4_nl": 12, "q8_0": 1, "fp16": 4}
    assert Counter(by_name["Q3_K_M"].values()) == {"q4_0": 12, "q8_0": 1, "fp16": 4}
    assert by_name["Q4_K_M"][mamba.anatomy.head] == "q8_0"  # in place of q6_k


def test_an_importance_matrix_is_for_all_but_the_head(mamba: LoadedModel) -> None:
    by_name = recipes("gguf", mamba)
    plain = {name for name in by_name if not name.endswith(".imatrix")} - {"Q8_0"}
    only = {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "Q2_K_S", "IQ3_XXS"}
    weighed = {f"{name}.imatrix" for name in plain | only}
    assert weighed == set(by_name) - plain - {"Q8_0"}
    for name in weighed:
        unweighed = by_name.get(name.removesuffix(".imatrix"), by_name[name])
        for component, recipe in by_name[name].items():
            assert recipe.grid.name == unweighed[component].grid.name
            weighs = component != mamba.anatomy.head and recipe.grid.name not in (
                "fp16",
                "q8_0",
            )
            assert recipe.method == ("imatrix" if weighs else "rtn")


def test_biases_are_not_counted() -> None:
    """llama.cpp gives some layers more bits by how many tensors of their kind came before."""
    parts = FileTensors(tiny("gpt2")).part_tensors
    assert [parts[f"transformer.h.{i}.mlp.c_proj"].layer for i in range(3)] == [0, 1, 2]


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}


@pytest.mark.parametrize("model", ["jamba", "narrow"])
def test_types_are_those_of_llama_quantize(model: str, tmp_path: Path) -> None:
    """Against `llama-quantize --dry-run` itself."""
    if shutil.which("llama-quantize") is None:
        pytest.skip("needs llama.cpp's llama-quantize on PATH")
    gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
    configs = {
        "jamba": lambda: transformers.JambaConfig(
            **_COMMON | _ATTENTION | WIDE,
            num_hidden_layers=16,
            attn_layer_period=4,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=1,
            num_experts_per_tok=1,
            mamba_d_state=8,
            mamba_dt_rank=8,
        ),
        "narrow": lambda: _falcon_h1(tie_word_embeddings=True),
    }
    opened = tiny(configs[model]())
    artifact = export(opened, Plan("fp16", {}, "test"), "gguf", tmp_path / "file")
    names: dict[str, str] = {}
    for tensor in artifact.tensors:
        names.setdefault(tensor.component, tensor.runtime_name)
    writer = gguf.GGUFWriter(
        tmp_path / "imatrix", "imatrix"
    )  # for a tensor that is not there
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["none"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 1)
    writer.add_tensor("none.in_sum2", np.ones((1, 32), np.float32))
    writer.add_tensor("none.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for recipe in describe_target("gguf").stock_recipes(opened):
        name, weighed, _ = recipe.name.partition(".imatrix")
        importance = ["--imatrix", str(tmp_path / "imatrix")] if weighed else []
        file = str(tmp_path / "file" / artifact.files[0])
        command = ["llama-quantize", *importance, "--dry-run", file, name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        quantized = dict(
            re.findall(
                r"^\[.*?\]\s+(\S+) .*\((\w+)\)$",
                shown.stdout + shown.stderr,
                re.MULTILINE,
            )
        )
        chosen = {
            names[c]: r.grid.name for c, r in recipe.assignment.items() if r != "fp16"
        }
        assert {
            name: kind.lower() for name, kind in quantized.items() if name in chosen
        } == chosen, recipe.name


def test_a_ratio_leaves_at_8_bits_what_nncf_leaves_there(mamba: LoadedModel) -> None:
    """Against NNCF itself, on a graph with one product for each matrix."""
    nncf = pytest.importorskip("nncf", reason="needs nncf")
    ov = pytest.importorskip("openvino", reason="needs the extra openvino")
    from openvino import opset13 as ops

    outer = {mamba.anatomy.embedding, mamba.anatomy.head}
    names = [
        c.name
        for c in mamba.anatomy.candidates
        if c.name not in outer and c.shape[-1] % 64 == 0
    ]
    inputs = []
    outputs = []
    for name in names:
        weight = mamba.parameters_of(mamba.anatomy.component(name))[0].detach().numpy()
        inputs.append(ops.parameter([-1, weight.shape[1]], np.float32, name=name))
        outputs.append(ops.matmul(inputs[-1], ops.constant(weight), False, True))
    graph = nncf.compress_weights(
        ov.Model(outputs, inputs),
        mode=nncf.CompressWeightsMode.INT4_SYM,
        ratio=0.8,
        group_size=64,
        all_layers=True,
        sensitivity_metric=nncf.SensitivityMetric.WEIGHT_QUANTIZATION_ERROR,
    )
    small = set()
    for parameter, name in zip(graph.get_parameters(), names, strict=True):
        (product,) = [
            reader.get_node() for reader in parameter.output(0).get_target_inputs()
        ]
        node = product.input_value(1).get_node()
        while node.get_type_name() != "Constant":
            node = node.input_value(0).get_node()
        if node.get_element_type().get_type_name() in ("i4", "u4"):
            small.add(name)
    order = stock.by_sensitivity(mamba, names)
    assert set(stock.least_sensitive(mamba, order, 0.8)) == small


@pytest.mark.parametrize(
    ("target", "recipes"),
    [
        ("openvino", ("uint4-g64",)),
        ("gguf", ("q8_0", "iq4_xs")),
        ("mlx", ("affine3-g64",)),
    ],
)
def test_sizes_are_known_before_a_file_is_written(
    target: str, recipes: tuple[str, ...], mamba: LoadedModel, tmp_path: Path
) -> None:
    pytest.importorskip(target, reason=f"needs the extra {target}")
    for recipe in ("fp16", *recipes):
        chosen = {
            c.name: fitting_recipe(Recipe(recipe), c.shape)[0]
            for c in mamba.anatomy.candidates
        }
        plan = Plan(f"all-{recipe}", chosen, "test")
        foretold = describe_target(target).file_bytes(mamba, plan)
        artifact = export(mamba, plan, target, tmp_path / recipe)
        # What the runtime loads; not our record, nor the tokenizer that lies beside an OpenVINO graph.
        loaded = [
            name
            for name in artifact.files
            if name.endswith((".gguf", ".xml", ".bin", ".safetensors"))
        ]
        assert artifact.realised_bytes == sum(
            (tmp_path / recipe / name).stat().st_size for name in loaded
        )
        if target != "openvino" or recipe == "fp16":
            assert foretold == artifact.realised_bytes
        else:  # the graph's file is estimated, and never too small
            matrices = len(mamba.anatomy.candidates)
            assert 0 <= foretold - artifact.realised_bytes < 1000 * matrices
        assert (
            describe_target(target).file_bytes(mamba, plan, exact=True)
            == artifact.realised_bytes
        )


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("mlx", "affine4-g32"),
        ("mlx", "affine8-g64"),
        *(("compressed-tensors", fmt) for fmt in ("int4-g32", "uint4-g32", "int8")),
    ],
)
def test_a_file_is_no_larger_than_its_parts_say(name: str, recipe: str) -> None:
    target = describe_target(name)
    if reason := target.lacks():
        pytest.skip(reason)
    model = plain(LoadedModel("mamba2", Path(), tiny_model("mamba2"), None))
    layers = [c for c in model.anatomy.candidates if c.kind in ("in_proj", "out_proj")]
    grid = Recipe(recipe).grid
    sizes = [
        target.file_bytes(model, Plan("p", assignment, "test"))
        for assignment in ({}, dict.fromkeys((c.name for c in layers), recipe))
    ]
    added = [grid.bytes(c.shape) - 2 * c.parameters for c in layers]
    bound = sizes[0] + sum(added) + len(layers) * target.overhead(grid)
    assert bound - 100 * len(layers) < sizes[1] <= bound
    assert target.overhead(Recipe("fp16").grid) == 0


@pytest.mark.parametrize(
    ("target", "recipe"),
    [("openvino", "uint2-g64"), ("gguf", "q8_0"), ("mlx", "affine4-g32")],
)
def test_digests_are_those_of_the_bytes_in_the_file(
    target: str, recipe: str, mamba: LoadedModel, tmp_path: Path
) -> None:
    pytest.importorskip(target, reason=f"needs the extra {target}")
    name = "backbone.layers.0.mixer.in_proj"
    for plan in ({}, {name: recipe}):
        export(mamba, Plan("p", plan, "test"), target, tmp_path / str(len(plan)))
    before, after = (shipped_digests(tmp_path / n) for n in ("0", "1"))
    changed = {tensor for tensor in before if before[tensor] != after[tensor]}
    tensors = read_artifact(tmp_path / "1").tensors
    assert changed == {t.runtime_name for t in tensors if t.component == name}
    assert all(after[tensor.runtime_name] == tensor.digest for tensor in tensors)
