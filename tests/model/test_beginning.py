"""Whether texts begin with BOS: the tokenizer says it, the user, or two windows."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kl_lens.base.errors import CheckpointError, TextError
from kl_lens.model import LoadedModel, beginning
from kl_lens.model.beginning import Beginning
from kl_lens.text.sources import Document, TextSource
from kl_lens.text.windows import beginning_of
from tests.byte_level import save_tokenizer
from tests.families import VOCABULARY

TEXT = TextSource("made-up", None, (Document("made-up", "a b c d e f " * 400),))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    save_tokenizer(tmp_path, [TEXT.joined()])
    return transformers.AutoTokenizer.from_pretrained(tmp_path)


@pytest.fixture
def silent(tokenizer: Any) -> Any:
    """Has a BOS, and does not put it anywhere."""
    tokenizer.bos_token = "a"
    return tokenizer


def test_what_the_tokenizer_and_the_user_say(silent: Any) -> None:
    bos = silent.bos_token_id
    assert Beginning(None).choice == "no"
    assert Beginning(silent).choice == "auto"
    for choice, begins in (("yes", bos), ("auto", bos), ("no", None), ("yes", bos)):
        decided = Beginning(silent, choice)
        assert decided.choice == ("no" if begins is None else "yes"), choice
        assert beginning_of(silent) == begins


@pytest.mark.parametrize(
    ("template", "choice"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "yes"),
        ("a{{ messages[0].content }}", "auto"),  # the same text, but not as BOS
        ("{{ raise_exception('no') }}", "auto"),
    ],
)
def test_a_chat_template_that_writes_bos_says_it(
    silent: Any, template: str, choice: str
) -> None:
    silent.chat_template = template
    assert Beginning(silent).choice == choice


def test_without_a_bos_there_is_nothing_to_decide(tokenizer: Any) -> None:
    assert Beginning(tokenizer).choice == "no"
    with pytest.raises(CheckpointError, match="--bos yes: the tokenizer has no BOS"):
        Beginning(tokenizer, "yes")


@pytest.mark.parametrize(("after", "choice"), [(7.9, "yes"), (8.1, "no")])
def test_two_windows_decide_once_where_the_tokenizer_is_silent(
    silent: Any, monkeypatch: pytest.MonkeyPatch, after: float, choice: str
) -> None:
    heard: list[str] = []
    model = LoadedModel("tiny", Path(), tiny(), silent, warn=heard.append)
    assert model.task.identity == {}
    monkeypatch.setattr(beginning, "_perplexities", lambda *_: (10.0, after))
    windows = model.task.drawn(TEXT, windows=2, length=32)
    assert model.task.identity == {"bos": choice}
    assert windows.bos == (silent.bos_token_id if choice == "yes" else None)
    lines = [
        "tiny: every window begins with BOS (a): on two windows of made-up it takes perplexity from 10.0 to 7.9; "
        "--bos no leaves it out"
    ]
    assert heard == (lines if choice == "yes" else [])
    monkeypatch.setattr(beginning, "_perplexities", None)  # not measured again
    model.task.drawn(TEXT, windows=2, length=32)


def test_a_token_that_the_model_does_not_have_is_named_by_whoever_draws_the_windows(
    silent: Any,
) -> None:
    task = LoadedModel("tiny", Path(), tiny(vocabulary=2), silent).task
    with pytest.raises(TextError, match="the embedding of tiny has only 2 rows"):
        task.drawn(TEXT, windows=1, length=8)


def tiny(vocabulary: int = VOCABULARY, **changes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        **changes,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_both_perplexities_are_of_the_same_tokens(silent: Any) -> None:
    model = LoadedModel("tiny", Path(), tiny(), silent)
    perplexities = beginning._perplexities(model, silent, TEXT)
    expected = []
    rows = beginning.evaluation_windows(TEXT, silent, 256, limit=2).ids
    for first in (None, silent.bos_token_id):
        ids = rows.clone()
        if first is not None:
            ids[:, 0] = first
        with torch.no_grad():
            logits = model.model(ids).logits[:, 1:-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 2:].flatten())
        expected.append(loss.exp().item())
    assert perplexities == pytest.approx(expected, rel=1e-4)


def test_windows_longer_than_the_model_reads_are_refused_and_defaults_shortened(
    silent: Any,
) -> None:
    task = LoadedModel("tiny", Path(), tiny(max_position_embeddings=64), silent).task
    assert (task.window_length, task.judged_length) == (64, 64)
    too_long = "windows of 65 tokens: tiny reads at most 64"
    with pytest.raises(TextError, match=too_long):
        task.drawn(TEXT, windows=1, length=65)
    with pytest.raises(TextError, match=too_long):
        task.from_start(TEXT, length=65)
