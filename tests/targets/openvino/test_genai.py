"""OpenVINO GenAI opens an exported folder and writes what `kl-lens generate` writes."""

import functools
import json
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openvino as ov
import pytest
import transformers
from openvino._offline_transformations import paged_attention_transformation
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from kl_lens.model import LoadedModel, load
from kl_lens.run.records import Plan
from kl_lens.study.generate import GenerateSettings, generate
from kl_lens.study.session import Session
from kl_lens.study.settings import Runtime
from kl_lens.targets import open_session
from tests.byte_level import save_tokenizer
from tests.families import plain, tiny_model
from tests.targets.openvino.conftest import export

genai = pytest.importorskip(
    "openvino_genai", reason="needs openvino-genai, of the extra kl-lens[dev]"
)

NEW_TOKENS = 12
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
END = "<|end|>"
TURN = "<|turn|>"
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)
SLOW = (
    "mamba2",
    "falcon_h1",
    "llama",
    "jamba",
    "granitemoehybrid",
    "lfm2",
    "qwen3_next",
    "gemma3_text",
)
# Random models nearly tie, and half precision decides: both sides compute in float32.
EXACT = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = functools.partialmethod(Runtime.session, exact=True)
    monkeypatch.setattr(Runtime, "session", exact)


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for each byte and two special ones: every text can be written with it."""
    tokenizer = Tokenizer(
        models.BPE({letter: index for index, letter in enumerate(BYTES)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END
    )
    fast.add_special_tokens({"additional_special_tokens": [TURN]})
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folder(family): the family's tiny model with a tokenizer, exported."""
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            tokenizer = byte_tokenizer()
            tiny = tiny_model(family, vocabulary=len(tokenizer))
            model = plain(LoadedModel(family, Path("nowhere"), tiny, tokenizer))
            folders[family] = tmp_path_factory.mktemp(family) / "exported"
            artifact = export(model, Plan("p", {}, "test"), folders[family])
            assert "notes" not in artifact.settings
        return folders[family]

    return make


def ours(folder: Path, prompt: str) -> str:
    """Without the special tokens, which GenAI leaves out of a text."""
    settings = GenerateSettings.of(
        artifact=folder, prompt=prompt, max_new_tokens=NEW_TOKENS
    )
    written = generate(settings, Session())
    assert written.runtime["mode"] == "exact"
    return written.text.replace(TURN, "")


def readable(text: str) -> str:
    """Random models write bytes that are no text; how many marks such bytes get is each decoder's choice."""
    return re.sub("\ufffd+", "\ufffd", text)


def theirs(pipeline: Any, prompt: Any, **settings: Any) -> str:
    config = genai.GenerationConfig(max_new_tokens=NEW_TOKENS, **settings)
    config.set_eos_token_id(pipeline.get_tokenizer().get_eos_token_id())
    answer = pipeline.generate(prompt, config)
    return answer if isinstance(answer, str) else answer.texts[0]


@pytest.mark.parametrize(
    "family", ["mamba", *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW)]
)
def test_genai_writes_the_same_text(family: str, folder: Callable) -> None:
    path = folder(family)
    pipeline = genai.LLMPipeline(path, "CPU", **EXACT)
    for prompt in ("Once upon a time", "def f(x):"):  # the second begins afresh
        text = theirs(pipeline, prompt, apply_chat_template=False)
        assert readable(text) == readable(ours(path, prompt))


@pytest.mark.parametrize(
    "family",
    [
        "mamba",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("falcon_h1", "mamba2")),
    ],
)
def test_a_chat_goes_on_where_it_was(family: str, folder: Callable) -> None:
    """The history is tokenized anew for every turn; GenAI has to begin again where the states cannot be cut back."""
    path = folder(family)
    pipeline = genai.LLMPipeline(path, "CPU", **EXACT)
    answers = []
    pipeline.start_chat()
    for question in ("Hello", "And then?"):
        answers.append({"role": "user", "content": question})
        written = byte_tokenizer().apply_chat_template(
            answers, tokenize=False, add_generation_prompt=True
        )
        answer = theirs(pipeline, question)
        assert answer.encode() == ours(path, written).encode()
        answers.append({"role": "assistant", "content": answer})
    pipeline.finish_chat()
    history = genai.ChatHistory(answers[:3])
    assert theirs(pipeline, history) == answers[3]["content"]


@pytest.mark.parametrize(
    "family", ["mamba", pytest.param("llama", marks=pytest.mark.slow)]
)
def test_genai_cannot_change_the_attention_or_feed_several_sequences(
    family: str, folder: Callable
) -> None:
    """Its first try, on x86, is paged attention, which would get positions wrong. It pads prompts of different lengths,
    and no mask is read here. Both are refused, not wrong."""
    graph = ov.Core().read_model(folder(family) / "openvino_model.xml")
    with pytest.raises(
        RuntimeError,
        match=r"undeclared parameters.*beam_idx|No ScaledDotProductAttention",
    ):
        paged_attention_transformation(graph)
    pipeline = genai.LLMPipeline(folder(family), "CPU")
    with pytest.raises(RuntimeError, match="Reshape"):
        pipeline.generate("Hello", genai.GenerationConfig(max_new_tokens=3, num_beams=2))
    with pytest.raises(RuntimeError, match="Reshape"):
        pipeline.generate(
            ["Hello", "Once upon a time"], genai.GenerationConfig(max_new_tokens=3)
        )


def test_a_tokenizer_that_cannot_be_converted(tmp_path: Path) -> None:
    """Without special tokens, openvino-tokenizers fails. The rest is exported, and one line says so."""
    tiny_model("mamba").save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model", ["the quick brown fox"])
    artifact = export(
        plain(load(tmp_path / "model")), Plan("p", {}, "test"), tmp_path / "out"
    )
    [note] = artifact.settings["notes"]
    assert note.startswith(
        "no openvino_tokenizer.xml was written, so OpenVINO GenAI cannot open this folder"
    )
    assert str(tmp_path / "model") in note
    assert "\n" not in note
    assert not list((tmp_path / "out").glob("*tokenizer*.bin"))
    open_session(tmp_path / "out", threads=1).close()


@pytest.mark.parametrize("odd", [1, 20])
def test_a_few_odd_tokens_take_no_tokenizer_away(
    odd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of Gemma's `</div>`: openvino-tokenizers writes one token otherwise. A note names it, and GenAI opens it."""
    tokenizer = byte_tokenizer()
    tokenizer.init_kwargs |= {"local_files_only": True, "is_local": True}
    usual = tokenizer.decode

    def decode(ids: list[int], **settings: Any) -> str:
        text = usual(ids, **settings)
        for letter in string.ascii_lowercase[:odd]:
            text = text.replace(letter, "?")
        return text

    monkeypatch.setattr(tokenizer, "decode", decode)
    tiny = tiny_model("mamba", vocabulary=len(tokenizer))
    model = plain(LoadedModel("mamba", Path("nowhere"), tiny, tokenizer))
    artifact = export(model, Plan("p", {}, "test"), tmp_path / "out")
    [note] = artifact.settings["notes"]
    written = (tmp_path / "out" / "openvino_tokenizer.xml").is_file()
    assert written == (odd == 1)
    assert (
        "turns the tokens of 'a' into other text than transformers: 'a'" in note
    ) == written
    assert note.startswith("no openvino_tokenizer.xml was written") != written
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert not {"local_files_only", "is_local"} & set(config)
    if written:
        pipeline = genai.LLMPipeline(tmp_path / "out", "CPU", **EXACT)
        assert theirs(pipeline, "Hello", apply_chat_template=False)
