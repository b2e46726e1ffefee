"""`kl-lens benchmark` as a user goes about it: a tiny model, its artifacts, both protocols, a latency table."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

import kl_lens
from kl_lens.checkpoints import LoadedModel
from kl_lens.cli.benchmark import use_table
from kl_lens.cli.main import main
from kl_lens.formats import get_format
from kl_lens.profiling import in_use
from kl_lens.profiling.benchmark import profile_from
from kl_lens.records import Plan, Profile
from kl_lens.runs import Run
from kl_lens.subjects import current_results
from kl_lens.targets import export, read_artifact
from tests.families import tiny_model

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("openvino", reason="needs the extra openvino")

from kl_lens.targets.openvino import products

SHORT = ["--threads", "1", "--prompt-lengths", "4,8", "--new-tokens", "4", "--repeats", "2"]


@pytest.fixture(scope="module")
def run_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured and planned, FP16 and a plan exported to OpenVINO, FP16 to GGUF."""
    folder = tmp_path_factory.mktemp("benchmark") / "run"
    text = ["--text", str(tiny_folder / "text.txt"), "--windows", "2", "--window-length", "32"]
    assert main(["measure", str(tiny_folder), "--run", str(folder), *text]) == 0
    assert main(["plan", "--run", str(folder), "--max-bpw", "9", "--name", "small"]) == 0
    assert main(["export", "--run", str(folder), "--target", "openvino", "--plan", "small"]) == 0
    whole = ["export", str(tiny_folder), "--run", str(folder), "--target", "openvino", "--format", "fp16"]
    assert main(whole) == 0
    # llama.cpp has no word-level tokenizers: this one goes without.
    model = LoadedModel("tiny", Path(), tiny_model("mamba"), None)
    export(model, Plan("uniform_fp16", {}, "test"), "gguf", folder / "artifacts/gguf/uniform_fp16")
    return folder


def profiles(folder: Path) -> dict[str, Profile]:
    with Run.open(folder) as run:
        records = [result.value for result in current_results(run, "profile")]
    assert all(record.pop("provenance")["versions"] for record in records)
    found = [profile_from(record) for record in records]
    return {f"{profile.subject.label}|{profile.protocol}|{profile.device}": profile for profile in found}


@pytest.fixture(scope="module")
def used(run_folder: Path) -> Path:
    """The run after the `use` protocol and `--layers` for OpenVINO."""
    arguments = ["benchmark", "--run", str(run_folder), *SHORT, "--targets", "openvino", "--layers"]
    with pytest.MonkeyPatch.context() as patch:  # graphs and loads that take long and show nothing more
        patch.setattr(products, "MOST_COPIES", 2)
        patch.setattr(in_use, "LOADS", 1)
        assert main(arguments) == 0
    return run_folder


def test_use_keeps_one_profile_for_each_artifact(used: Path) -> None:
    found = profiles(used)
    small = found["openvino/small|use|CPU"]
    for name in ("load_seconds", "first_load_seconds", "first_token_seconds@4", "first_token_seconds@8",
                 "seconds_per_token", "tokens_per_second", "prefill_tokens_per_second@8"):  # fmt: skip
        spread = small.timings[name]
        assert 0 < spread.low <= spread.median <= spread.high
    assert small.timings["seconds_per_token"].repeats == 2
    assert small.settings["ratios_to"] == "openvino/uniform_fp16"
    assert not small.ratios, "too few turns for an interval"
    assert small.file_bytes == read_artifact(used / "artifacts/openvino/small").realised_bytes
    memory = small.settings["memory"]
    assert 0 < memory["base_bytes"] < small.peak_memory_bytes
    bound = small.bound
    assert bound["tokens_per_second"] == pytest.approx(bound["read_bandwidth"] / bound["bytes_per_token"])
    speed = small.timings["tokens_per_second"].median
    assert bound["share"] == pytest.approx(speed / bound["tokens_per_second"])
    assert small.threads == 1


