"""`kl-lens publish`: a file with its proof, to a folder and, with the real client, to a small hub on this machine."""

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pyarrow.parquet
import pytest
from huggingface_hub import ModelCard

from kl_lens.cli.main import main
from kl_lens.run.folder import RECOMMENDED, Run
from kl_lens.run.records import checked_plan_name
from kl_lens.targets import read_artifact
from tests.cli.commands import done
from tests.hub_server import Hub


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A run with a recommended IR, a stock recipe and their scores."""
    run = str(tmp_path_factory.mktemp("publish") / "run")
    text = f"--text {tiny_folder / 'text.txt'} --windows 2 --window-length 32".split()
    held_out = ["--held-out", "wikitext2:test", "--held-out-windows", "2"]
    target = f"--run {run} --target openvino".split()
    # `kl-lens run` gives such names; a user may not.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kl_lens.study.plan.require_own_plan_name", checked_plan_name)
        for words in (
            ["measure", str(tiny_folder), *target, "--formats", "int4,int8", *text],
            [
                "plan",
                *target,
                "--max-bpw",
                "9",
                "--name",
                "recommended-openvino",
                "--rivals",
                "usual",
                *held_out,
            ],
            [
                "export",
                *target,
                "--plan",
                "recommended-openvino,stock.int8_sym",
            ],
            [
                "evaluate",
                "--run",
                run,
                "--plan",
                "recommended-openvino,stock.int8_sym",
                "--target",
                "openvino",
                "--perplexity",
                "wikitext2:test",
                "--divergence",
                "",
                "--window-length",
                "32",
                "--windows",
                "2",
                "--threads",
                "1",
            ],
        ):
            done(words)
    return Path(run)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture
def signed_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    return hub


def test_the_folder_holds_the_file_and_its_proof(run: Path) -> None:
    words = f"publish {run} openvino --to me/tiny --dry-run --base-model org/tiny --license mit".split()
    done(words)
    folder = run / "published/openvino"
    exported = run / "artifacts/openvino/recommended-openvino"
    for file in read_artifact(exported).files:
        assert (folder / file).read_bytes() == (exported / file).read_bytes()

    card = ModelCard.load(folder / "README.md")
    about = card.data.to_dict()
    assert (about["base_model"], about["base_model_relation"]) == (
        "org/tiny",
        "quantized",
    )
    assert (about["library_name"], about["license"]) == ("openvino", "mit")
    assert {"quantized", "openvino", "mamba"} <= set(about["tags"])
    parts = (
        "**this file**",
        "INT8_SYM",
        "size-against-kl.svg",
        "hf download me/tiny",
        "wikitext2:test",
        "kl-lens plan",
    )
    for part in parts:
        assert part in card.text, part
    assert str(run) not in card.text, "no place on somebody's disk"

    picture = ElementTree.parse(folder / "size-against-kl.svg").getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert "this file" in "".join(picture.itertext())
    rows = pyarrow.parquet.read_table(folder / "sensitivities.parquet").to_pylist()
    assert {row["recipe"] for row in rows} >= {"int4", "int8"}
    assert all(row["kl_teacher_to_student"] >= 0 for row in rows)
    assert (
        json.loads((folder / "plan.json").read_text())["name"] == "recommended-openvino"
    )
    record = json.loads((folder / "artifact.json").read_text())
    (folder / "artifact.json").unlink()  # a link
    (folder / "artifact.json").write_text(
        json.dumps(record | {"files": [*record["files"], "old.bin"]})
    )
    (folder / "old.bin").touch()
    done(words)
    assert not (folder / "old.bin").exists(), (
        "a file of the earlier export, which would be uploaded too"
    )
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    done(words, "--plan stock.int8_sym")
    assert (run / "published/stock.int8_sym/README.md").is_file()
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    with Run.open(run) as journal:
        journal.store(RECOMMENDED, "recommended-openvino", "stock.int8_sym")
    (run / "published/stock.int8_sym/plan.json").unlink()
    done(words)
    assert (run / "published/stock.int8_sym/plan.json").is_file()


def test_it_is_uploaded(run: Path, signed_in: Hub, capsys) -> None:
    done(f"publish {run} openvino --to me/tiny --private --license mit")
    repository = signed_in.repositories["me/tiny"]
    assert repository.private
    folder = run / "published/openvino"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert repository.files == {
        str(path.relative_to(folder)): path.read_bytes() for path in files
    }
    assert (
        f"{signed_in.url}/me/tiny/commit/{repository.commit}" in capsys.readouterr().out
    )


def test_what_cannot_be_published_says_why(
    run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def said(*words: str) -> str:
        assert main(["publish", str(run), "openvino", *words]) == 1
        (line,) = [
            line
            for line in capsys.readouterr().err.splitlines()
            if line.startswith("kl-lens publish: ")
        ][-1:]
        return line

    assert "expected ORG/NAME" in said("--to", "tiny")
    assert "me/ti ny" in said("--to", "me/ti ny")
    assert "small" in said("--to", "me/tiny", "--plan", "small")
    assert "run `hf auth login`" in said("--to", "me/tiny")
    assert not hub.repositories
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    hub.problems = ['"license" must be one of …']
    assert "license" in said("--to", "me/tiny")
    assert not hub.repositories, "the card comes first"
    with Run.open(run) as journal:
        journal.forget_results("score")
    assert "was not evaluated" in said("--to", "me/tiny", "--dry-run")
    (run / "artifacts/openvino/recommended-openvino/openvino_model.bin").write_bytes(
        b"other"
    )
    assert "was changed after the export" in said("--to", "me/tiny", "--dry-run")
