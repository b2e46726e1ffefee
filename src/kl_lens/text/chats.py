"""Chats as calibration and evaluation text: rows of messages, put through the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kl_lens.base.errors import TextError, one_line

Chat = tuple[tuple[str, str], ...]  # (role, what is said), in order

_LISTS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
EXPECTED = (
    '`text` with a string, `messages` or `conversations` with a list of {"role", "content"} (or {"from", "value"}), or '
    "`prompt` and `completion`"
)


def content_of(row: Any, location: str) -> str | Chat:
    """What a row of JSON or Parquet holds: a text, or a chat."""
    if isinstance(row, Mapping):
        if isinstance(row.get("text"), str):
            return str(row["text"])
        for name in _LISTS:
            if isinstance(row.get(name), list):
                return _messages(row[name], f"{location}, `{name}`")
        if row.get("prompt") is not None and row.get("completion") is not None:
            question = _side(row["prompt"], "user", f"{location}, `prompt`")
            answer = _side(row["completion"], "assistant", f"{location}, `completion`")
            return question + answer
    fields = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
    raise TextError(
        f"{location}: no text and no chat (found: {fields or 'no fields'}): expected {EXPECTED}"
    )


def _side(value: Any, role: str, location: str) -> Chat:
    return ((role, value),) if isinstance(value, str) else _messages(value, location)


def _messages(messages: Any, location: str) -> Chat:
    chat = []
    for number, message in enumerate(messages if isinstance(messages, list) else [None]):
        fields = message if isinstance(message, Mapping) else {}
        role = fields.get("role", fields.get("from"))
        content = fields.get("content", fields.get("value"))
        if isinstance(content, list):  # parts, of which some may be pictures
            parts = [part.get("text") for part in content if isinstance(part, Mapping)]
            content = "".join(part for part in parts if isinstance(part, str))
        if not isinstance(role, str) or not isinstance(content, str):
            raise TextError(
                f"{location}, message {number + 1}: no role with a content: expected {EXPECTED}"
            )
        chat.append((_ROLES.get(role, role), content))
    return tuple(chat)


def with_role_names(chat: Chat) -> str:
    return "\n\n".join(f"{role}: {content}" for role, content in chat)


def templated(chat: Chat, tokenizer: Any, location: str) -> str:
    """As the model's template writes it, without BOS, which windows have of their own; without a template, each role's
    name stands before what is said."""
    if not getattr(tokenizer, "chat_template", None):
        return with_role_names(chat)
    messages = [{"role": role, "content": content} for role, content in chat]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template is somebody's program
        roles = ", ".join(role for role, _ in chat)
        reason = f"the model's chat template refuses it ({one_line(error)})"
        raise TextError(f"{location}: {reason}; its roles are {roles}") from None
    return text.removeprefix(getattr(tokenizer, "bos_token", None) or "")
