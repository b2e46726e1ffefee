"""A few words from the original and from exported files, side by side: what no number shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kl_lens.checkpoints import LoadedModel
from kl_lens.evaluation.torch_session import TorchSession
from kl_lens.runs import Run
from kl_lens.states import STATE, state_of
from kl_lens.targets import Session, open_session

GENERATION = "generation"
NEW_TOKENS = 32


def likeliest(session: Session, tokenizer: Any, prompt: str, new_tokens: int = NEW_TOKENS) -> str:
    """The continuation of a prompt, always the likeliest token; ends at the end of text."""
    session.reset()
    logits = session.prefill(tokenizer.encode(prompt, add_special_tokens=False))
    new: list[int] = []
    for _ in range(new_tokens):
        token = int(logits.argmax())
        if token == tokenizer.eos_token_id:
            break
        new.append(token)
        logits = session.step(token)
    return str(tokenizer.decode(new))


def store_samples(
    run: Run, model: LoadedModel, artifacts: Mapping[str, Path], prompts: Sequence[str]
) -> None:
    """Continuations of each prompt by the original and by each artifact (subject → folder), into the run."""
    tokenizer = model.require_tokenizer()
    for name in run.load_all(GENERATION):
        run.forget(
            GENERATION, name
        )  # samples are shown side by side: of one set of prompts, and of these subjects
    original = TorchSession(model)
    _store(run, "original", original, tokenizer, prompts)
    for subject, folder in artifacts.items():
        session = open_session(folder)
        try:
            _store(run, subject, session, tokenizer, prompts)
        finally:
            session.close()


def _store(run: Run, subject: str, session: Session, tokenizer: Any, prompts: Sequence[str]) -> None:
    for prompt in prompts:
        text = likeliest(session, tokenizer, prompt)
        run.store(
            GENERATION,
            f"{subject}|{prompt}",
            {
                "subject": subject,
                "prompt": prompt,
                "text": text,
                "runtime": session.description,
                STATE: state_of(run, subject),
            },
        )
