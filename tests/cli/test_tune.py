"""`plan --tune`: the tuned weights are in the plan, in the run folder and in the file; without gain nothing changes."""

import json
from pathlib import Path

import pytest

from kl_lens.model import load
from kl_lens.run.folder import TUNING, Run
from kl_lens.run.records import Estimate
from kl_lens.targets import read_artifact
from kl_lens.weights.recipes import Recipe
from tests.cli.commands import done, refused


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
    done(measure_arguments, "--formats q4_0")
    plan = (
        f"plan --run {run} --max-bpw 6 --name small --held-out wikitext2:test "
        "--held-out-windows 4 --tune 8 --verify"
    ).split()
    capsys.readouterr()
    done(plan)
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
    done(plan)  # nothing is tuned twice
    assert "tuning small" not in "".join(capsys.readouterr())
    export = f"export --run {run} --plan small --target gguf --without-tokenizer".split()
    done(export)
    done(export, f"--weights disk --out {tmp_path / 'disk'}")
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
    assert "calibration and evaluation share a document" in refused(capsys, plan)
