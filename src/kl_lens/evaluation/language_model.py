"""A session as a model for lm-eval, the same for every runtime."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from kl_lens.base.errors import KLLensError
from kl_lens.evaluation.continuations import likeliest
from kl_lens.evaluation.texts import decode
from kl_lens.targets.session import Logits, Session

# Answers stored together: what a kill can lose.
ANSWERS_TOGETHER = 32
LONGEST_GENERATION = 256

TokenRequest = tuple[Any, list[int], list[int]]  # (text or None, context, continuation)
Answer = tuple[float, bool]


class SessionLM(TemplateLM):  # type: ignore[misc]
    """A session as a model for lm-eval.

    Each request is one call of `session.logits` on context and continuation, because a recurrent runtime cannot return
    to the state after a shared context. Requests with the same input share one call: those with one-token continuations
    (A, B, C, D) all read the same row.

    Args:
        max_length: longer inputs lose their beginning, as in lm-eval's own classes.
        kept: given a key and a function, returns stored answers, or stores what the function returns.
        begun: called with the number of requests.
        advanced: called with the number of answered requests.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Any,
        *,
        max_length: int = 2048,
        kept: Callable[[str, Callable[[], list[Any]]], list[Any]] = lambda key, answer: answer(),
        begun: Callable[[int], None] = lambda count: None,
        advanced: Callable[[int], None] = lambda count: None,
    ) -> None:
        super().__init__()
        self.session, self.tokenizer, self.max_length = session, tokenizer, max_length
        self._stored, self._begun, self._advanced = kept, begun, advanced
        self._last: tuple[list[int], Logits] | None = None

    def _special(self, *names: str) -> int:
        for name in names:
            if getattr(self.tokenizer, name, None) is not None:
                return int(getattr(self.tokenizer, name))
        raise KLLensError("this task needs a start token, and the tokenizer has no beginning or end token")

    @property
    def eot_token_id(self) -> int:
        return self._special("eos_token_id", "bos_token_id")

    @property
    def prefix_token_id(self) -> int:
        return self._special("bos_token_id", "eos_token_id")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Adds the tokenizer's special tokens by default, as lm-eval's own class for transformers does."""
        beginning = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None and beginning and string.startswith(beginning):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return [int(token) for token in self.tokenizer.encode(string, **options)]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Answer]:
        self._begun(len(requests))
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        raise KLLensError("tasks that score whole texts have no examples to pair; use --perplexity TEXT")

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        self._begun(len(requests))
        return [self._kept([list(request.args)], self._generate)[0] for request in requests]

    def _loglikelihood_tokens(self, requests: Sequence[TokenRequest], **_: Any) -> list[Answer]:
        answers: list[Answer] = []
        for first in range(0, len(requests), ANSWERS_TOGETHER):
            pairs = [[context, rest] for _, context, rest in requests[first : first + ANSWERS_TOGETHER]]
            answers += [(float(total), bool(greedy)) for total, greedy in self._kept(pairs, self._likelihood)]
        return answers

    def _kept(self, requests: list[list[Any]], answer: Callable[..., Any]) -> list[Any]:
        """Stored or new answers to these requests."""
        key = hashlib.blake2b(json.dumps([self.max_length, requests]).encode(), digest_size=12).hexdigest()
        answers = self._stored(key, lambda: [answer(*request) for request in requests])
        self._advanced(len(requests))
        return answers

    def _likelihood(self, context: list[int], continuation: list[int]) -> Answer:
        """ln p(continuation | context), and whether each token was the most likely one."""
        fed = [*context, *continuation][-(self.max_length + 1) :][:-1]
        if self._last is None or self._last[0] != fed:
            self._last = (fed, self.session.logits(fed))
        rows = self._last[1][-len(continuation) :].astype(np.float64)
        scored = np.asarray(continuation[-len(rows) :])
        largest = rows.max(-1)
        normaliser = largest + np.log(np.exp(rows - largest[:, None]).sum(-1))
        chosen = rows[np.arange(len(rows)), scored]
        return float((chosen - normaliser).sum()), bool((rows.argmax(-1) == scored).all())

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample") or float(settings.get("temperature") or 0) > 0:
            raise KLLensError("only greedy generation is supported; this task asks for sampling")
        stops = settings.get("until") or []
        stops = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
        most = int(settings.get("max_gen_toks") or LONGEST_GENERATION)
        ids = self.tok_encode(context)[-max(1, self.max_length - most) :]
        new: list[int] = []
        text = ""
        for token in likeliest(self.session, ids, getattr(self.tokenizer, "eos_token_id", None), most):
            new.append(token)
            text = decode(self.tokenizer, new)
            if any(stop in text for stop in stops):
                break
        for stop in stops:
            text = text.split(stop)[0]
        return text
