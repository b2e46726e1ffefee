"""`kl-lens evaluate` as a user goes about it: a whole run in one command, stopped, damaged, taken up again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kl_lens.cli.main import main
from kl_lens.judging import evaluator, read_scores
from kl_lens.run.folder import Run
from kl_lens.targets.registry import describe_target
from tests.cli.commands import done, refused

pytest.importorskip("openvino", reason="needs the extra openvino")

SHORT = ["--window-length", "48", "--windows", "4", "--threads", "1"]


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two plans, one of them exported, and a held-out text beside it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    text = (tiny_folder / "text.txt").read_text().split("\n\n")
    (folder.parent / "calibration.txt").write_text("\n\n".join(text[: len(text) // 2]))
    (folder.parent / "held_out.txt").write_text("\n\n".join(text[len(text) // 2 :]))
    done(
        f"measure {tiny_folder} --run {folder} --text {folder.parent / 'calibration.txt'} "
        "--windows 2 --window-length 32 --components in_proj|out_proj"
    )
    for name, bits in (("small", "9"), ("large", "13")):
        done(f"plan --run {folder} --max-bpw {bits} --name {name}")
    done(f"export --run {folder} --target openvino --plan small")
    return folder


@pytest.fixture
def run_folder(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def held_out(finished: Path) -> str:
    return str(finished.parent / "held_out.txt")


def evaluated(capsys, *arguments: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["evaluate", *arguments, *SHORT, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_whole_run_in_one_command(run_folder: Path, held_out: str, capsys) -> None:
    command = f"--run {run_folder} --perplexity {held_out} --divergence".split()
    result = evaluated(capsys, *command, "--exact")
    kinds = {(s["subject"], s["kind"]) for s in result["scores"]}
    plans = ("torch/large", "torch/small", "openvino/small (exact)")
    assert kinds == {("original", "perplexity")} | {
        (p, k) for p in plans for k in ("perplexity", "divergence")
    }
    (agreement,) = result["agreements"]
    assert agreement["verdict"] == "agrees"
    assert agreement["counterpart"] == "torch/small", (
        "the plan: the file holds the formats that were planned"
    )
    by_name = {s["subject"]: s for s in result["scores"] if s["kind"] == "perplexity"}
    # Norms and convolutions, which no plan names, are FP16 in the file.
    assert by_name["openvino/small (exact)"]["values"]["token_perplexity"][
        "value"
    ] == pytest.approx(
        by_name["torch/small"]["values"]["token_perplexity"]["value"], rel=1e-3
    )
    assert (
        by_name["original"]["protocol"].items()
        >= {"window": 48, "stride": 48, "limit": 4}.items()
    )

    done("evaluate", command, "--exact", SHORT)  # as a table, from what is stored
    out = capsys.readouterr().out
    for words in (
        "token perplexity",
        "word perplexity",
        "Δ token perplexity",
        "agrees with PyTorch?",
        "99.9 %",
        "4 windows of 48 tokens",
        "standard error over windows",
        "same top token",
    ):
        assert words in out


def test_stopped_and_taken_up_again(
    run_folder: Path, held_out: str, capsys, monkeypatch
) -> None:
    command = (
        f"--run {run_folder} --perplexity {held_out} --divergence --target torch".split()
    )
    original = evaluator.score_logits
    scored: list[int] = []

    def interrupted(logits, window, *arguments):
        if len(scored) == 6:
            raise KeyboardInterrupt  # not a signal: with OpenVINO and GenAI loaded, one would end the process
        scored.append(window.targets)
        return original(logits, window, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(evaluator, "score_logits", interrupted)
        assert main(["evaluate", *command, *SHORT]) == 130
    assert "Run the same command to continue" in capsys.readouterr().err
    with Run.open(run_folder) as run:
        assert [score.subject.label for score in read_scores(run)] == ["original"]
    resumed = evaluated(capsys, *command)
    fresh = evaluated(capsys, *command, "--again")
    assert [s["values"] for s in resumed["scores"]] == [
        s["values"] for s in fresh["scores"]
    ]


def test_a_file_alone(run_folder: Path, held_out: str, capsys) -> None:
    folder = str(run_folder / "artifacts/openvino/small")
    result = evaluated(capsys, folder, "--perplexity", held_out)
    assert [s["subject"] for s in result["scores"]] == [folder]
    model = str(Run.open(run_folder).identity["source"])
    beside = evaluated(
        capsys,
        folder,
        "--model",
        model,
        "--perplexity",
        held_out,
        "--divergence",
        "--exact",
    )
    assert [a["counterpart"] for a in beside["agreements"]] == ["torch/small as openvino"]
    named = evaluated(capsys, folder, "--run", str(run_folder), "--perplexity", held_out)
    assert [s["subject"] for s in named["scores"]] == ["original", "openvino/small"]


def test_files_of_others_side_by_side(
    tiny_folder: Path, held_out: str, tmp_path: Path, capsys
) -> None:
    """Folders without our record, one for each runtime: as others publish them."""
    formats = {
        "openvino": "int8",
        "gguf": "q8_0",
        "mlx": "affine8-g64",
        "compressed-tensors": "int8",
    }
    folders = []
    for target in (name for name in formats if describe_target(name).lacks() is None):
        for name in (
            formats[target],
            *([] if target == "compressed-tensors" else ["fp16"]),
        ):
            folders.append(str(tmp_path / f"{target}-{name}"))
            export = f"export {tiny_folder} --target {target} --format {name} --out {folders[-1]}".split()
            done(export, ["--without-tokenizer"] if target == "gguf" else [])
            Path(folders[-1], "artifact.json").unlink()
    chart = tmp_path / "duel.svg"
    compare = f"compare --model {tiny_folder} --text {held_out}".split()
    compare += ["--windows", "2", "--window-length", "32"]
    capsys.readouterr()
    done(compare, folders, f"--chart {chart} --json")
    result = json.loads(capsys.readouterr().out)
    entrants = result["files"]
    assert not result["failures"]
    assert len(entrants) == len(folders)
    assert [file["bytes"] for file in entrants] == sorted(
        file["bytes"] for file in entrants
    )
    for runtime in {file["runtime"] for file in entrants} - {"compressed-tensors"}:
        small, whole = (file for file in entrants if file["runtime"] == runtime)
        assert small["kl_mean"]["value"] > whole["kl_mean"]["value"]
    drawn = chart.read_text()
    assert drawn.startswith("<!-- KL Lens -->\n<svg")
    assert all(file["file"] in drawn for file in entrants)
    done(compare, folders[:2])
    shown = capsys.readouterr().out
    assert "Side by side" in shown
    assert "Every larger file loses less" in shown
    assert "two files or more" in refused(capsys, compare, f"{folders[0]}")


def test_tasks_with_a_limit(run_folder: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    rows = [
        {"goal": f"the game {n}", "sol1": "in the city", "sol2": "at it", "label": n % 2}
        for n in range(6)
    ]
    (tmp_path / "piqa_validation.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    command = (
        f"--run {run_folder} --target torch --plan large --tasks piqa --task-data {tmp_path} "
        "--task-drop 3%"
    ).split()
    result = evaluated(capsys, *command)
    assert [(s["subject"], s["kind"], s["tokens"]) for s in result["scores"]] == [
        ("original", "task", 6),
        ("torch/large", "task", 6),
    ]
    assert result["scores"][1]["values"].keys() >= {"acc", "acc_norm", "acc_drop"}
    (verdict,) = result["verdicts"]
    assert (
        verdict["verdict"] == "not decided"
    )  # six examples cannot decide about three points
    done("evaluate", command, "--task-limit 4", SHORT)
    out = capsys.readouterr().out
    assert "near chance (50 %)" in out
    assert "not decided" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--perplexity", "CALIBRATION"], "calibration and evaluation share"),
        (["--plan", "best (v2)"], "'best (v2)' is not a valid plan name"),
        (["--plan", "nothing"], "has no plan 'nothing'; it has large, small"),
        (["--target", "onnx"], "--target onnx: expected one of openvino"),
        (["--tasks", "piqa", "--task-data", "nowhere"], "nowhere"),
    ],
)
def test_bad_requests_are_one_line(
    arguments: list[str], message: str, run_folder: Path, finished: Path, capsys
) -> None:
    arguments = [
        str(finished.parent / "calibration.txt") if a == "CALIBRATION" else a
        for a in arguments
    ]
    assert main(["evaluate", "--run", str(run_folder), *arguments, *SHORT]) == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert message in errors[-1]
    assert not any(line.startswith("Traceback") for line in errors)
