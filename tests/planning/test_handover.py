"""What other tools make of our plans: the type of every tensor is the planned one.

llama-quantize is not among our dependencies: what the files say is compared. NNCF's test is beside those of OpenVINO,
which make its graph.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kl_lens.base.errors import PlanError, UnlearntError
from kl_lens.measuring.statistics import gather
from kl_lens.model import LoadedModel
from kl_lens.planning.handover import TOOLS, write_recipe
from kl_lens.run.records import Plan
from kl_lens.targets.gguf.export import export
from kl_lens.weights.recipes import Recipe, fitting_recipe
from tests.families import plain
from tests.measuring.conftest import loaded, some_windows

INTEGERS = ("int4-g32", "int8-g128", "fp16", "uint4-g64")


def in_turn(model: LoadedModel, formats: tuple[str, ...], *without: str) -> Plan:
    """The formats in turn, where they fit; fp16 for families of components that a tool cannot quantize."""
    chosen = {}
    for index, component in enumerate(model.anatomy.candidates):
        wanted = Recipe.parse(formats[index % len(formats)])
        fits = (
            wanted.grid.fits(component.shape) is None and component.family not in without
        )
        chosen[component.name] = str(wanted if fits else "fp16")
    return Plan("mixed", chosen, "test")


# -- llama.cpp --------------------------------------------------------------------------------------------------


def gguf_plan(model: LoadedModel) -> Plan:
    """Recipes that learn and that do not, replaced as in the file where they do not fit."""
    formats = ("q4_0+imatrix", "q8_0", "fp16", "iq4_nl+imatrix", "q5_0")
    chosen = {
        c.name: str(fitting_recipe(Recipe.parse(formats[i % len(formats)]), c.shape)[0])
        for i, c in enumerate(model.anatomy.candidates)
    }
    return Plan("mixed", chosen, "test")


@pytest.fixture(scope="module", params=["mamba2", "jamba"])
def handed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """A plan, its recipe for llama.cpp, and our own file of it."""
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp(request.param)
    model = plain(loaded(request.param))
    statistics = gather(model, some_windows(3, 20), folder)
    model = model.with_store(statistics=statistics)
    plan = gguf_plan(model)
    recipe = write_recipe("llama.cpp", model, plan, folder / "recipe", statistics)
    artifact = export(model, plan, folder / "ours", include_tokenizer=False)
    return {
        "use": recipe.use,
        "folder": folder,
        "statistics": statistics,
        "artifact": artifact,
        "ours": folder / "ours" / artifact.files[0],
    }


def tensors(path: Path) -> dict[str, Any]:
    import gguf

    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_every_matrix_has_one_line_with_its_type(handed: dict[str, Any]) -> None:
    lines = (handed["folder"] / "recipe/tensor-types.txt").read_text().split()
    types = [line.rpartition("=")[::2] for line in lines]
    count = 0
    for name, tensor in tensors(handed["ours"]).items():
        kinds = [kind for pattern, kind in types if re.search(pattern, name)]
        assert len(kinds) <= 1
        if kinds:
            assert kinds[0] == tensor.tensor_type.name.lower()
            count += 1
        else:  # llama-quantize leaves it alone
            assert tensor.tensor_type.name == "F32"
    assert count == len(types)
    assert "--imatrix" in handed["use"]


def test_the_importance_matrix_holds_our_statistics(handed: dict[str, Any]) -> None:
    matrix = tensors(handed["folder"] / "recipe/imatrix.gguf")
    learnt = [
        t for t in handed["artifact"].tensors if Recipe.parse(t.planned).quantizer.learns
    ]
    assert learnt
    named = {name.removesuffix(".in_sum2").removesuffix(".counts") for name in matrix}
    assert named == {t.runtime_name for t in learnt}
    for tensor in learnt:
        statistics = handed["statistics"].of(tensor.component)
        sums = matrix[f"{tensor.runtime_name}.in_sum2"].data
        counts = matrix[f"{tensor.runtime_name}.counts"].data
        importance = np.atleast_2d(
            statistics.second_moments.diagonal(dim1=-2, dim2=-1).numpy()
        )
        assert counts.reshape(-1).tolist() == [
            float(max(1, n)) for n in statistics.tokens
        ]
        used = importance.sum(1) > 0
        assert np.allclose(
            (sums / counts)[used],
            importance[used],
            rtol=1e-5,
            atol=1e-5 * importance.max(),
        )


# -- tools that read PyTorch's or MLX's layers ------------------------------------------------------------------


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_tool_cannot_say_is_refused_with_the_component(
    tool: str, tmp_path: Path
) -> None:
    model = loaded("mamba")
    name = model.anatomy.candidates[1].name
    foreign = "q4_0" if tool != "llama.cpp" else "nf4"
    with pytest.raises(PlanError, match=re.escape(name)):
        write_recipe(tool, model, Plan("p", {name: foreign}, "test"), tmp_path / "recipe")
    if tool == "llama.cpp":
        learning = Plan("p", {name: "q4_0+imatrix"}, "test")
        with pytest.raises(UnlearntError, match=re.escape(name)):
            write_recipe(tool, model, learning, tmp_path / "recipe")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["mamba", "falcon_h1", "jamba", "nemotron_h"])
def test_mlx_lm_gives_every_layer_its_bits(family: str, tmp_path: Path) -> None:
    utils = pytest.importorskip("mlx_lm.utils", reason="needs mlx-lm")
    model = loaded(family)
    plan = in_turn(model, INTEGERS, "moe")
    write_recipe("mlx-lm", model, plan, tmp_path)
    layers = json.loads((tmp_path / "quantization.json").read_text(encoding="utf-8"))
    config = model.config.to_dict()
    kind, arguments = utils._get_classes(config)
    quantized_model, _ = utils.quantize_model(
        kind(arguments.from_dict(config)),
        config,
        32,
        4,
        quant_predicate=lambda path, *_: layers.pop(path, False),
    )
    assert not layers
    layers = {
        path: (layer.bits, layer.group_size)
        for path, layer in quantized_model.named_modules()
        if hasattr(layer, "bits")
    }
    prefix = "backbone." if family == "nemotron_h" else "model."  # what mlx-lm calls it
    grids = {
        re.sub(r"^model\.", prefix, name): Recipe.parse(text).grid
        for name, text in plan.assignment.items()
        if text != "fp16"
    }
    assert layers == {name: (fmt.bits, fmt.group_size) for name, fmt in grids.items()}
