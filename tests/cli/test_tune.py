"""`plan --tune`: the tuned weights are in the plan, in the run folder and in the file; without gain nothing changes."""

import json
from pathlib import Path

import pytest

from kl_lens.cli.main import main
from kl_lens.model import load
from kl_lens.run.folder import TUNING, Run
from kl_lens.run.records import Estimate
from kl_lens.targets import read_artifact
from kl_lens.weights.recipes import Recipe


@pytest.mark.parametrize("helps", [True, False])
def test_tuned_weights_reach_the_file_if_held_out_text_agrees(
    helps: bool,
    measure_arguments: list[str],
    tiny_folder: Path,
    tmp_path: Path,
    capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    if not helps:
        worse = Estimate(1.0, 0.1)
        monkeypatch.setattr(
            "kl_lens.study.plan.paired_difference",
            lambda tuned_windows, plain_windows: worse,
        )
    assert main([*measure_arguments, "--formats", "q4_0"]) == 0
    plan = [
        "plan",
        "--run",
        str(run),
        "--max-bpw",
        "6",
        "--name",
        "small",
        "--held-out",
        "wikitext2:test",
        "--held-out-windows",
        "4",
        "--tune",
        "8",
        "--verify",
    ]
    capsys.readouterr()
    assert main(plan) == 0
    output = capsys.readouterr()
    assert ("tuning did not help" in output.out + output.err) is not helps
    written = json.loads((run / "plans/small.json").read_text())
    tuned = {
        name: Recipe.parse(r)
        for name, r in written["assignment"].items()
        if "+tuned-" in r
    }
    assert bool(tuned) is helps
    if not helps:
        return
    assert written["measured"]["kl"]["value"] > 0
    assert main(plan) == 0  # nothing is tuned twice
    assert "tuning small" not in "".join(capsys.readouterr())
    export = [
        "export",
        "--run",
        str(run),
        "--plan",
        "small",
        "--target",
        "gguf",
        "--without-tokenizer",
    ]
    assert main(export) == 0
    assert main([*export, "--weights", "disk", "--out", str(tmp_path / "disk")]) == 0
    store = load(str(tiny_folder)).with_store(folder=run / "weights").weights
    for folder in (run / "artifacts/gguf/small", tmp_path / "disk/small"):
        shipped = {
            tensor.component: tensor
            for tensor in read_artifact(folder).tensors
            if tensor.component in tuned
        }
        assert shipped.keys() == tuned.keys()
        for name, tensor in shipped.items():
            assert tensor.weights == store.digest(name, tuned[name])
            assert tensor.weights != store.digest(name, Recipe(tuned[name].grid.name))
    with Run.open(run) as opened:
        ((digest, text),) = opened.load_all(TUNING).items()
        assert text["windows"] == 8
        opened.store(
            TUNING,
            digest,
            text | {"source": "wikitext2", "split": "test", "windows": 1000},
        )
    capsys.readouterr()
    assert main(plan) == 1  # a plan is not judged on text that one was tuned on
    assert "calibration and evaluation share a document" in capsys.readouterr().err
