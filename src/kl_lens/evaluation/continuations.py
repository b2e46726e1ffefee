"""Text samples from the original and from exported files, for the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

from kl_lens.evaluation.judged import JudgedArtifact, JudgedModel
from kl_lens.model import LoadedModel
from kl_lens.run.folder import Run
from kl_lens.targets import Session

GENERATION = "generation"
NEW_TOKENS = 32


def likeliest(session: Session, ids: Sequence[int], end: int | None, most: int) -> Iterator[int]:
    """The likeliest tokens after these, until the end of text."""
    session.reset()
    logits = session.prefill(ids)
    for _ in range(most):
        token = int(logits.argmax())
        if token == end:
            return
        yield token
        logits = session.step(token)


def store_continuations(
    run: Run, model: LoadedModel, artifacts: Sequence[JudgedArtifact], prompts: Sequence[str]
) -> None:
    """Stores continuations of each prompt by the original and by each artifact."""
    tokenizer = model.require_tokenizer()
    # Shown side by side, so all must have the same prompts.
    run.forget_results(GENERATION)
    for judged in (JudgedModel(model), *artifacts):
        with closing(judged.open()) as session:
            for prompt in prompts:
                ids = tokenizer.encode(prompt, add_special_tokens=False)
                new = list(likeliest(session, ids, tokenizer.eos_token_id, NEW_TOKENS))
                value = {"prompt": prompt, "text": tokenizer.decode(new), "runtime": session.description}
                run.store_result(GENERATION, judged.subject, prompt, value)
