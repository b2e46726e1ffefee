"""`--memory`: what fits, before anything is downloaded; plans over weights and caches; the report of states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kl_lens.cli.main import main
from kl_lens.reporting import write_report
from kl_lens.run.folder import Run

USE = ["--context", "8k", "--batch", "4"]


def test_inspect_says_what_fits_from_the_configuration_alone(
    saved, tmp_path: Path, capsys
) -> None:
    folder = saved("falcon_h1")
    (folder / "model.safetensors").unlink()
    arguments = ["inspect", str(folder), *USE]
    assert main([*arguments, "--memory", "1GB", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["context"], result["batch"]) == (8192, 4)
    row = next(
        row
        for row in result["rows"]
        if row["target"] == "gguf" and row["format"] == "fp16"
    )
    assert (
        row["caches"] == 3 * 2 * 2 * 16 * 2 * 8192 * 4
    )  # blocks, keys and values, heads, width, bytes
    assert row["total"] == sum(
        row[part] for part in ("file", "states", "caches", "runtime")
    )
    assert main([*arguments, "--memory", "1GB"]) == 0
    assert (
        f"Next: kl-lens run {folder} --memory 1GB --context 8192 --batch 4"
        in capsys.readouterr().out
    )
    assert main([*arguments, "--memory", "1MB"]) == 0
    assert "Nothing fits into 1MB" in capsys.readouterr().out
    assert main(arguments) == 1
    assert "--context and --batch say what --memory is for" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and caches of the hybrid, each in two formats, on little text."""
    folder = tmp_path_factory.mktemp("memory") / "run"
    start = [
        "measure",
        "reference:hybrid",
        "--run",
        str(folder),
        "--windows",
        "2",
        "--window-length",
        "48",
    ]
    assert main([*start, "--formats", "q4_0,q8_0"]) == 0
    assert (
        main(
            [*start, "--states", "--formats", "q4_0,q8_0", "--components", "keys|values"]
        )
        == 0
    )
    return folder


def test_a_plan_for_a_memory_chooses_the_caches(run: Path, capsys) -> None:
    start = ["plan", "--run", str(run), "--target", "gguf", *USE, "--json"]
    plans = {}
    for memory in ("500MB", "170MB"):
        assert main([*start, "--memory", memory, "--name", f"for-{memory}"]) == 0
        (plans[memory],) = json.loads(capsys.readouterr().out)
    large, small = plans.values()
    assert large["caches"] == {"keys": "fp16", "values": "fp16"}
    assert small["caches"]["values"] != "fp16"
    for memory, plan in plans.items():
        assert (
            plan["bytes"] + plan["fixed_bytes"] + plan["held_bytes"]
            <= int(memory[:-2]) * 10**6
        )
        assert plan["limits"] == {
            "memory": int(memory[:-2]) * 10**6,
            "context": 8192,
            "batch": 4,
        }
    assert small["predicted_kl"] > large["predicted_kl"]
    assert main([*start, "--memory", "1MB"]) == 2
    assert "--memory 1.00 MB cannot be met" in capsys.readouterr().err
    assert main(["plan", "--run", str(run), "--memory", "1GB"]) == 1
    assert "--memory is about a target's files" in capsys.readouterr().err


def test_the_report_has_a_map_and_curves_of_caches(run: Path, tmp_path: Path) -> None:
    with Run.open(run) as opened:
        page = write_report(opened, tmp_path / "report.html").read_text()
    assert "States and caches" in page
    assert "model.layers.0.keys" in page
    assert "Values of all blocks, by position" in page
