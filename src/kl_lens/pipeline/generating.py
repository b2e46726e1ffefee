"""`generate`: text from an exported model, and how fast it came. Needs the runtime and numpy, nothing more."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kl_lens.environment import peak_memory
from kl_lens.errors import TargetError
from kl_lens.pipeline.events import Events
from kl_lens.pipeline.settings import LAYERS, LOAD, LOAD_HELP, SEED, THREADS, TOKENS, Settings, number, option
from kl_lens.targets import open_session
from kl_lens.targets.session import Logits, Session
from kl_lens.targets.tokenizer import ArtifactTokenizer, find_tokenizer


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(Settings):
    verb: ClassVar[str] = "generate"
    opens_models: ClassVar[bool] = False

    artifact: Path = option(help="an exported folder, or a .gguf file", positional=True, metavar="ARTIFACT")
    prompt: str = option(metavar="TEXT")
    max_new_tokens: int = option(64, kind=TOKENS)
    temperature: float = option(
        0.0, "0: always the likeliest token", kind=number(1000, of=float), metavar="T"
    )
    seed: int = option(0, "for a temperature above 0", kind=SEED, metavar="S")
    tokenizer: str | None = option(
        None,
        "folder, tokenizer.json or hub id (default: beside the artifact, or inside a .gguf file)",
        metavar="PLACE",
    )
    device: str = option("CPU", "OpenVINO device")
    threads: int | None = option(None, "default: the runtime's own choice", kind=THREADS)
    gpu_layers: int = option(0, "llama.cpp: layers on a GPU, or all", kind=LAYERS)
    load: str = option("auto", LOAD_HELP, kind=LOAD)

    def check(self) -> None:
        super().check()
        if not self.prompt:
            raise TargetError("--prompt is empty; give some text to go on from")


@dataclass(frozen=True)
class GenerateResult:
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


def generate(settings: GenerateSettings, events: Events) -> GenerateResult:
    begin = time.perf_counter()
    session = open_session(
        settings.artifact,
        device=settings.device,
        threads=settings.threads,
        gpu_layers=settings.gpu_layers,
        load=settings.load,
    )
    load_seconds = time.perf_counter() - begin
    try:
        tokenizer = find_tokenizer(session, settings.artifact, settings.tokenizer)
        ids = tokenizer.encode(settings.prompt)
        if not ids:
            raise TargetError("the prompt holds no tokens")
        return _generated(settings, session, tokenizer, ids, load_seconds, events)
    finally:
        session.close()


def _generated(
    settings: GenerateSettings,
    session: Session,
    tokenizer: ArtifactTokenizer,
    ids: list[int],
    load_seconds: float,
    events: Events,
) -> GenerateResult:
    random = np.random.default_rng(settings.seed)
    session.reset()
    begin = time.perf_counter()
    logits = session.prefill(ids)
    prompt_seconds = time.perf_counter() - begin
    events.wrote(settings.prompt)
    new: list[int] = []
    shown = ""
    begin = time.perf_counter()
    for _ in range(settings.max_new_tokens):
        token = _choose(logits, settings.temperature, random)
        if token in tokenizer.ends:
            break
        new.append(token)
        whole = tokenizer.decode(new)
        # A character can be spread over several tokens; wait until it is whole.
        if not whole.endswith("\ufffd"):
            events.wrote(whole[len(shown) :])
            shown = whole
        logits = session.step(token)
    seconds = time.perf_counter() - begin
    return GenerateResult(
        prompt=settings.prompt,
        text=tokenizer.decode(new),
        prompt_tokens=len(ids),
        new_tokens=len(new),
        prompt_tokens_per_second=len(ids) / max(prompt_seconds, 1e-9),
        tokens_per_second=len(new) / max(seconds, 1e-9),
        ms_per_token=1000 * seconds / max(1, len(new)),
        runtime=session.description,
        load_seconds=load_seconds,
        peak_memory_bytes=peak_memory(),
    )


def _choose(logits: Logits, temperature: float, random: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    return int(random.choice(len(weights), p=weights / weights.sum()))