def test_layers_give_a_table_that_planning_uses(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run.open(used) as run:
        latency, table = run.load("latency", "openvino-CPU"), run.table()
        protocol = run.load("latency_protocol", "openvino-CPU")
    for component in table.candidates:
        assert set(latency[component.name]) == {"fp16", "int8", "int4"}
        assert all(seconds > 0 for seconds in latency[component.name].values())
    assert {check["subject"] for check in protocol["checks"]} == {"openvino/small", "openvino/uniform_fp16"}
    plan = ["plan", "--run", str(used), "--profile", "openvino-CPU", "--name", "quick", "--json"]

    def seconds(*limits: str) -> float:
        capsys.readouterr()
        assert main([*plan, *limits]) == 0
        (made,) = json.loads(capsys.readouterr().out)
        return sum(row[made["assignment"].get(name, "fp16")] for name, row in latency.items())

    # What is fastest depends on the day: only components that share weights must also share a format.
    fastest = seconds("--minimise", "latency", "--max-bpw", "16")
    assert fastest <= sum(row["fp16"] for row in latency.values()) * (1 + 1e-9)
    assert seconds("--max-latency", f"{1.01e6 * fastest:.3f}us") <= 1.011 * fastest
    assert main([*plan, "--max-latency", f"{1e6 * fastest / 2:.3f}us"]) == 2  # nothing can be that fast
    capsys.readouterr()
    assert main(["plan", "--run", str(used), "--frontier", "--profile", "openvino-CPU", "--json"]) == 0
    surface = json.loads(capsys.readouterr().out)
    assert min(point["predicted_latency"] for point in surface) >= fastest * (1 - 1e-6)


@pytest.mark.slow
def test_gguf_gets_a_table_from_copies_in_one_format_each(
    used: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody exported these formats: copies of the FP16 file say how fast they are, shape by shape."""
    arguments = ["benchmark", "--run", str(used), *SHORT, "--targets", "gguf"]
    assert main([*arguments, "--layers", "--formats", "q8_0,q4_0+gptq"]) == 0
    with Run.open(used) as run:
        latency, table = run.load("latency", "gguf-CPU"), run.table()
        protocol = run.load("latency_protocol", "gguf-CPU")
    (check,) = protocol["checks"]
    assert check["subject"] == "gguf/uniform_fp16"
    assert {c.name for c in table.components} == set(latency)
    by_shape: dict[tuple[int, ...], set[float]] = {}
    for component in table.candidates:
        row = latency[component.name]
        assert set(row) == {f for f in protocol["formats"] if get_format(f).fits(component.shape) is None}
        assert min(row.values()) > 0
        if component.name not in (table.embedding, table.head):
            by_shape.setdefault(component.shape, set()).add(row.get("q8_0", row["fp16"]))
    assert all(len(times) == 1 for times in by_shape.values()), "one time for each shape and format"
    for fmt, copy in protocol["copies"].items():
        rows = [latency[component.name] for component in table.candidates]
        weights = sum(row.get(fmt, row["fp16"]) for row in rows)
        assert copy["predicted"] == pytest.approx(weights + protocol["rest_seconds"])
        assert copy["measured"] == pytest.approx(statistics.median(protocol["seconds_per_token"][fmt]))
    # A later benchmark sets the table beside what it measures, if it measures under the same conditions.
    monkeypatch.setattr(in_use, "LOADS", 1)
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["latency"] == {"gguf-CPU": latency}
    assert main([*arguments, "--threads", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Latency table gguf-CPU is not compared: it was measured with threads 1 (here: 2)." in said
    # Planning takes the profile of the target that the plan is for.
    capsys.readouterr()
    plan = [
        "plan",
        "--run",
        str(used),
        "--target",
        "openvino",
        "--max-latency",
        "1s",
        "--profile",
        "gguf-CPU",
    ]
    assert main(plan) == 1
    assert "no latency profile 'gguf-CPU'; the run has openvino-CPU" in capsys.readouterr().err


def test_the_published_protocol(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["benchmark", "--run", str(run_folder), "--protocol", "benchmark_app", "--quick"]
    assert main([*arguments, "--plan", "small", "--tag", "tiny", "--threads", "1"]) == 0
    assert "--quick" in capsys.readouterr().out
    profile = profiles(run_folder)["openvino/small|benchmark_app|CPU"]
    assert profile.settings["quick"]
    assert profile.settings["data_shape"] == "input_ids[1,1],attention_mask[1,1],beam_idx[1]"
    assert profile.settings["reached_iterations"] >= 50
    assert profile.settings["reached_seconds"] >= 3
    assert profile.threads == 1
    (log,) = (run_folder / "log/benchmark_log").glob("*.log")
    assert "-hint latency -t 3 -niter 50 --inference_only TRUE" in log.read_text()
    with (run_folder / "latency_throughput_CPU_tiny_report.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["model"] == "small"
    assert float(row["latency_median_ms"]) == pytest.approx(profile.timings["latency_ms"].median, rel=1e-4)


def test_damaged_artifacts_are_named_and_the_others_done(
    used: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(used, folder)
    for record in (folder / "artifacts").glob("*/*/artifact.json"):
        if "small" in record.parts:
            shutil.rmtree(record.parent)
    (file,) = (folder / "artifacts/gguf/uniform_fp16").glob("*.gguf")
    file.write_bytes(file.read_bytes()[:-500])
    with Run.open(folder) as run:
        record = run.load("artifact", "openvino/small")
        run.store("artifact", "openvino/small", record | {"folder": str(folder / "artifacts/openvino/small")})
    before = profiles(folder)
    capsys.readouterr()
    app = ["--protocol", "benchmark_app", "--quick", "--threads", "1"]
    assert main(["benchmark", "--run", str(folder), *app]) == 1
    output = capsys.readouterr()
    assert "FP16, OpenVINO" in output.out
    assert "openvino/small" in output.err
    assert "not an exported model" in output.err
    assert "gguf/uniform_fp16" in output.err
    assert "was changed after the export" in output.err
    after = profiles(folder)
    assert {name: after[name] for name in before} == before  # nothing is lost
    assert "openvino/uniform_fp16|benchmark_app|CPU" in after


@pytest.mark.slow
def test_the_machine_is_not_measured_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kl_lens.profiling.benchmark.measure_machine", lambda threads: pytest.fail("measured")
    )
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert main(["benchmark", str(tmp_path / "small.gguf"), str(tmp_path / "none")]) == 1
    said = capsys.readouterr().err
    assert "small.gguf" in said
    assert str(tmp_path / "none") in said


def test_from_python(used: Path) -> None:
    folder = used / "artifacts/openvino/small"
    (profile,) = kl_lens.benchmark(folder, prompt_lengths=[4], new_tokens=2, repeats=1, threads=1)
    assert profile.subject.label == str(folder)
    assert profile.timings["tokens_per_second"].median > 0


def test_threads_and_the_way_of_loading_are_as_asked(
    run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_use, "LOADS", 1)
    arguments = ["benchmark", "--run", str(run_folder), *SHORT[2:], "--targets", "gguf"]
    assert main([*arguments, "--threads", "2", "--load", "read"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    profile = profiles(run_folder)["gguf/uniform_fp16|use|CPU"]
    assert (profile.threads, profile.runtime["load_mode"]) == (2, "read")
    assert f"llama.cpp here is {profile.runtime['library']} from {profile.runtime['found']}" in output
    table = use_table([replace(profile, bound={})])  # as of a GPU
    assert [list(column.cells) for column in table.columns[-2:]] == [["–"], ["–"]]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--device", "NPU"], "finds no device 'NPU' here; it finds CPU"),
        (["--plan", "nowhere"], "no plan 'nowhere'"),
        (["--targets", "onnx"], "no target is called 'onnx'"),
        (["--prompt-lengths", "4,x"], "give numbers of tokens"),
        (["--threads", "0"], "--threads 0: expected a whole number from 1 to 512"),
        (["--gpu-layers", "-1"], "--gpu-layers -1: give a number of layers, or all"),
        (
            ["--gpu-layers", "all"],
            "has no GPU backend, or finds no GPU. Leave the option out, or name a llama.cpp",
        ),
    ],
)
def test_bad_requests_are_one_line(extra: list[str], message: str, run_folder: Path, capsys) -> None:
    assert main(["benchmark", "--run", str(run_folder), *extra]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
