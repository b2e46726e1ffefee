"""`generate`: text from an exported model, or a conversation with it, and how fast it came.

Needs the runtime and numpy, nothing more.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kl_lens.base.errors import TargetError
from kl_lens.base.system import peak_memory
from kl_lens.study import settings as of
from kl_lens.study.events import Events
from kl_lens.study.session import Session
from kl_lens.study.settings import AUTO, Runtime, Settings, group, option, with_options
from kl_lens.targets import open_session
from kl_lens.targets.session import ArtifactTokenizer, Logits, Session as RuntimeSession
from kl_lens.targets.tokenizer import find_tokenizer


@with_options
class GenerateSettings(Settings):
    artifact: Path = option(
        help="an exported folder, or a .gguf file", positional=True, metavar="ARTIFACT"
    )
    prompt: of.Text | None = option(
        None, "text to go on from; with --chat the first thing you say"
    )
    chat: bool = option(
        False,
        "a conversation by the model's chat template, line by line from standard input; /quit ends it",
    )
    max_new_tokens: of.Tokens | None = option(
        None, "default: 64; 1024 for an answer of --chat"
    )
    temperature: of.Temperature = option(0.0, "0: always the likeliest token")
    seed: of.Seed = option(0, "for a temperature above 0", metavar="S")
    tokenizer: of.Place | None = option(
        None, "folder, tokenizer.json or hub id (default: the artifact's)"
    )
    runtime: Runtime = group(Runtime)

    def check(self) -> None:
        super().check()
        if not self.prompt and not self.chat:
            raise TargetError(
                "give --prompt some text to go on from, or --chat for a conversation"
            )


@dataclass(frozen=True)
class GenerateResult:
    """With `chat`, the last prompt and answer; counts and speeds are of all turns."""

    prompt: str
    text: str
    prompt_tokens: int
    new_tokens: int
    prompt_tokens_per_second: float
    tokens_per_second: float
    ms_per_token: float
    runtime: dict[str, Any]
    load_seconds: float
    peak_memory_bytes: int


def generate(settings: GenerateSettings, session: Session) -> GenerateResult:
    begin = time.perf_counter()
    opened = open_session(
        settings.artifact, **asdict(settings.runtime.session(auto=AUTO))
    )
    load_seconds = time.perf_counter() - begin
    try:
        tokenizer = find_tokenizer(opened, settings.artifact, settings.tokenizer)
        writer = _Writer(settings, opened, tokenizer, session.events)
        prompt, text = (
            _conversation(writer)
            if settings.chat
            else _continued(writer, settings.prompt or "")
        )
        read = writer.read
        written = writer.written
        return GenerateResult(
            prompt,
            text,
            read,
            written,
            read / max(writer.read_seconds, 1e-9),
            written / max(writer.write_seconds, 1e-9),
            1000 * writer.write_seconds / max(1, written),
            opened.description,
            load_seconds,
            peak_memory(),
        )
    finally:
        opened.close()


def _continued(writer: _Writer, prompt: str) -> tuple[str, str]:
    """The prompt and what the model writes behind it."""
    ids = writer.tokenizer.begin(prompt)
    if not ids:
        raise TargetError("the prompt holds no tokens")
    text = writer.write(ids, shown_before=prompt)
    if not (prompt + text).endswith("\n"):  # a pipe's reader wants whole lines
        writer.events.wrote("\n")
    return prompt, text


def _conversation(writer: _Writer) -> tuple[str, str]:
    """Turn by turn until the input ends; the last thing said, and its answer."""
    tokenizer = writer.tokenizer
    events = writer.events
    settings = writer.settings
    if tokenizer.render is None:
        raise TargetError(
            f"{settings.artifact} has no chat template; give it a text with --prompt TEXT instead"
        )
    messages: list[dict[str, str]] = []
    message = settings.prompt or events.ask()
    while message is not None and message.strip() != "/quit":
        if message.strip():
            messages.append({"role": "user", "content": message})
            answer = writer.write(tokenizer.encode(tokenizer.render(messages)))
            events.wrote("\n")
            messages.append({"role": "assistant", "content": answer})
        message = events.ask()
    return (messages[-2]["content"], messages[-1]["content"]) if messages else ("", "")


class _Writer:
    """Writes with one session, which keeps what it has read: a prompt that goes on from there is not read again."""

    def __init__(
        self,
        settings: GenerateSettings,
        session: RuntimeSession,
        tokenizer: ArtifactTokenizer,
        events: Events,
    ) -> None:
        self.settings = settings
        self.session = session
        self.tokenizer = tokenizer
        self.events = events
        self.read = self.written = 0  # tokens
        self.read_seconds = self.write_seconds = 0.0
        self._fed: list[int] = []  # what the session's state has seen
        self._random = np.random.default_rng(settings.seed)
        self._most = settings.max_new_tokens or (1024 if settings.chat else 64)

    def write(self, ids: list[int], shown_before: str = "") -> str:
        """What the model writes behind `ids`, shown as it comes."""
        length = len(self._fed)
        if length == 0 or length >= len(ids) or ids[:length] != self._fed:
            self.session.reset()
            length = 0
        if (
            wrong := next((i for i in ids if i >= self.session.vocabulary), None)
        ) is not None:
            raise TargetError(
                f"{self.tokenizer.decode([wrong])!r} is token {wrong}, but {self.settings.artifact} has only "
                f"{self.session.vocabulary} tokens; give the model's own tokenizer with --tokenizer"
            )
        begin = time.perf_counter()
        logits = self.session.prefill(ids[length:])
        self.read_seconds += time.perf_counter() - begin
        self.read += len(ids) - length
        self._fed = list(ids)
        self.events.wrote(shown_before)
        new: list[int] = []
        shown = ""
        begin = time.perf_counter()
        for _ in range(self._most):
            token = _choose(logits, self.settings.temperature, self._random)
            if token in self.tokenizer.ends:
                break
            new.append(token)
            whole = self.tokenizer.decode(new)
            # A character can be spread over several tokens; wait until it is whole.
            if not whole.endswith("\ufffd"):
                self.events.wrote(whole[len(shown) :])
                shown = whole
            logits = self.session.step(token)
        self.write_seconds += time.perf_counter() - begin
        self.written += len(new)
        self._fed += new
        return self.tokenizer.decode(new)


def _choose(logits: Logits, temperature: float, random: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return int(random.choice(len(weights), p=weights / weights.sum()))
