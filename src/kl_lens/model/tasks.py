"""The task of a language model; `images.py` has that of an image classifier.

All other code sees batches of ids, (windows, rows), and logits, (windows, rows, classes). A row is a token and its
class the next token, or an image and its class what it shows. KL compares the rows' distributions; damage is the loss
of likelihood of the true class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kl_lens.base.errors import CheckpointError, TextError
from kl_lens.model.images import ImageTask, last_linear
from kl_lens.text.sources import TextSource
from kl_lens.text.windows import (
    Windows,
    beginning_of,
    draw_windows,
    evaluation_windows,
)

TEXT = "text"
MEASURED = (
    "KL Lens measures causal language models, and image classifiers with --images FOLDER"
)
Source = TextSource | str
WINDOW = 512  # tokens, where the model reads so many
JUDGED = 2048  # the same for evaluation
UNCOUNTED = -2  # in `targets`: a row that no mean counts


@dataclass(frozen=True)
class LanguageTask:
    """Token ids in, the next token's distribution out."""

    tokenizer: Any = None
    model_name: str = "the model"
    rows: int | None = None  # of the embedding; None: not known
    context: int | None = None  # most tokens of a window; None: no limit
    settle: Callable[[Source], object] = lambda source: None  # see `Beginning`
    bos: str | None = None  # yes or no, once it is settled

    name: ClassVar = TEXT
    unit: ClassVar = "tokens"  # a window's rows
    head_kind: ClassVar = "lm_head"
    lists: ClassVar[tuple[type[nn.Module], ...]] = (nn.ModuleList,)  # of blocks
    generates: ClassVar = True
    # Per forward: enough for fast products, few enough for the caches.
    rows_at_once: ClassVar = 4096

    @property
    def identity(self) -> dict[str, Any]:
        """What a run stores about it, besides the model."""
        return {} if self.bos is None else {"bos": self.bos}

    @property
    def window_length(self) -> int:
        """Usual rows of a window."""
        return min(WINDOW, self.context or WINDOW)

    @property
    def judged_length(self) -> int:
        """Usual for evaluation."""
        return min(JUDGED, self.context or JUDGED)

    @property
    def key(self) -> Hashable:
        return id(self.require_tokenizer())

    def require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.model_name} has no tokenizer of its own; pass one with --tokenizer: a folder, a hub id (the "
                "state-spaces/* originals use EleutherAI/gpt-neox-20b), or a .txt file with one token per line"
            )
        return self.tokenizer

    def drawn(
        self, source: Source, *, windows: int, length: int, seed: int = 42
    ) -> Windows:
        tokenizer = self._ready(source, length)
        return self._fitting(draw_windows(source, tokenizer, windows, length, seed))

    def from_start(
        self,
        source: Source,
        *,
        length: int,
        stride: int | None = None,
        limit: int | None = None,
    ) -> Windows:
        tokenizer = self._ready(source, length)
        return self._fitting(evaluation_windows(source, tokenizer, length, stride, limit))

    def _ready(self, source: Source, length: int) -> Any:
        """The tokenizer, which from here on begins texts as the model expects."""
        if self.context is not None and length > self.context:
            raise TextError(
                f"windows of {length} tokens: {self.model_name} reads at most {self.context} "
                f"(max_position_embeddings): ask for at most {self.context}"
            )
        tokenizer = self.require_tokenizer()
        self.settle(source)
        return tokenizer

    def lost(self, windows: Windows, perplexity: float) -> str | None:
        """A sentence where the original itself can do nothing with a text."""
        if perplexity <= max(windows.guessing, math.sqrt(self.rows or 0)):
            return None
        return (
            f"{self.model_name} itself is lost on {windows.label}: its perplexity of {perplexity:,.0f} is worse than "
            "guessing by how often each token occurs, so what is measured there says little; use text the model was "
            "trained on: --text FILE"
        )

    def _fitting(self, windows: Windows) -> Windows:
        """Raises for a token that the embedding has no row for."""
        if self.rows is None:
            return windows
        beyond = windows.ids[windows.ids >= self.rows]
        if beyond.numel():
            token = int(beyond[0])
            raise TextError(
                f"{windows.label}: {self.require_tokenizer().decode([token])!r} is token {token}, but the embedding of "
                f"{self.model_name} has only {self.rows} rows; give the model's own tokenizer with --tokenizer"
            )
        return windows

    def sample(self, model: nn.Module, windows: int, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(
            0, vocabulary_size(model), (windows, rows), generator=generator
        )

    def blank(self, windows: int, rows: int) -> Tensor:
        return torch.zeros(windows, rows, dtype=torch.long)

    def head(self, model: nn.Module) -> nn.Module:
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        if head is None:
            head = last_linear(model, vocabulary_size(model))
        if head is None:
            raise CheckpointError(
                f"{type(model).__name__} has no linear layer to the vocabulary; {MEASURED}"
            )
        return head

    def forward(self, model: nn.Module, ids: Tensor) -> Tensor:
        output = model(input_ids=ids, use_cache=False)
        return output.logits if hasattr(output, "logits") else output[0]

    def targets(self, ids: Tensor) -> Tensor:
        """The next tokens; -1 behind the last, UNCOUNTED behind BOS."""
        targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1)
        bos = None if self.tokenizer is None else beginning_of(self.tokenizer)
        if bos is not None:
            targets[:, 0][ids[:, 0] == bos] = UNCOUNTED
        return targets


def vocabulary_size(model: nn.Module) -> int:
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])


Task = LanguageTask | ImageTask
