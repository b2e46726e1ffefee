"""Stock recipes quantized by the CPU while a GPU measures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kl_lens.measuring.perturbation import swapped
from kl_lens.model import load
from kl_lens.study.meanwhile import quantizing_for
from kl_lens.targets import get_target
from kl_lens.weights.formats import gguf_blocks
from kl_lens.weights.recipes import parsed

pytest.importorskip("gguf", reason="needs the extra gguf")


@pytest.mark.slow
def test_the_cache_gets_the_original_weights_whatever_the_model_holds_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("reference:mamba")
    (stock,) = [s for s in get_target("gguf").stock_recipes(model) if s.plan_name == "stock.q4_k_m"]
    searched = {name: recipe for name, recipe in parsed(stock.assignment).items() if recipe.grid.searches}
    expected = model.with_store().weights.digests(searched)
    parameters = [p for name in searched for p in model.parameters_of(model.anatomy.component(name))]
    with (
        quantizing_for([stock], model, tmp_path) as thread,
        swapped([(p, torch.zeros_like(p)) for p in parameters]),
    ):
        thread.join()
    monkeypatch.setattr(gguf_blocks, "quantize_rows", None)  # from the cache, or not at all
    assert model.with_store(folder=tmp_path).weights.digests(searched) == expected
