"""llama.cpp splits text as Hugging Face does, with the tokenizer that is inside the file."""

import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from kl_lens.base.errors import CheckpointError, TargetError, TextError
from kl_lens.base.files import reference_path
from kl_lens.model import load_tokenizer
from kl_lens.run.records import Plan
from kl_lens.targets import export as write
from kl_lens.targets.gguf import tokenizer as gguf_tokenizer
from kl_lens.targets.gguf.export import export
from kl_lens.targets.gguf.header import read_header
from kl_lens.targets.gguf.session import open_session
from kl_lens.targets.gguf.tokenizer import SPLITS, tokenizer_data
from kl_lens.targets.gguf.vocabulary import write_tokenizer
from kl_lens.targets.tokenizer import varied_strings
from kl_lens.text.sources import Document, TextSource, wikitext2
from kl_lens.text.windows import draw_windows
from tests.targets.gguf.support import small_mamba

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

LINES = varied_strings(2000)

_BYTES = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def _reference() -> dict[str, Any]:
    return json.loads((reference_path("mamba") / "tokenizer.json").read_text())


def _session(tokenizer: Any, vocabulary: int, folder: Path) -> Any:
    artifact = export(
        small_mamba(tokenizer, vocab_size=vocabulary), Plan("p", {}, "test"), folder
    )
    return open_session(folder / artifact.files[0], threads=1), artifact


def _compare(session: Any, tokenizer: Any, texts: list[str]) -> None:
    """llama.cpp's ids, and those of the tokenizer that is read back from the file."""
    again = session.path.parent / "again"
    write_tokenizer(read_header(session.path, whole=True), again)
    opened = transformers.AutoTokenizer.from_pretrained(again)
    for text in texts:
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert session.tokenize(text) == expected, repr(text[:60])
        read_back = opened(text, add_special_tokens=False)["input_ids"]
        assert read_back == expected, repr(text[:60])


def test_our_own(tmp_path: Path) -> None:
    tokenizer = _from(_reference())
    assert tokenizer.eos_token_id is None
    session, artifact = _session(tokenizer, len(tokenizer), tmp_path)
    assert artifact.settings["tokenizer"] == "gpt-2"
    # llama.cpp takes token 11 for the end where a file names none.
    assert session.end_tokens == {tokenizer.convert_tokens_to_ids("<|endoftext|>")}
    _compare(session, tokenizer, [*AWKWARD, _wikitext(), *LINES])
    session.close()


def test_gpt_neox(shared: Path, tmp_path: Path) -> None:
    path = shared / "data/tokenizers/gpt_neox_20b_tokenizer.json"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path), eos_token="<|endoftext|>"
    )
    session, artifact = _session(tokenizer, 50280, tmp_path)
    assert artifact.settings["tokenizer"] == "mpt"
    _compare(
        session,
        tokenizer,
        [unicodedata.normalize("NFC", text) for text in [*AWKWARD, _wikitext(), *LINES]],
    )
    # What llama.cpp does not do, and the artifact says so.
    assert "NFC" in artifact.settings["notes"][0]
    decomposed = "cafe\u0301"
    expected = tokenizer(decomposed)["input_ids"]
    assert session.tokenize(decomposed) != expected
    assert session.tokenize(unicodedata.normalize("NFC", decomposed)) == expected
    session.close()


