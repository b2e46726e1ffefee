"""llama.cpp splits text as Hugging Face does, with the tokenizer that is inside the file."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import transformers

from kl_lens.errors import TargetError
from kl_lens.records import Plan
from kl_lens.resources import reference_path
from kl_lens.targets.gguf import export, open_session
from kl_lens.targets.gguf.tokenizer import _SPLITS, CONTROL, UNUSED, USER_DEFINED, tokenizer_data
from kl_lens.text import wikitext2
from tests.families import _COMMON
from tests.targets.gguf.support import tiny

AWKWARD = [
    "0123456789 3.14159 1,000,000 2024-11-15 ½ ² ③",
    "a  b   c    d     e" + " " * 40 + "f",
    " " * 24 + " " * 24,
    "\t\ttabs\n\n\nnewlines \r\n \n  \n",
    " leading and trailing   ",
    "def f(x):\n    return x\n        # deep\n",
    "🙂🏳️‍🌈👩‍👩‍👧‍👦 emoji 👍🏽",
    "漢字かな交じり文 한국어 中文。",
    "مرحبا بالعالم שלום नमस्ते",
    "\x01\x02\x1b[0m\x7f control",
    "zero\x00byte",
    "don't we'll I'M THEY'RE it’s",
    "<|endoftext|>x<|endoftext|>",
    "naïve café Ångström",
    "\u200b\ufeffzero width\u00a0no\u2003break",
    "\ud7ff\U0010ffff\ufffd",
    "`~!@#$%^&*()_+-=[]{}|;':\",./<>?",
    "x" * 300,
]


def _session(tokenizer: Any, vocabulary: int, folder: Path) -> Any:
    settings = {**_COMMON, "vocab_size": vocabulary, "num_hidden_layers": 1, "state_size": 8}
    model = tiny(transformers.MambaConfig(**settings), tokenizer)
    artifact = export(model, Plan("p", {}, "test"), folder, fingerprint="-")
    return open_session(folder / artifact.files[0], threads=1), artifact


def _compare(session: Any, tokenizer: Any, texts: list[str]) -> None:
    for text in texts:
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert session.tokenize(text, special=True) == expected, repr(text[:60])


@pytest.mark.parametrize("family", ["mamba", "mamba2", "hybrid"])
def test_reference_tokenizers(family: str, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(reference_path(family))
    session, artifact = _session(tokenizer, len(tokenizer), tmp_path)
    assert artifact.settings["tokenizer"] == "gpt-2"
    _compare(session, tokenizer, [*AWKWARD, _wikitext()])
    session.close()


def test_our_other_8k_tokenizer(shared: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared / "models/mamba-wiki")
    session, _ = _session(tokenizer, 8192, tmp_path)
    _compare(session, tokenizer, [*AWKWARD, _wikitext()])
    session.close()


def test_gpt_neox(shared: Path, tmp_path: Path) -> None:
    path = shared / "data/tokenizers/gpt_neox_20b_tokenizer.json"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|endoftext|>")
    session, artifact = _session(tokenizer, 50280, tmp_path)
    assert artifact.settings["tokenizer"] == "mpt"
    _compare(session, tokenizer, [unicodedata.normalize("NFC", text) for text in [*AWKWARD, _wikitext()]])
    # What llama.cpp does not do, and the artifact says so.
    assert "NFC" in artifact.settings["notes"][0]
    decomposed = "cafe\u0301"
    expected = tokenizer(decomposed)["input_ids"]
    assert session.tokenize(decomposed) != expected
    assert session.tokenize(unicodedata.normalize("NFC", decomposed)) == expected
    session.close()


@pytest.mark.parametrize("pattern", _SPLITS)
def test_split_patterns_of_llama_3_and_qwen_2(pattern: str, tmp_path: Path) -> None:
    """Their own vocabularies are not at hand: our merges behind their split show that the splits are the same."""
    specification = json.loads((reference_path("mamba") / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    specification["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    specification["model"]["ignore_merges"] = _SPLITS[pattern] == "llama-bpe"
    tokenizer = _from(specification, tmp_path)
    session, artifact = _session(tokenizer, len(tokenizer), tmp_path)
    assert artifact.settings["tokenizer"] == _SPLITS[pattern]
    _compare(session, tokenizer, [*AWKWARD, _wikitext()])
    session.close()


def test_token_types_and_padding() -> None:
    specification = json.loads((reference_path("mamba") / "tokenizer.json").read_text())
    size = len(specification["model"]["vocab"])
    extra = {"id": size, "content": "  ", "special": False, "single_word": False}
    specification["added_tokens"].append({**extra, "lstrip": False, "rstrip": False, "normalized": True})
    tokenizer = _from(specification, None)
    data = tokenizer_data(tokenizer, size + 3)
    special = next(t for t in specification["added_tokens"] if t["special"])
    assert data.types[special["id"]] == CONTROL
    assert data.types[size] == USER_DEFINED
    assert data.types[size + 1 :] == [UNUSED, UNUSED]
    assert data.tokens[size + 2] == f"[PAD{size + 2}]"
    assert len(data.tokens) == len(set(data.tokens)) == size + 3
    with pytest.raises(TargetError, match=f"a token {size} and the model only {size} rows"):
        tokenizer_data(tokenizer, size)


CHANGES: dict[str, dict[str, Any]] = {
    "it normalises with Lowercase": {"normalizer": {"type": "Lowercase"}},
    "its pre-tokenizer is Whitespace": {"pre_tokenizer": {"type": "Whitespace"}},
    "its pre-tokenizer is ByteLevel": {
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
    },
    "its pre-tokenizer is Split(x+)": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }
    },
}


@pytest.mark.parametrize("reason", CHANGES)
def test_tokenizers_without_a_proven_equal_are_refused(reason: str) -> None:
    specification = json.loads((reference_path("mamba") / "tokenizer.json").read_text()) | CHANGES[reason]
    with pytest.raises(TargetError) as caught:
        tokenizer_data(_from(specification, None), 10**6)
    assert reason in str(caught.value)
    assert "--without-tokenizer" in str(caught.value)


def test_a_tokenizer_without_merges_is_refused_before_anything_is_written() -> None:
    specification = json.loads((reference_path("mamba") / "tokenizer.json").read_text())
    specification["model"]["merges"] = []
    with pytest.raises(TargetError, match=r"a BPE without merges.* --without-tokenizer"):
        tokenizer_data(_from(specification, None), 10**6)


def test_a_file_without_tokenizer_runs_on_ids(tmp_path: Path) -> None:
    artifact = export(tiny("mamba"), Plan("p", {}, "test"), tmp_path, include_tokenizer=False)
    assert artifact.settings["tokenizer"] == "none"
    with open_session(tmp_path / artifact.files[0], threads=1) as session:
        assert session.vocabulary == 97
        assert session.step(5).shape == (97,)


def _from(specification: dict[str, Any], folder: Path | None) -> Any:
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(json.dumps(specification))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def _wikitext() -> str:
    return wikitext2("test").joined()[:200_000]
