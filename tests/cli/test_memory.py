"""`--memory`: what fits, before anything is downloaded; plans over weights and caches; the report of states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kl_lens.reporting import write_report
from kl_lens.run.folder import Run
from tests.cli.commands import done, refused

USE = ["--context", "8k", "--batch", "4"]


def test_inspect_says_what_fits_from_the_configuration_alone(
    saved, tmp_path: Path, capsys
) -> None:
    folder = saved("falcon_h1")
    (folder / "model.safetensors").unlink()
    arguments = ["inspect", str(folder), *USE]
    done(arguments, "--memory 1GB --json")
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
    done(arguments, "--memory 1GB")
    assert (
        f"Next: kl-lens run {folder} --target openvino --memory 1GB --context 8192 --batch 4"
        in capsys.readouterr().out
    )
    making = result["making"]
    weights = making["download"] / 2
    assert making["seconds"] == sum(s["seconds"] for s in making["job"]["stages"]) > 1
    assert making["job"]["memory"] > 4 * weights
    done(arguments, "--memory 1MB")
    assert "Nothing fits into 1MB" in capsys.readouterr().out
    assert "--context and --batch say what --memory is for" in refused(capsys, arguments)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and caches of the hybrid, each in two formats, on little text."""
    folder = tmp_path_factory.mktemp("memory") / "run"
    start = (
        f"measure reference:hybrid --run {folder} --windows 2 --window-length 48".split()
    )
    done(start, "--formats q4_0,q8_0")
    done(start, "--states --formats q4_0,q8_0 --components keys|values")
    return folder


def test_a_plan_for_a_memory_chooses_the_caches(run: Path, capsys) -> None:
    start = ["plan", "--run", str(run), "--target", "gguf", *USE, "--json"]
    plans = {}
    for memory in ("500MB", "170MB"):
        done(start, f"--memory {memory} --name for-{memory}")
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
    assert "--memory 1.00 MB cannot be met" in refused(
        capsys, start, "--memory 1MB", code=2
    )
    assert "--memory is about a target's files" in refused(
        capsys, f"plan --run {run} --memory 1GB"
    )


def test_the_report_has_a_map_and_curves_of_caches(run: Path, tmp_path: Path) -> None:
    with Run.open(run) as opened:
        page = write_report(opened, tmp_path / "report.html").read_text()
    assert "States and caches" in page
    assert "model.layers.0.keys" in page
    assert "Values of all blocks, by position" in page
