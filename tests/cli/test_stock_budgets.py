"""Ours against every stock recipe at the recipe's own size, on random models of several shapes, as measured."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kl_lens import planning
from kl_lens.base.errors import BudgetError
from kl_lens.model import load
from kl_lens.run.folder import Run
from kl_lens.study import CalibrateSettings, ExportSettings, MeasureSettings, PlanSettings, Session, perform
from kl_lens.study.plan import Choosing, plan_within
from kl_lens.study.planner import TargetPlanner
from kl_lens.study.settings import HeldOut, Limits
from kl_lens.targets import get_target
from kl_lens.weights.recipes import Recipe
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
NARROW = mamba2(64, 4, 2, tie_word_embeddings=True)


def opened(config: transformers.PretrainedConfig, tiny_folder: Path, place: Path) -> dict[str, Any]:
    """A random model with a tokenizer and a text; what `calibrate` and `measure` need of it."""
    folder = place / "model"
    shutil.copytree(tiny_folder, folder)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder, [(folder / "text.txt").read_text()])
    text = str(folder / "text.txt")
    return {"model": str(folder), "run": str(place / "run"), "text": text, "window_length": 32}


def require_never_worse(
    config: transformers.PretrainedConfig, target_name: str, tiny_folder: Path, place: Path, every: int = 1
) -> None:
    """`every`: 6 for one of six stock recipes."""
    pytest.importorskip(target_name, reason=f"needs the extra {target_name}")
    target = get_target(target_name)
    session, few = Session(), opened(config, tiny_folder, place)
    perform(CalibrateSettings.of(**few, windows=4), session)
    perform(MeasureSettings.of(**few, windows=4, target=target_name), session)
    held_out = HeldOut(held_out="wikitext2:train", held_out_windows=8)
    with Run.open(place / "run") as run:
        table, planner = run.table(target=target_name), TargetPlanner(session, run, target_name, held_out)
        meter = planner.halves[1]
        for rival in planner.rivals(table, None, everything=True)[::every]:
            limit = rival.file_bytes
            assert limit == target.file_bytes(planner.model, rival, exact=True)
            try:
                ours = plan_within(planner, table, Limits(max_bytes=limit), Choosing(name="ours"))
            except BudgetError:  # the short menu has nothing as small
                continue
            assert (ours.file_bytes or 0) <= (limit or 0), rival.name
            difference = planning.paired_difference(
                meter.measure(ours.assignment).windows, meter.measure(rival.assignment).windows
            )
            assert difference.mean <= 2 * difference.standard_error, (rival.name, difference, ours.made_by)


@pytest.mark.parametrize("target", [pytest.param("openvino", marks=pytest.mark.slow), "gguf"])
def test_our_plan_that_is_no_larger_is_never_worse(target: str, tiny_folder: Path, tmp_path: Path) -> None:
    require_never_worse(NARROW, target, tiny_folder, tmp_path, every=9)


@pytest.mark.slow  # ggml prepares its tables for every IQ type
def test_a_size_below_four_bits_is_met_with_smaller_types(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra gguf")
    session, few = Session(), opened(mamba(256, 2, tie_word_embeddings=True), tiny_folder, tmp_path)
    weights = sum(c.parameters for c in load(few["model"]).anatomy.components)
    limit = int(3 * weights / 8) + 30_000  # the file's header, and matrices that do not fit, besides
    perform(CalibrateSettings.of(**few, windows=8), session)
    perform(MeasureSettings.of(**few, windows=8, target="gguf", max_bytes=limit), session)
    (plan,) = perform(
        PlanSettings.of(model=few["model"], run=few["run"], target="gguf", name="small", max_bytes=limit),
        session,
    ).plans
    assert {Recipe.parse(recipe).grid.bits for recipe in plan.assignment.values()} & {2, 3}
    settings = ExportSettings(
        model=few["model"], run=few["run"], target="gguf", plan="small", options={"include_tokenizer": False}
    )
    ((_, artifact),) = perform(settings, session).artifacts  # llama.cpp has opened it
    assert artifact.realised_bytes <= limit
    assert {t.component: t.realised for t in artifact.tensors}.items() >= plan.assignment.items()
