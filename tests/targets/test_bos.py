"""A model whose texts begin with BOS: every file says so to its runtime, and every runtime is fed the same windows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kl_lens import judging
from kl_lens.base.files import reference_path
from kl_lens.judging.scoring import score_text
from kl_lens.model import LoadedModel, beginning
from kl_lens.model.beginning import Beginning
from kl_lens.run.readings import divergence_values, likelihood_values
from kl_lens.run.records import Plan
from kl_lens.targets import export, open_session
from kl_lens.targets.tokenizer import artifact_tokenizer, find_tokenizer
from kl_lens.text.sources import Document, TextSource
from kl_lens.text.windows import beginning_of
from tests.targets.gguf.support import small_mamba

TARGETS = {
    "gguf": "gguf",
    "openvino": "openvino_tokenizers",
    "mlx": "mlx",
    "compressed-tensors": "compressed_tensors",
}
TEXT = TextSource("made-up", None, (Document("made-up", "The old city. " * 100),))


def model(bos: str) -> LoadedModel:
    tokenizer = transformers.AutoTokenizer.from_pretrained(reference_path("mamba"))
    return replace(small_mamba(tokenizer), beginning=Beginning(tokenizer, bos))


@pytest.mark.parametrize("bos", ["yes", "no"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_file_says_what_was_measured(target: str, bos: str, tmp_path: Path) -> None:
    pytest.importorskip(TARGETS[target])
    original = model(bos)
    first = beginning_of(original.tokenizer)
    assert (first is None) == (bos == "no")
    export(original, Plan("p", {}, made_by="test"), target, tmp_path / "made")
    folder = tmp_path / "made"
    with open_session(folder, threads=1) as session:
        tokenizer = find_tokenizer(session, folder)
        begun = tokenizer.begin("The city")
        if target == "gguf":
            adds_bos = session.file.metadata["tokenizer.ggml.add_bos_token"]
        else:
            config = (folder / "tokenizer_config.json").read_text(encoding="utf-8")
            adds_bos = json.loads(config)["add_bos_token"]
        assert adds_bos == (bos == "yes")
        words = tokenizer.encode("The city")
        assert begun == ([] if first is None else [first]) + words
        opened = artifact_tokenizer(folder, lambda: session)
        assert beginning_of(opened) == first
        text = judging.prepare(TEXT, original.task, window=32, limit=2)
        scores = score_text(session, text, judging.TorchSession(original))
    assert text.windows.bos == first
    # The reference: what follows BOS, or the first token, is scored; what follows from BOS alone is not.
    with torch.no_grad():
        logits = original.model(text.windows.ids).logits
    at = 1 if first is not None else 0
    answers = text.windows.ids[:, at + 1 :].flatten()
    expected = torch.nn.functional.cross_entropy(logits[:, at:-1].flatten(0, 1), answers)
    measured = likelihood_values(scores)["cross_entropy"].value
    assert measured == pytest.approx(expected.item(), rel=1e-3)
    assert divergence_values(scores)["kl_mean"].value < 1e-4
    if target == "openvino":
        assert _converted(folder, "The city") == begun


def test_an_export_asks_two_windows_where_the_tokenizer_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beginning, "_perplexities", lambda *_: (10.0, 7.0))
    folder = tmp_path / "made"
    export(model("auto"), Plan("p", {}, made_by="test"), "openvino", folder)
    config = (folder / "tokenizer_config.json").read_text(encoding="utf-8")
    assert json.loads(config)["add_bos_token"] is True


def _converted(folder: Path, text: str) -> list[int]:
    """By the IR that OpenVINO GenAI opens."""
    import openvino as ov
    import openvino_tokenizers  # noqa: F401 - registers its operations

    tokenizer: Any = ov.Core().compile_model(folder / "openvino_tokenizer.xml", "CPU")
    return tokenizer([text])["input_ids"][0].tolist()
