"""`kl-lens export` and `generate`, as a user goes about them."""

import json
from pathlib import Path

import pytest

from kl_lens.base.units import human_bytes
from kl_lens.run.folder import Run
from kl_lens.targets import open_session
from tests.cli.commands import done, refused

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("openvino", reason="needs the extra openvino")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of one block."""
    folder = tmp_path_factory.mktemp("planned") / "run"
    measure = (
        f"measure reference:mamba --run {folder} --windows 1 --window-length 32".split()
    )
    done(measure, "--text wikitext2:valid --components", [r"layers\.9\."])
    done(f"plan --run {folder} --max-bpw 15.5 --name small")
    return folder


def test_openvino(planned: Path, capsys) -> None:
    done(f"export --run {planned} --target openvino --plan small")
    folder = planned / "artifacts/openvino/small"
    files = {"openvino_model.xml", "openvino_model.bin", "tokenizer.json", "config.json"}
    assert files <= {path.name for path in folder.iterdir()}
    with Run.open(planned) as run:
        record = run.load("artifact", "openvino/small")
    assert record["plan"] == "small"
    whole = record["realised_bytes"]
    weights = record["planned_bytes"]
    assert (
        f"small: {human_bytes(whole)} on disk = {human_bytes(weights)} of weights as planned + "
        f"{human_bytes(whole - weights)} for the graph (openvino_model.xml)."
    ) in capsys.readouterr().out
    generate = [
        "generate",
        str(folder),
        "--prompt",
        "The history of the",
        "--max-new-tokens",
        "4",
    ]
    done(generate, "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["new_tokens"] == 4
    assert result["text"].strip()
    done(generate)
    assert capsys.readouterr().out == f"{result['prompt']}{result['text']}\n"


def test_a_tokenizer_that_llama_cpp_does_not_have_can_be_left_out(
    tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    words = f"export {tiny_folder} --target gguf --format q8_0 --out {tmp_path / 'out'}".split()
    assert "--without-tokenizer" in refused(capsys, words)
    done(words, "--without-tokenizer")
    output = capsys.readouterr().out
    assert " for tensors stored as fp16 or fp32 instead + " in output
    assert f"--tokenizer.\nNext: kl-lens benchmark {tmp_path / 'out'}\n" in output
    assert len(open_session(tmp_path / "out", threads=1).logits([1, 2])) == 2