@pytest.mark.parametrize(("kind", "name"), [*SPLITS.items(), (None, "starcoder")])
def test_split_patterns(kind: tuple[str, bool] | None, name: str, tmp_path: Path) -> None:
    """Our merges behind the patterns of other models."""
    specification = _reference()
    pattern, specification["model"]["ignore_merges"] = kind or ("", False)
    how = {"behavior": "Isolated", "invert": False}
    if name == "dbrx":  # as files that come from tiktoken spell the same
        how = {"behavior": "Removed", "invert": True}
    split = {"type": "Split", "pattern": {"Regex": pattern}, **how}
    steps = [split, _BYTES]
    if kind is None:
        steps = [
            {"type": "Digits", "individual_digits": True},
            _BYTES | {"use_regex": True},
        ]
    specification["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    tokenizer = _from(specification)
    session, artifact = _session(tokenizer, len(tokenizer), tmp_path)
    assert artifact.settings["tokenizer"] == name
    texts = [*AWKWARD, _wikitext(), *LINES]
    if name in (
        "tekken",
        "gpt-4o",
    ):  # which split words of other scripts differently, and says so
        assert "ASCII letters only" in artifact.settings["notes"][0]
        texts = [text for text in texts if text.isascii()]
    _compare(session, tokenizer, texts)
    session.close()


def test_the_pattern_is_that_of_the_file(tmp_path: Path) -> None:
    """Not that of the class which its settings name."""
    specification = _reference()
    (pattern, _), _ = next(item for item in SPLITS.items() if item[1] == "qwen35")
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    specification["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, _BYTES],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(specification))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path, None, trust_remote_code=False)
    assert tokenizer_data(tokenizer, 10**4).metadata["tokenizer.ggml.pre"] == "qwen35"
    assert tokenizer.eos_token == "<|endoftext|>"


def _sentencepiece(**changes: Any) -> Any:
    """A small BPE with byte fallback whose merges are all pairs that make a token, as SentencePiece's are."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    trainer = trainers.BpeTrainer(vocab_size=900, limit_alphabet=90, show_progress=False)
    trained.train_from_iterator([_wikitext()], trainer)
    learnt = [
        text for text, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])
    ]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt]
    known = set(learnt)
    merges = [
        [text[:cut], text[cut:]]
        for text in learnt
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
    specification = json.loads(trained.to_str()) | changes
    specification["model"] |= {
        "vocab": {text: index for index, text in enumerate(texts)},
        "merges": merges,
        "byte_fallback": True,
        "unk_token": "<unk>",
        "fuse_unk": True,
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    specification["added_tokens"] = [
        {"id": index, "content": text, "special": True, **flags}
        for index, text in enumerate(texts[:3])
    ]
    specification["post_processor"] = None
    tokenizer = _from(specification)
    tokenizer.bos_token = "<s>"
    tokenizer.eos_token = "</s>"
    tokenizer.unk_token = "<unk>"
    return tokenizer


SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
GEMMA = {  # there are no spaces any more
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}


@pytest.mark.parametrize(
    ("changes", "prefix", "exact"),
    [
        (
            {
                "normalizer": {"type": "Sequence", "normalizers": [PREPEND, SPACES]},
                "pre_tokenizer": None,
            },
            True,
            True,
        ),
        ({"normalizer": SPACES, "pre_tokenizer": None}, False, True),
        ({"normalizer": SPACES, "pre_tokenizer": GEMMA}, False, True),
        (
            {
                "normalizer": None,
                "pre_tokenizer": METASPACE | {"prepend_scheme": "never"},
            },
            False,
            True,
        ),
        (
            {
                "normalizer": None,
                "pre_tokenizer": METASPACE | {"prepend_scheme": "always"},
            },
            True,
            False,
        ),
        (
            {
                "normalizer": None,
                "pre_tokenizer": METASPACE | {"prepend_scheme": "first"},
            },
            False,
            False,
        ),
    ],
)
def test_sentencepiece(
    changes: dict[str, Any], prefix: bool, exact: bool, tmp_path: Path
) -> None:
    tokenizer = _sentencepiece(**changes)
    session, artifact = _session(tokenizer, len(tokenizer), tmp_path)
    assert artifact.settings["tokenizer"] == "default"
    assert session.file.metadata["tokenizer.ggml.add_space_prefix"] is prefix
    assert bool(artifact.settings["notes"]) is not exact
    special = ["<s>", "</s>"]
    texts = [*AWKWARD, _wikitext()[:20_000], *varied_strings(2000, special=special)]
    if not exact and prefix:
        texts = [
            text.lstrip(" ")
            for text in texts
            if not any(each in text for each in special)
        ]
    elif not exact:
        texts = ["<s>[x] Hello</s> a", *(f" {text.lstrip(' ')}" for text in texts)]
        assert (
            session.tokenize("Hello")
            != tokenizer("Hello", add_special_tokens=False)["input_ids"]
        )
    _compare(session, tokenizer, [text for text in texts if text])
    session.close()


def test_a_list_of_tokens(tmp_path: Path) -> None:
    """Letters, a space, longer tokens, and `<eos>`; what is not listed is dropped."""
    (tmp_path / "tokens.txt").write_text("<cls>\n<eos>\nA\nC\nG\n-\nCl\n \n")
    tokenizer = load_tokenizer(tmp_path, tmp_path / "tokens.txt", trust_remote_code=False)
    session, _ = _session(tokenizer, 16, tmp_path / "out")
    for text in (
        "<cls>ACG-A",
        "CClA C",
        "A\nC\n\nxG",
        "G<eos>",
        *varied_strings(500, special=["<eos>", "A", "Cl"]),
    ):
        assert (
            session.tokenize(text)
            == tokenizer(text, add_special_tokens=False)["input_ids"]
        ), text
    assert tokenizer("<cls>AC Cl-")["input_ids"] == [0, 2, 3, 7, 6, 5]
    assert (tokenizer.decode([2, 7, 6]), tokenizer.eos_token_id) == ("A Cl", 1)
    session.close()
    windows = draw_windows(
        TextSource("t", None, (Document("t", "<cls>ACG<eos>\nGC"),)), tokenizer, 1, 4
    )
    assert windows.stream_tokens == 7
    with pytest.raises(
        TextError, match="t: the tokenizer has no token for 'D', 'a': remove such letters"
    ):
        draw_windows(
            TextSource("t", None, (Document("t", "<cls>ACaD"),)), tokenizer, 1, 4
        )
    (tmp_path / "tokens.txt").write_text("A\n\nB\n")
    with pytest.raises(
        CheckpointError,
        match=r"tokens.txt could not be read \(line 2, '', is empty, there twice",
    ):
        load_tokenizer(tmp_path, tmp_path / "tokens.txt", trust_remote_code=False)


def test_a_wrong_name_is_found_when_the_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if llama.cpp's pattern of that name were another one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(reference_path("mamba"))
    monkeypatch.setattr(
        gguf_tokenizer, "_pre_tokenizer", lambda specification, composes: "qwen2"
    )
    with pytest.raises(
        TargetError,
        match=r"tokenizer \(qwen2\) splits text unlike the model's; export with",
    ):
        write(small_mamba(tokenizer), Plan("p", {}, "test"), "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    "KL_LENS_TOKENIZERS" not in os.environ, reason="names a folder of tokenizers' folders"
)
def test_tokenizers_of_real_models(tmp_path: Path) -> None:
    """Ten thousand strings each, as they are and composed; docs/targets.md has the table."""
    for file in sorted(Path(os.environ["KL_LENS_TOKENIZERS"]).glob("*/tokenizer.*")):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(file.parent)
        session, artifact = _session(
            tokenizer,
            max(tokenizer.get_vocab().values()) + 8,
            tmp_path / file.parent.name,
        )
        special = [token.content for token in tokenizer.added_tokens_decoder.values()][
            :40
        ]
        plain = varied_strings(10_000, special=special)
        differ = []
        for texts in (plain, [unicodedata.normalize("NFC", text) for text in plain]):
            expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
            differ.append(
                sum(
                    session.tokenize(text) != ids
                    for text, ids in zip(texts, expected, strict=True)
                )
            )
        session.close()
        print(
            file.parent.name,
            artifact.settings["tokenizer"],
            differ,
            artifact.settings["notes"],
        )
        assert min(differ) == 0 or artifact.settings["notes"]


_SPLIT = {
    "type": "Split",
    "pattern": {"Regex": "x+"},
    "behavior": "Isolated",
    "invert": False,
}
CHANGES: dict[str, dict[str, Any]] = {
    "it normalises with Lowercase": {"normalizer": {"type": "Lowercase"}},
    "its pre-tokenizer is Whitespace": {"pre_tokenizer": {"type": "Whitespace"}},
    "its pre-tokenizer is ByteLevel": {
        "pre_tokenizer": _BYTES | {"add_prefix_space": True, "use_regex": True}
    },
    "its pre-tokenizer is Split(x+)": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_SPLIT, _BYTES]}
    },
}


@pytest.mark.parametrize("reason", CHANGES)
def test_tokenizers_without_a_proven_equal_are_refused(reason: str) -> None:
    specification = _reference() | CHANGES[reason]
    with pytest.raises(TargetError) as caught:
        tokenizer_data(_from(specification), 10**6)
    assert reason in str(caught.value)
    assert "--without-tokenizer" in str(caught.value)


def _from(specification: dict[str, Any]) -> Any:
    backend = Tokenizer.from_str(json.dumps(specification))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def _wikitext() -> str:
    return wikitext2("test").joined()[:50_000]
