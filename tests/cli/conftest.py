"""A tiny model with a tokenizer and a little text: enough for every verb to run for real."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from kl_lens.profiling import benchmark
from kl_lens.profiling.memory import MemoryUse, fresh_process
from kl_lens.targets import SessionSettings
from kl_lens.text.sources import wikitext2
from tests.families import VOCABULARY, tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mamba with a vocabulary of the 96 most frequent words of a text, and `text.txt` beside it."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny-mamba"
    tiny_model("mamba").save_pretrained(folder)
    text = "\n\n".join(document.text for document in wikitext2("valid").documents[:20])
    words: dict[str, int] = {}
    for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(text):
        words[word] = words.get(word, 0) + 1
    common = sorted(words, key=lambda w: -words[w])[: VOCABULARY - 1]
    vocabulary = {"[UNK]": 0} | {word: index + 1 for index, word in enumerate(common)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]"
    ).save_pretrained(folder)
    (folder / "text.txt").write_text(text)
    return folder


@pytest.fixture(scope="package", autouse=True)
def files_are_weighed_once() -> Iterator[None]:
    """One process that loads a file is enough for each target: each takes seconds to load its libraries."""
    weighed: dict[str, MemoryUse] = {}

    def weigh(path: Path, target: str, settings: SessionSettings) -> MemoryUse:
        return weighed.get(target) or weighed.setdefault(
            target, fresh_process(path, target, settings)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "fresh_process", weigh)
        patch.setattr(benchmark, "LOADS", 1)
        yield


@pytest.fixture
def measure_arguments(tiny_folder: Path, tmp_path: Path) -> list[str]:
    return (
        f"measure {tiny_folder} --run {tmp_path / 'run'} --text {tiny_folder / 'text.txt'} "
        "--windows 4 --window-length 32"
    ).split()
