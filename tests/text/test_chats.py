"""Chats become text by the model's own template, and the same chat stays the same document."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kl_lens.base.errors import TextError
from kl_lens.text.sources import TextSource, open_text
from kl_lens.text.windows import evaluation_windows

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
)
SPOKEN = [("user", "Why is the sky blue?"), ("assistant", "Air scatters blue light.")]
MESSAGES = [{"role": role, "content": content} for role, content in SPOKEN]
QUESTION, ANSWER = (content for _, content in SPOKEN)
WRITTEN = f"<user>{QUESTION}</s><assistant>{ANSWER}</s>"

ROWS: dict[str, Any] = {
    "messages": {"messages": MESSAGES, "id": 7},
    "parts": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": QUESTION}],
            },
            MESSAGES[1],
        ]
    },
    "conversations": {
        "conversations": [
            {"from": "human", "value": QUESTION},
            {"from": "gpt", "value": ANSWER},
        ]
    },
    "prompt and completion": {"prompt": QUESTION, "completion": ANSWER},
    "lists of messages": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
}


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Of single letters, with BOS."""
    letters = {chr(code): code for code in range(32, 127)}
    backend = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, **letters}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


def opened(path: Path, *rows: object) -> TextSource:
    path.write_text("\n".join(map(json.dumps, rows)))
    return open_text(path)


@pytest.mark.parametrize("name", ROWS)
def test_every_kind_of_row_is_the_same_chat(name: str, tmp_path: Path) -> None:
    source = opened(tmp_path / "chats.jsonl", ROWS[name])
    (document,) = source.documents
    assert document.chat == tuple(SPOKEN)
    assert document.text == f"user: {QUESTION}\n\nassistant: {ANSWER}"
    written = source.for_model(tokenizer())
    assert written.documents[0].text == WRITTEN  # without BOS, which windows have
    assert written.documents[0].sha256 == document.sha256
    assert written.note == ""


def test_parquet_holds_chats_too(tmp_path: Path) -> None:
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.table({"id": [1, 2], "messages": [MESSAGES, MESSAGES[:1]]}), path)
    chats = [document.chat for document in open_text(path).documents]
    assert chats == [tuple(SPOKEN), tuple(SPOKEN[:1])]


def test_windows_are_made_of_what_the_template_writes(tmp_path: Path) -> None:
    source = opened(tmp_path / "chats.jsonl", ROWS["messages"], {"text": "Plain. " * 9})
    windows = evaluation_windows(source, tokenizer(), length=60, limit=1)
    begun = tokenizer().decode(windows.ids[0].tolist()).replace(" ", "")
    assert begun.startswith(WRITTEN.replace(" ", "")[:40])
    assert windows.note == ""


def test_without_a_template_role_names_stand_there_and_a_note_says_so(
    tmp_path: Path,
) -> None:
    source = opened(tmp_path / "chats.jsonl", ROWS["messages"])
    written = source.for_model(tokenizer(template=None))
    assert written.documents[0].text.startswith("user: Why")
    assert "no chat template: role names" in written.note


def test_a_template_that_refuses_a_chat_is_said_with_its_place(tmp_path: Path) -> None:
    source = opened(tmp_path / "chats.jsonl", {"text": "a"}, {"messages": [MESSAGES[1]]})
    strict = SimpleNamespace(
        chat_template="strict",
        apply_chat_template=lambda *_, **__: tokenizer(
            "{{ raise_exception('begin with the user') }}"
        ).apply_chat_template(MESSAGES),
    )
    with pytest.raises(
        TextError, match=r"line 2: .*refuses it .*begin with the user.*assistant"
    ):
        source.for_model(strict)
