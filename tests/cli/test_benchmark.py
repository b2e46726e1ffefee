"""`kl-lens benchmark` as a user goes about it: a tiny model, its artifacts, a plan by speed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kl_lens.cli.main import main
from kl_lens.model import LoadedModel
from kl_lens.run.folder import Run
from kl_lens.run.records import Plan, Profile, Quartiles
from kl_lens.run.subjects import artifact_digest, current_results
from kl_lens.targets import export, read_artifact
from tests.cli.commands import done, refused
from tests.families import tiny_model

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("openvino", reason="needs the extra openvino")

SHORT = [
    "--threads",
    "1",
    "--prompt-lengths",
    "4,8",
    "--new-tokens",
    "4",
    "--repeats",
    "2",
]


@pytest.fixture(scope="module")
def run_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured and planned, FP16 and a plan exported to OpenVINO, FP16 to GGUF."""
    folder = tmp_path_factory.mktemp("benchmark") / "run"
    text = f"--text {tiny_folder / 'text.txt'} --windows 2 --window-length 32".split()
    done(f"measure {tiny_folder} --run {folder}", *text)
    done(f"plan --run {folder} --max-bpw 9 --name small")
    done(f"export --run {folder} --target openvino --plan small")
    whole = f"export {tiny_folder} --run {folder} --target openvino --format fp16".split()
    done(whole)
    # llama.cpp has no word-level tokenizers: this one goes without.
    model = LoadedModel("tiny", Path(), tiny_model("mamba"), None)
    export(
        model,
        Plan("uniform_fp16", {}, "test"),
        "gguf",
        folder / "artifacts/gguf/uniform_fp16",
    )
    return folder


def profiles(folder: Path) -> dict[str, Profile]:
    with Run.open(folder) as run:
        records = [result.value for result in current_results(run, "profile")]
    assert all(record.pop("provenance")["versions"] for record in records)
    profiles_read = [Profile.from_json(record) for record in records]
    return {
        f"{profile.subject.label}|{profile.protocol}|{profile.device}": profile
        for profile in profiles_read
    }


@pytest.fixture(scope="module")
def used(run_folder: Path) -> Path:
    """The run after a benchmark of its OpenVINO files."""
    done(f"benchmark --run {run_folder} --target openvino", SHORT)
    return run_folder


def test_use_keeps_one_profile_for_each_artifact(used: Path) -> None:
    profiles_read = profiles(used)
    small = profiles_read["openvino/small|use|CPU"]
    for name in (
        "load_seconds",
        "first_token_seconds@4",
        "first_token_seconds@8",
        "seconds_per_token",
        "tokens_per_second",
    ):
        spread = small.timings[name]
        assert 0 < spread.low <= spread.median <= spread.high
    assert small.timings["seconds_per_token"].repeats == 2
    assert small.settings["ratios_to"] == "openvino/uniform_fp16"
    assert not small.ratios, "too few turns for an interval"
    assert (
        small.file_bytes
        == read_artifact(used / "artifacts/openvino/small").realised_bytes
    )
    memory = small.settings["memory"]
    assert 0 < memory["base_bytes"] < small.peak_memory_bytes
    bound = small.bound
    assert bound["tokens_per_second"] == pytest.approx(
        bound["read_bandwidth"] / bound["bytes_per_token"]
    )
    speed = small.timings["tokens_per_second"].median
    assert bound["share"] == pytest.approx(speed / bound["tokens_per_second"])
    assert small.threads == 1


def test_a_budget_in_tokens_per_second(used: Path, tmp_path: Path, capsys) -> None:
    """It rests on timed files: two are too few. What the machine measured today is replaced by known speeds."""
    folder = shutil.copytree(used, tmp_path / "run")
    plan = f"plan --run {folder} --target openvino --formats int8,int4".split()
    assert main([*plan, "--min-speed", "30"]) == 1
    message = capsys.readouterr().err
    assert (
        "at least 3 timed OpenVINO files of different sizes, and the run has 2; export more plans"
        in message
    )
    assert f"kl-lens benchmark --run {folder} --target openvino" in message
    done(f"plan --run {folder} --uniform int8,int4")
    exported = f"export --run {folder} --target openvino".split()
    done(exported, "--plan uniform_int8,uniform_int4")
    names = ("uniform_fp16", "small", "uniform_int8", "uniform_int4")
    with Run.open(folder) as run:
        template = profiles(folder)["openvino/small|use|CPU"]
        candidates = {component.name for component in run.table().candidates}
        for name in names:
            artifact = read_artifact(folder / "artifacts/openvino" / name)
            read = sum(t.bytes for t in artifact.tensors if t.component in candidates)
            seconds = Quartiles(1e-3 + 1e-8 * read, 1e-3, 1e-2, 5)
            subject = replace(
                template.subject, plan=name, digest=artifact_digest(artifact)
            )
            profile = replace(
                template, subject=subject, timings={"seconds_per_token": seconds}
            )
            run.store_result("profile", subject, "use|CPU", profile.to_json())
    capsys.readouterr()

    def made(*limits: str) -> dict[str, Any]:
        done(plan, limits, "--json")
        [profiles_read] = json.loads(capsys.readouterr().out)
        return profiles_read

    quickest = made("--minimise", "seconds", "--max-bpw", "16")["notes"]
    assert (
        "4 timed files (CPU, 1 thread); each predicted from the others: 0 % off"
        in quickest["speed"]
    )
    fastest = 1 / quickest["predicted_seconds_per_token"]
    within = made("--min-speed", f"{0.99 * fastest:.6g}")
    assert within["notes"]["mip_gap"] == 0
    assert (
        fastest
        >= 1 / within["notes"]["predicted_seconds_per_token"]
        >= 0.99 * fastest * (1 - 1e-5)
    )
    message = refused(capsys, plan, f"--min-speed {2 * fastest:.6g}", code=2)
    assert f"--min-speed {2 * fastest:.4g} tokens/s cannot be met" in message


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--device", "NPU"], "finds no device 'NPU' here; it finds CPU"),
        (["--plan", "nowhere"], "no plan 'nowhere'"),
        (["--prompt-lengths", "4,x"], "give numbers of tokens"),
        (
            ["--gpu-layers", "all"],
            "has no GPU backend, or finds no GPU. Leave the option out, or name a",
        ),
    ],
)
def test_bad_requests_are_one_line(
    extra: list[str], message: str, run_folder: Path, capsys
) -> None:
    assert main(["benchmark", "--run", str(run_folder), *extra]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
