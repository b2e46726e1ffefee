"""ProtMamba's example model, which others trained and published: from inspection to a judged file."""

import json
from pathlib import Path

import pytest

from kl_lens.cli.main import main
from kl_lens.judging import read_scores
from kl_lens.run.folder import Run
from kl_lens.run.subjects import current_results

pytest.importorskip("gguf", reason="needs the extra gguf")

# In the order of their ids; the checkpoint brings no tokenizer.
TOKENS = "<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . -"
LIMIT = 0.01  # nats per token, the default of `run`


@pytest.fixture
def protein_model(shared: Path) -> Path:
    folder = shared / "data/published/protmamba"
    if not (folder / "pytorch_model.bin").is_file():
        pytest.skip(f"needs ProtMamba's example model in {folder}")
    return folder


@pytest.mark.slow
def test_a_published_protein_model_gets_a_file_within_its_limit(
    protein_model: Path, tmp_path: Path, capsys
) -> None:
    alignment = (protein_model / "example_msa.a3m").read_text(encoding="utf-8")
    entries = alignment.split(">")[1:]
    proteins = ["".join(entry.splitlines()[1:]) for entry in entries]
    proteins = [f"<cls>{protein.replace('-', '').upper()}" for protein in proteins]
    texts = {}
    for start, name in enumerate(("--text", "--held-out", "--evaluation-text")):
        texts[name] = tmp_path / f"{name.strip('-')}.txt"
        texts[name].write_text("\n".join(proteins[start::3]), encoding="utf-8")
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("\n".join([*TOKENS.split(), "<null_1>", "<mask>"]))
    tokenizer = ["--tokenizer", str(tokens)]
    assert main(["inspect", str(protein_model), *tokenizer, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == pytest.approx(
        0.94e6, rel=0.01
    )

    run = tmp_path / "run"
    few = "--windows 2 --window-length 128 --held-out-windows 4 --evaluation-windows 8"
    words = [*few.split(), "--rivals", "none", "--threads", "1"]
    words += [word for flag, path in texts.items() for word in (flag, str(path))]
    words += ["--run", str(run), "--target", "gguf", "--without", "benchmark,report"]
    assert main(["run", str(protein_model), *tokenizer, *words]) == 0
    with Run.open(run) as journal:
        scores = {s.subject.label: s.values for s in read_scores(journal, "divergence")}
        agreement = current_results(journal, "agreement")
    kl = scores["gguf/recommended-gguf"]["kl_mean"].value
    assert 0 < kl < 1.5 * LIMIT
    assert agreement
