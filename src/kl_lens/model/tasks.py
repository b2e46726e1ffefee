"""The task of a model: the only place that distinguishes language models from image classifiers.

All other code sees batches of ids, (windows, rows), and logits, (windows, rows, classes). A row is a token and its
class the next token, or an image and its class what it shows. KL compares the rows' distributions; damage is the loss
of likelihood of the true class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from kl_lens.base.errors import CheckpointError, TextError
from kl_lens.text.images import (
    DIGITS,
    ImageSource,
    Picture,
    Preparation,
    add_picture,
    image_windows,
    labels_of,
    open_images,
    pixels_of,
)
from kl_lens.text.sources import WIKITEXT, TextSource
from kl_lens.text.windows import (
    Windows,
    beginning_of,
    draw_windows,
    evaluation_windows,
)

TEXT = "text"
IMAGE = "image"
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

    def sample(self, model: nn.Module, windows: int, rows: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(
            0, vocabulary_size(model), (windows, rows), generator=generator
        )

    def blank(self, windows: int, rows: int) -> torch.Tensor:
        return torch.zeros(windows, rows, dtype=torch.long)

    def head(self, model: nn.Module) -> nn.Module:
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        if head is None:
            head = _last_linear(model, vocabulary_size(model))
        if head is None:
            raise CheckpointError(
                f"{type(model).__name__} has no linear layer to the vocabulary; {MEASURED}"
            )
        return head

    def forward(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=ids, use_cache=False)
        return output.logits if hasattr(output, "logits") else output[0]

    def targets(self, ids: torch.Tensor) -> torch.Tensor:
        """The next tokens; -1 behind the last, UNCOUNTED behind BOS."""
        targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1)
        bos = None if self.tokenizer is None else beginning_of(self.tokenizer)
        if bos is not None:
            targets[:, 0][ids[:, 0] == bos] = UNCOUNTED
        return targets


@dataclass(frozen=True, eq=False)
class ImageTask:
    """Images in, a distribution over classes out."""

    preparation: Preparation
    classes: int
    label_names: Mapping[str, int] = field(default_factory=dict)
    images: str | None = None  # default source of images

    name: ClassVar = IMAGE
    unit: ClassVar = "images"
    head_kind: ClassVar = "head"
    window_length: ClassVar = 16
    judged_length: ClassVar = 16
    lists: ClassVar[tuple[type[nn.Module], ...]] = (nn.ModuleList, nn.Sequential)
    generates: ClassVar = False

    @classmethod
    def of(
        cls, folder: Path, config: Mapping[str, Any], images: str | None = None
    ) -> ImageTask:
        """From the files next to the weights, of a checkpoint or of an exported model."""
        labels = config.get("id2label") or {}
        names = {str(label): int(number) for number, label in labels.items()}
        classes = len(names) or int(
            config.get("num_classes") or config.get("num_labels") or 1000
        )
        # transformers' placeholders.
        if names == {f"LABEL_{number}": number for number in range(classes)}:
            names = {}
        return cls(Preparation.of(folder, config), classes, names, images)

    @property
    def key(self) -> Hashable:
        labels = tuple(self.label_names.items())
        return self.preparation, self.classes, labels, self.images

    @property
    def identity(self) -> dict[str, Any]:
        return {"task": self.name, "images": self.images}

    def _opened(self, source: Source, *, for_evaluation: bool) -> ImageSource:
        if isinstance(source, TextSource):
            raise TextError(f"{source.label} is text, and this model classifies images")
        base, _, split = source.partition(":")
        if base != WIKITEXT:
            return open_images(source, for_evaluation=for_evaluation)
        if self.images is None:
            raise TextError(
                "this model classifies images: give some with --images FOLDER"
            )
        # A command's default text: that split of the run's images.
        return open_images(self.images, split or None, for_evaluation=for_evaluation)

    def drawn(
        self, source: Source, *, windows: int, length: int, seed: int = 42
    ) -> Windows:
        opened = self._opened(source, for_evaluation=False)
        return self._windows(opened, windows=windows, length=length, seed=seed)

    def _windows(self, opened: ImageSource, **options: Any) -> Windows:
        return image_windows(
            opened, self.preparation, self.label_names, self.classes, **options
        )

    def from_start(
        self,
        source: Source,
        *,
        length: int,
        stride: int | None = None,
        limit: int | None = None,
    ) -> Windows:
        opened = self._opened(source, for_evaluation=True)
        if any(entry.label is None for entry in opened.entries):
            raise TextError(
                f"{opened.label}: evaluation needs labels: folders by class, or labels.csv"
            )
        if stride not in (None, length):
            raise TextError(
                f"{opened.label}: windows of images do not overlap; --stride works only for text"
            )
        return self._windows(opened, windows=limit, length=length)

    def lost(self, windows: Windows, perplexity: float) -> str | None:
        return None

    def sample(self, model: nn.Module, windows: int, rows: int) -> torch.Tensor:
        generator = np.random.default_rng(0)
        shape = (windows * rows, *self.preparation.shape)
        noise = generator.integers(0, 256, shape, dtype=np.uint8)
        ids = [add_picture(Picture("noise", pixels, 0)) for pixels in noise]
        return torch.tensor(ids).reshape(windows, rows)

    def blank(self, windows: int, rows: int) -> torch.Tensor:
        pixels = np.zeros(self.preparation.shape, np.uint8)
        return torch.full((windows, rows), add_picture(Picture("black", pixels, 0)))

    @property
    def rows_at_once(self) -> int:
        pixels = self.preparation.height * self.preparation.width
        return max(1, min(LanguageTask.rows_at_once, 2**20 // pixels))

    def head(self, model: nn.Module) -> nn.Module:
        head = _last_linear(model, self.classes)
        if head is None:
            raise CheckpointError(
                f"{type(model).__name__} has no linear layer to {self.classes} classes"
            )
        return head

    def forward(self, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        parameter = next(model.parameters())
        pixels = torch.from_numpy(
            self.preparation.normalised(pixels_of(ids.flatten().tolist()))
        )
        output = model(pixels.to(parameter.device, parameter.dtype))
        logits = output if isinstance(output, torch.Tensor) else output["logits"]
        return logits.reshape(*ids.shape, -1)

    def targets(self, ids: torch.Tensor) -> torch.Tensor:
        labels = labels_of(ids.flatten().tolist())
        return torch.tensor(labels, device=ids.device).reshape(ids.shape)


def vocabulary_size(model: nn.Module) -> int:
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])


def _last_linear(model: nn.Module, width: int) -> nn.Module | None:
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return next((m for m in reversed(linears) if m.out_features == width), None)


Task = LanguageTask | ImageTask


def model_type(config: Mapping[str, Any]) -> Any:
    """transformers' name of the family. A folder saved by timm has none; transformers opens it if timm is installed."""
    is_timm = "pretrained_cfg" in config and "architecture" in config
    return config.get("model_type", "timm_wrapper" if is_timm else None)


def task_of(config: Mapping[str, Any]) -> str:
    """`text` or `image`, from config.json."""
    named = "ForImageClassification" in str(config.get("architectures"))
    is_classifier = named or model_type(config) in ("timm_wrapper", "mambavision")
    return IMAGE if is_classifier else TEXT


def own_images(source: str | Path) -> str | None:
    """The images that ship with a model."""
    return DIGITS if str(source) == "reference:vision" else None
