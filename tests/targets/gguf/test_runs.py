"""Whole runs: of every family of transformers, of families like a template, and of a GGUF file itself."""

from pathlib import Path

import pytest
import torch

from kl_lens.cli.main import main
from kl_lens.judging import prepare
from kl_lens.judging.evaluator import read_scores
from kl_lens.model import LanguageTask, LoadedModel, load
from kl_lens.run.folder import Run
from kl_lens.run.records import ARTIFACT, Plan, Score
from kl_lens.targets import get_target, read_artifact
from kl_lens.targets.gguf.architectures.attention_only import FAMILIES
from kl_lens.targets.gguf.export import export
from kl_lens.targets.gguf.session import open_session
from kl_lens.text.sources import wikitext2
from tests.byte_level import save_tokenizer
from tests.targets.gguf.support import (
    CONFIGS,
    TEMPLATES,
    kl,
    like_a_template,
    random_model,
    torch_logits,
)

pytest.importorskip("gguf")
pytestmark = pytest.mark.slow

VOCABULARY = 300  # every byte, and some words
SHORT = (
    "--text wikitext2:train --windows 2 --window-length 32 --evaluation-windows 3 --held-out-windows 2 --threads 1 "
    "--without benchmark,report"
)


def saved(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    save_tokenizer(folder, [wikitext2("train").joined()[:20_000]], VOCABULARY)
    return folder


def run(model: Path, folder: Path, *more: str) -> tuple[Path, Score]:
    """The recommended file of 65 % of the bytes in 16 bits, and what the run says of it."""
    opened = load(model, template=more[1] if "--template" in more else None)
    limit = int(0.65 * get_target("gguf").file_bytes(opened, Plan("all", {}, "test")))
    words = f"run {model} --run {folder} --target gguf --max-bytes {limit} {SHORT}"
    assert main([*words.split(), *more]) == 0
    with Run.open(folder) as finished:
        scores = read_scores(finished, "divergence")
    ours: list[Score] = [
        score
        for score in scores
        if score.subject.what == ARTIFACT
        and str(score.subject.plan).startswith("recommended")
    ]
    assert any(str(score.subject.plan).startswith("stock.") for score in scores)
    artifact = folder / "artifacts/gguf" / str(ours[0].subject.plan)
    file = artifact / read_artifact(artifact).files[0]
    assert file.stat().st_size <= limit
    return file, ours[0]


def recomputed(model: LoadedModel, file: Path, score: Score) -> float:
    """KL per token from llama.cpp's logits and PyTorch's."""
    protocol = score.protocol
    text = prepare(
        score.what,
        LanguageTask(model.tokenizer),
        window=protocol["window"],
        limit=protocol["limit"],
    )
    losses = []
    with open_session(file, threads=1) as session:
        for window in text.items:
            ids = list(window.ids)
            expected = torch_logits(model, torch.tensor([ids]))[window.rows]
            losses.append(kl(expected, session.logits(ids)[window.rows])[0])
    return sum(losses) / len(losses)


@pytest.mark.parametrize("family", [*FAMILIES, *TEMPLATES])
def test_a_run_of_every_family(family: str, tmp_path: Path) -> None:
    more: list[str] = []
    if family in TEMPLATES:
        loaded, template = like_a_template(family, tmp_path, vocabulary=VOCABULARY)
        model = loaded.model
        more = ["--template", str(template)]
    else:
        config = CONFIGS[family]()
        config.vocab_size = VOCABULARY
        model = random_model(config)
    folder = saved(model, tmp_path / "model")
    file, score = run(folder, tmp_path / "run", *more)
    shown = score.values["kl_mean"].value
    assert 0 < shown < 1
    assert recomputed(load(folder), file, score) == pytest.approx(shown, rel=1e-3)


@pytest.mark.parametrize("kind", ["fp16", "q8_0"])
def test_every_verb_takes_a_gguf_file(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS["llama 3"]()
    config.vocab_size = VOCABULARY
    checkpoint = load(saved(random_model(config), tmp_path / "model"))
    plan = dict.fromkeys((c.name for c in checkpoint.anatomy.candidates), kind)
    artifact = export(checkpoint, Plan("p", plan, "test"), tmp_path / "file")
    model = tmp_path / "file" / artifact.files[0]
    file, score = run(model, tmp_path / "run")
    note = "compared with this Q8_0 file, not with the original"
    is_noted = kind == "q8_0"
    assert (note in capsys.readouterr().out) == is_noted
    opened = load(model)
    shown = score.values["kl_mean"].value
    assert recomputed(opened, file, score) == pytest.approx(shown, rel=1e-3)
    commands = (
        f"inspect {model} --max-bytes 400kB",
        f"measure {model} --run {tmp_path}/own --formats q8_0 --windows 1 --window-length 32 --text wikitext2:train",
        f"autopsy {file} --model {model} --text wikitext2:test",
        f"generate {file} --prompt the --max-new-tokens 2",
        f"publish {tmp_path / 'run'} gguf --to owner/name --dry-run",
    )
    for command in commands:
        assert main(command.split()) == 0, command
    (published,) = (tmp_path / "run/published").iterdir()
    assert (published / "Modelfile").read_text() == f"FROM ./{file.name}\n"
    assert (note in (published / "README.md").read_text()) == is_noted
