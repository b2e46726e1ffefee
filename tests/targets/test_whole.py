"""What is opened is what was exported, and what was exported can be opened."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from kl_lens.base.errors import TargetError
from kl_lens.base.files import DIGESTS, RECORD_FILE, reference_path
from kl_lens.cli.main import main
from kl_lens.run import subjects
from kl_lens.run.records import Plan
from kl_lens.run.subjects import file_digest
from kl_lens.targets import export, get_target, locate, read_artifact
from kl_lens.targets.gguf.tokenizer import TokenizerData, tokenizer_data
from tests.targets.gguf.support import small_mamba

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("openvino", reason="needs the extra openvino")

WEIGHTS = {"gguf": "Tiny-292K-F16.gguf", "openvino": "openvino_model.bin"}
PLAN = Plan("p", {}, made_by="test")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    model = _model()
    for target in WEIGHTS:
        export(model, PLAN, target, folder / target)
    return folder


def _model() -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(reference_path("mamba"))
    return small_mamba(tokenizer)


def _damage(file: Path) -> None:
    """4,000 bytes of weights, the size and the time as they were."""
    status = file.stat()
    content = bytearray(file.read_bytes())
    middle = len(content) * 3 // 4
    content[middle : middle + 4000] = bytes(
        byte ^ 0x11 for byte in content[middle : middle + 4000]
    )
    with file.open("r+b") as opened:  # the same inode
        opened.write(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


VERBS = {
    "generate": "--prompt city --max-new-tokens 2",
    "benchmark": "--quick",
    "evaluate": "--model reference:mamba --perplexity --windows 1",
}


@pytest.mark.parametrize(
    ("target", "verb", "named"),
    [
        ("gguf", "benchmark", "folder"),
        ("gguf", "evaluate", "file"),
        ("openvino", "generate", "file"),
    ],
)
def test_every_verb_refuses_other_bytes_than_were_exported(
    target: str,
    verb: str,
    named: str,
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / target
    shutil.copytree(exported / target, folder)
    _damage(folder / WEIGHTS[target])
    path = folder if named == "folder" else folder / WEIGHTS[target]
    assert main([verb, str(path), *VERBS[verb].split()]) != 0
    shown = capsys.readouterr()
    output = " ".join((shown.out + shown.err).replace("│", " ").split())
    assert (
        f"{WEIGHTS[target]} was changed after the export; export the model again"
        in output
    )


def test_the_digest_of_a_large_file_is_remembered_until_it_is_written_to(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gguf"
    shutil.copytree(exported / "gguf", folder)
    file = folder / WEIGHTS["gguf"]
    assert not (folder / DIGESTS).exists()
    monkeypatch.setattr(subjects, "LARGE", 1)
    digest = file_digest(file)
    memory = folder / DIGESTS / f"{file.name}.digest"
    remembered = json.loads(memory.read_text())
    assert remembered["digest"] == digest
    memory.write_text(json.dumps(remembered | {"digest": "remembered"}))
    assert file_digest(file) == "remembered"
    _damage(file)
    assert file_digest(file) not in ("remembered", digest)
    memory.write_text("{")
    with pytest.raises(TargetError, match="was changed after the export"):
        locate(folder)
    shutil.rmtree(folder / DIGESTS)
    (folder / DIGESTS).write_text(
        "no folder: nothing can be written there, not even by root"
    )
    with pytest.raises(TargetError, match="was changed after the export"):
        locate(folder)


def test_files_of_an_earlier_export_go(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    shutil.copytree(exported / "gguf", folder)
    record = json.loads((folder / RECORD_FILE).read_text())
    record["files"] += ["earlier.txt"]
    (folder / RECORD_FILE).write_text(json.dumps(record))
    for name in ("earlier.txt", "of the user.txt"):
        (folder / name).write_text("text")
    export(_model(), PLAN, "gguf", folder)
    assert not (folder / "earlier.txt").exists()
    assert (folder / "of the user.txt").exists()


def _without_merges(tokenizer: Any, vocabulary: int, ends: Any) -> TokenizerData:
    data = tokenizer_data(tokenizer, vocabulary, ends)
    data.metadata["tokenizer.ggml.merges"].clear()
    return data


def test_an_export_that_the_runtime_cannot_open_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    monkeypatch.setattr("kl_lens.targets.gguf.export.tokenizer_data", _without_merges)
    with pytest.raises(
        TargetError, match=r"llama\.cpp cannot open the files exported .* merges"
    ) as caught:
        export(_model(), PLAN, "gguf", folder)
    assert ".writing" not in str(caught.value)
    assert not folder.exists()


@pytest.mark.parametrize("target", WEIGHTS)
def test_every_file_of_an_export_has_its_digest(target: str, exported: Path) -> None:
    artifact = read_artifact(exported / target)
    names = {path.name for path in (exported / target).iterdir()} - {RECORD_FILE}
    assert set(artifact.digests) == set(artifact.files) == names
    assert get_target(target).name == artifact.target
