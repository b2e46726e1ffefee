"""The checkpoints that ship with the project: small, trained, and what their cards say they are."""

import math
import re

import pytest
import torch
from safetensors import safe_open

from kl_lens.base.files import reference_path
from kl_lens.model import load
from kl_lens.text.windows import evaluation_windows
from tests.families import slow

CLASSES = {
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "hybrid": "FalconH1ForCausalLM",
}
CLASSES["hymba"] = (
    "HymbaForCausalLM"  # smaller than the others, and trained for two minutes
)


@pytest.mark.parametrize(
    "name",
    [slow(n) if n != "mamba" else n for n in CLASSES],
)
def test_size_kind_tokenizer_and_perplexity_are_what_the_card_says(name: str) -> None:
    """Perplexity on the first windows of WikiText-2 test; the card's figure is over all of it."""
    folder = reference_path(name)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 12e6
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F16"}  # noqa: SIM118
    model = load(f"reference:{name}")
    assert type(model.model).__name__ == CLASSES[name]
    assert 2e6 <= model.anatomy.parameters <= 6e6
    tokenizer = model.require_tokenizer()
    assert len(tokenizer) == 4096
    for text in (
        "Hello  world\n\n",
        "naïve – 漢字 🙂",
        " = Title = \n",
        "1234567",
        "\x00\x07",
    ):
        assert (
            tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
            == text
        )
    card = (folder / "README.md").read_text()
    command = f"train.py --corpus corpus.tar.xz --model {name}"
    for expected in (
        "CC BY-SA",
        "million tokens",
        "non-overlapping windows of 512",
        command,
    ):
        assert expected in card
    stated = float(re.search(r"this checkpoint\*\* \| \*\*([\d.]+)\*\*", card)[1])
    ngram = float(re.search(r"5-gram.*all the training text \| ([\d.]+)", card)[1])
    assert stated < ngram / (1.4 if name == "hymba" else 2)
    losses = []
    for window in evaluation_windows(
        "wikitext2:test", tokenizer, length=512, limit=4
    ).ids:
        log_p = model.chain.full_logits(window[None])[0].log_softmax(-1)
        losses.append(-log_p[:-1].gather(1, window[1:, None]).mean())
    mean = torch.stack(losses).mean()
    error = torch.stack(losses).std() / math.sqrt(len(losses))
    assert abs(mean - math.log(stated)) < 3 * error + 0.05
