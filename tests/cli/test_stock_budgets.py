"""Ours against every stock recipe at the recipe's own size, on random models of several shapes, as measured."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kl_lens import planning
from kl_lens.errors import BudgetError
from kl_lens.pipeline import CalibrateSettings, MeasureSettings, PlanSettings, Workbench, perform
from kl_lens.pipeline.events import Events
from kl_lens.pipeline.planning import plan_within_budget
from kl_lens.pipeline.rivals import rival_plans
from kl_lens.pipeline.target_planner import TargetPlanner
from kl_lens.runs import Run
from kl_lens.targets import get_target
from tests.byte_level import save_tokenizer
from tests.families import VOCABULARY


def mamba2(hidden: int, heads: int, layers: int, **more: Any) -> transformers.PretrainedConfig:
    return transformers.Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_heads=heads,
        head_dim=2 * hidden // heads, state_size=32, n_groups=1, chunk_size=16, **more,
    )  # fmt: skip


def mamba(hidden: int, layers: int, **more: Any) -> transformers.PretrainedConfig:
    return transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, state_size=16, num_hidden_layers=layers, **more
    )


# The reported shape, a tenth as wide: no side is a multiple of 256, the head is tied.
NARROW = mamba2(64, 4, 3, tie_word_embeddings=True)
OTHERS = {
    "mamba2, 12 blocks of 320": mamba2(320, 10, 12, tie_word_embeddings=True),
    "mamba2, untied": mamba2(96, 6, 4, tie_word_embeddings=False),
    "mamba, tied": mamba(128, 5, tie_word_embeddings=True),
    "mamba, untied": mamba(160, 3, tie_word_embeddings=False),
    "mamba, multiples of 256": mamba(256, 4, tie_word_embeddings=True),
}


def require_never_worse(
    config: transformers.PretrainedConfig, target_name: str, tiny_folder: Path, place: Path
) -> None:
    pytest.importorskip(target_name, reason=f"needs the extra {target_name}")
    folder, target = place / "model", get_target(target_name)
    shutil.copytree(tiny_folder, folder)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    text = str(folder / "text.txt")
    save_tokenizer(folder, [(folder / "text.txt").read_text()])
    bench, few = (
        Workbench(),
        {"model": str(folder), "run": str(place / "run"), "text": text, "window_length": 32},
    )
    perform(CalibrateSettings(**few, windows=8), bench)
    perform(MeasureSettings(**few, windows=8, target=target_name), bench)
    settings = PlanSettings(
        run=str(place / "run"),
        target=target_name,
        name="ours",
        held_out_windows=16,
        held_out="wikitext2:train",
    )
    with Run.open(place / "run") as run:
        table, planner = run.table(target=target_name), TargetPlanner(settings, run, bench)
        meter = planner.halves[1]
        for rival in rival_plans(planner, table, None, everything=True):
            limit = rival.file_bytes
            assert limit == target.exact_file_bytes(planner.model, rival)
            try:
                within = replace(settings, max_bytes=limit)
                ours = plan_within_budget(within, run, table, planner, Events())
            except BudgetError:  # the short menu has nothing as small
                continue
            assert (ours.file_bytes or 0) <= (limit or 0), rival.name
            difference = planning.paired_difference(
                meter.kl_by_window(ours.assignment), meter.kl_by_window(rival.assignment)
            )
            assert difference.mean <= 2 * difference.standard_error, (rival.name, difference, ours.made_by)


@pytest.mark.parametrize("target", [pytest.param("openvino", marks=pytest.mark.slow), "gguf"])
def test_our_plan_that_is_no_larger_is_never_worse(target: str, tiny_folder: Path, tmp_path: Path) -> None:
    require_never_worse(NARROW, target, tiny_folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["openvino", "gguf"])
@pytest.mark.parametrize("shape", OTHERS)
def test_our_plan_is_never_worse_on_other_shapes(
    shape: str, target: str, tiny_folder: Path, tmp_path: Path
) -> None:
    require_never_worse(OTHERS[shape], target, tiny_folder, tmp_path)
