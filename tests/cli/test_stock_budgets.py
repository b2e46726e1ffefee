"""Ours against every stock recipe at the recipe's own size, on a random model, as measured."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from kl_lens.base.errors import BudgetError
from kl_lens.judging.choosing import paired_difference
from kl_lens.run.folder import Run
from kl_lens.study.calibrate import CalibrateSettings
from kl_lens.study.measure import MeasureSettings
from kl_lens.study.plan import Choosing, plan_within
from kl_lens.study.planner import TargetPlanner
from kl_lens.study.session import Session
from kl_lens.study.settings import HeldOut, Limits
from kl_lens.targets import get_target
from tests.byte_level import save_tokenizer


@pytest.mark.parametrize(
    ("target", "every"),
    [
        ("gguf", 9),
        *(pytest.param(t, 1, marks=pytest.mark.slow) for t in ("gguf", "openvino")),
    ],
)
def test_our_plan_that_is_no_larger_is_never_worse(
    target: str, every: int, tiny_folder: Path, tmp_path: Path
) -> None:
    """No side of the model is a multiple of 256, and its head is tied. `every`: 9 for one of nine stock recipes."""
    pytest.importorskip(target, reason=f"needs the extra {target}")
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=32,
        state_size=32,
        n_groups=1,
        chunk_size=16,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    text = folder / "text.txt"
    save_tokenizer(folder, [text.read_text()], vocabulary=300)
    few = {
        "model": str(folder),
        "run": str(tmp_path / "run"),
        "text": str(text),
        "window_length": 32,
    }
    session = Session()
    session.do(CalibrateSettings.of(**few, windows=4))
    session.do(MeasureSettings.of(**few, windows=4, target=(target,)))
    held_out = HeldOut(held_out="wikitext2:train", held_out_windows=8)
    with Run.open(tmp_path / "run") as run:
        table = run.table(target=target)
        planner = TargetPlanner(session, run, target, held_out)
        meter = planner.halves[1]
        for rival in planner.rivals(table, None, everything=True)[::every]:
            limit = rival.file_bytes
            assert limit == get_target(target).file_bytes(
                planner.model, rival, exact=True
            )
            try:
                within = TargetPlanner(
                    session, run, target, held_out, limits=Limits(max_bytes=limit)
                )
                plan = plan_within(within, table, Choosing(name="ours"))
            except BudgetError:  # the short menu has nothing as small
                continue
            assert (plan.file_bytes or 0) <= (limit or 0), rival.name
            difference = paired_difference(
                meter.measure(plan.assignment).windows,
                meter.measure(rival.assignment).windows,
            )
            assert difference.value <= 2 * difference.standard_error, (
                rival.name,
                difference,
                plan.made_by,
            )
