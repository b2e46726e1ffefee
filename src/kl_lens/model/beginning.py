"""Whether texts begin with the model's first token, BOS: as its tokenizer says, or where it says nothing, as measured.

The tokenizer is made to say it, so that windows, tasks, prompts and exported files all begin alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.nn import functional

from kl_lens.base.errors import CheckpointError, TextError
from kl_lens.model.chain import Chain
from kl_lens.text.sources import WIKITEXT, TextSource, open_text
from kl_lens.text.windows import beginning_of, evaluation_windows

AUTO, YES, NO = "auto", "yes", "no"
# Perplexity that falls to less than this with BOS in front: the model expects it.
FALLS_TO = 0.8
_WINDOWS = 2
_TOKENS = 256  # of each
_MARK = "\ue000"  # in place of BOS in a chat template


class Opened(Protocol):
    """What is needed of a `LoadedModel`."""

    name: str

    @property
    def warn(self) -> Callable[[str], None]: ...

    @property
    def chain(self) -> Chain: ...


class Beginning:
    """`choice`: yes or no; auto until a model with a silent tokenizer was measured."""

    def __init__(self, tokenizer: Any, choice: str = AUTO) -> None:
        self.tokenizer = tokenizer
        self.choice = choice
        self.note = ""  # how it was decided, where that was measured
        if tokenizer is None:
            self.choice = NO
        elif choice != AUTO:
            self.decide(choice)
        elif beginning_of(tokenizer) is not None or _is_in_template(tokenizer):
            self.decide(YES)
        elif getattr(tokenizer, "bos_token_id", None) is None:
            self.choice = NO

    @property
    def settled(self) -> str | None:
        return None if self.choice == AUTO else self.choice

    @property
    def words(self) -> str:
        """For people."""
        if self.choice == AUTO:
            return "measured with the first text: the tokenizer does not say"
        bos = None if self.choice == NO else beginning_of(self.tokenizer)
        if bos is None:
            return "texts begin without BOS"
        return f"texts begin with BOS, {self.tokenizer.decode([bos])!r} (token {bos})"

    def settle(self, model: Opened, source: TextSource | str = WIKITEXT) -> str:
        """The choice; measured on two windows of a text if it is not known yet."""
        if self.choice != AUTO:
            return self.choice
        # Whoever asked for the text says what is wrong with it, or with its tokens.
        with suppress(TextError, IndexError):
            text = open_text(source) if isinstance(source, str) else source
            before, after = _perplexities(model, self.tokenizer, text)
            self.decide(YES if after < FALLS_TO * before else NO)
            if self.choice == YES:
                self.note = (
                    f"{model.name}: every window begins with BOS ({self.tokenizer.bos_token}): on two windows of "
                    f"{text.label} it takes perplexity from {before:,.1f} to {after:,.1f}; --bos no leaves it out"
                )
                model.warn(self.note)
        return self.choice

    def decide(self, choice: str) -> None:
        """Makes the tokenizer begin texts so."""
        begins = choice == YES
        if (beginning_of(self.tokenizer) is not None) != begins:
            # transformers makes the tokenizer's last step anew; save_pretrained writes it.
            self.tokenizer.add_bos_token = begins
        if (beginning_of(self.tokenizer) is not None) != begins:
            lacks = "has no BOS" if begins else "puts a token before a text"
            raise CheckpointError(
                f"--bos {choice}: the tokenizer {lacks}, and that cannot be changed; give another with --tokenizer"
            )
        self.choice = choice


def _is_in_template(tokenizer: Any) -> bool:
    """Whether chats begin with BOS."""
    chat = [{"role": "user", "content": "A"}]
    with suppress(Exception):  # no template, or one that fails: third-party code
        how = {"tokenize": False, "bos_token": _MARK}
        return str(tokenizer.apply_chat_template(chat, **how)).startswith(_MARK)
    return False


def _perplexities(model: Opened, tokenizer: Any, text: TextSource) -> tuple[float, float]:
    """Of the same tokens behind the text's own first token, and behind BOS."""
    length = min(_TOKENS, model.chain.task.window_length)
    plain = evaluation_windows(text, tokenizer, length, limit=_WINDOWS).ids
    begun = plain.clone()
    begun[:, 0] = tokenizer.bos_token_id
    chain = model.chain
    ids = torch.cat([plain, begun]).to(chain.device)
    losses = []
    for row, tokens in zip(chain.final_states(ids), ids, strict=True):
        logits = chain.logits(row[1:-1]).float()
        losses.append(functional.cross_entropy(logits, tokens[2:]).item())
    before, after = torch.tensor(losses).reshape(2, -1).mean(1).tolist()
    return math.exp(min(before, 700.0)), math.exp(min(after, 700.0))
