"""Text samples from the original and from exported files, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kl_lens.evaluation.judged import JudgedArtifact, JudgedModel
from kl_lens.model import LoadedModel
from kl_lens.run.folder import Run
from kl_lens.targets import Session

GENERATION = "generation"
NEW_TOKENS = 32


def likeliest(session: Session, tokenizer: Any, prompt: str) -> str:
    """Greedy continuation of a prompt; stops at the end of text."""
    session.reset()
    logits = session.prefill(tokenizer.encode(prompt, add_special_tokens=False))
    new: list[int] = []
    for _ in range(NEW_TOKENS):
        token = int(logits.argmax())
        if token == tokenizer.eos_token_id:
            break
        new.append(token)
        logits = session.step(token)
    return str(tokenizer.decode(new))


def store_continuations(
    run: Run, model: LoadedModel, artifacts: Sequence[JudgedArtifact], prompts: Sequence[str]
) -> None:
    """Stores continuations of each prompt by the original and by each artifact."""
    tokenizer = model.require_tokenizer()
    # Shown side by side, so all must have the same prompts.
    run.forget_results(GENERATION)
    for judged in (JudgedModel(model), *artifacts):
        session = judged.open()
        try:
            for prompt in prompts:
                text = likeliest(session, tokenizer, prompt)
                value = {"prompt": prompt, "text": text, "runtime": session.description}
                run.store_result(GENERATION, judged.subject, prompt, value)
        finally:
            session.close()
