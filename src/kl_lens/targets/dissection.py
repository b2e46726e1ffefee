"""A file taken apart: its tensors as numbers, how each follows from a parameter of the original, and its settings."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kl_lens.base.errors import TargetError, one_line
from kl_lens.base.files import RECORD_FILE
from kl_lens.targets.exporting import (
    CONFIG_FILE,
    GENERATION_FILE,
    read_artifact,
    require_exported,
)
from kl_lens.targets.session import Session, SessionSettings
from kl_lens.targets.tokenizer import (
    TOKENIZER_FILE,
    read_json,
    special_texts,
    template_of,
    varied_strings,
)
from kl_lens.weights.formats import Format, get_format, known_formats

if TYPE_CHECKING:
    from kl_lens.model import LoadedModel

Values = Callable[[Tensor], Tensor]

# What a disagreement is about. A vocabulary turns text into other ids.
METADATA = "metadata"
TOKENIZER = "tokenizer"
VOCABULARY = "vocabulary"
_CHAT = "the chat template"
_LARGEST_TRANSFORMED = 1 << 20  # values; norms and decays are small
# (f(0), f(1)) of what a file stores instead of a parameter → its inverse: as it is, 1 + x, exp(x), −exp(x).
_INVERSES: dict[tuple[float, float], Values] = {
    (0.0, 1.0): lambda y: y,
    (1.0, 2.0): lambda y: y - 1,
    (1.0, 2.718): torch.log,
    (-1.0, -2.718): lambda y: torch.log(-y),
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    type: str  # as the runtime calls it: Q4_K, i4
    shape: tuple[int, ...]  # rows first
    bytes: int
    read: Callable[[], Tensor]  # its values in float32
    format: str = ""  # our name of that type, if we have it
    grid: Format | None = None  # where we have none

    @property
    def rounded(self) -> Values | None:
        """Rounds any values to nearest in that type; None: not known."""
        return rounding(self.grid or self.format)


@dataclass(frozen=True)
class Part:
    """What the original wants in the file: one tensor, made from one parameter."""

    name: str
    tensor: StoredTensor | None  # None: the file lacks it
    parameter: str | None  # None: several, or none
    arrange: Values = lambda value: value
    factors: float | Tensor = 1.0
    # What the file should hold, where that is not made from one parameter.
    constant: Tensor | None = None

    def expected(self, parameter: Tensor) -> Tensor:
        """The parameter as the file should hold it, before rounding."""
        return self.arrange(parameter.float() * self.factors).contiguous()

    def written(self, values: Tensor, into: Tensor) -> Tensor | None:
        """The parameter with the file's values in place of its own; None if the way back is not known.

        The way back is found by sending zeros, ones and positions through `arrange`.
        """
        shape = into.shape
        zero, unit = (
            round(float(self.arrange(torch.full(shape, end)).flatten()[0]), 3)
            for end in (0.0, 1.0)
        )
        if (inverse := _INVERSES.get((zero, unit))) is None:
            return None
        count = into.numel()
        if (zero, unit) == (0.0, 1.0):
            positions = self.arrange(torch.arange(count).reshape(shape))
        else:  # of a vector or a small matrix; in steps below one, so that exp stays finite
            steps = (torch.arange(count, dtype=torch.float64) + 0.5) / count
            steps = inverse(self.arrange(steps.float().reshape(shape)).double())
            positions = (steps * count - 0.5).round()
        index = positions.flatten().long()
        if values.numel() != index.numel():
            return None
        factors = torch.as_tensor(self.factors, dtype=torch.float32)
        whole = into.float().flatten().clone()
        factors = factors.broadcast_to(shape).flatten()
        whole[index] = inverse(values.flatten()) / factors[index]
        return whole.reshape(shape)


@dataclass(frozen=True)
class Disagreement:
    """A setting of the file that is not the original's."""

    name: str
    words: str
    advice: str = ""
    # None: if the runtime computes something else, or text becomes other ids.
    matters: bool | None = True
    about: str = METADATA


def setting(
    name: str, actual: Any, expected: Any, advice: str = "", **more: Any
) -> Disagreement:
    """A key with another value; None: it is not there."""
    words = f"{name} is {_shown(actual)} in the file, {_shown(expected)} in the original"
    return Disagreement(name, words, advice, **more)


class Dissection(ABC):
    """One file, ready for an autopsy."""

    path: Path
    files: tuple[Path, ...]  # that the runtime loads
    tensors: tuple[StoredTensor, ...]
    # It is run with the settings that `Target.activations` describes.
    usual_settings: bool = True

    @abstractmethod
    def parts(self, model: LoadedModel) -> list[Part]:
        """What the original wants in the file. UnsupportedError: the family's names are not known."""

    @abstractmethod
    def settings(self, model: LoadedModel) -> list[Disagreement]:
        """Settings that are not those of config.json."""

    @abstractmethod
    def open(self, settings: SessionSettings) -> Session:
        """Opens it in its runtime, after a try in a separate process. UnsupportedError: KL Lens cannot run it."""

    # A folder has its tokenizer's own files beside the weights.

    def tokenizer(self, model: LoadedModel) -> Iterator[Disagreement]:
        """What of its tokenizer and chat template is not the original's, without running it."""
        if (self.folder / TOKENIZER_FILE).is_file() and model.tokenizer is not None:
            remedy = "copy the original's tokenizer files"
            texts = Texts.of(self.folder)
            yield from other_texts(texts, Texts.of(model.folder), lambda *_: remedy)

    def strings(self, tokenizer: Any) -> list[str]:
        """Texts that its tokenizer must turn into the original's ids."""
        return varied_strings(300, special=sorted(map(str, tokenizer.get_added_vocab())))

    @property
    def folder(self) -> Path:
        return self.files[0].parent

    def changed(self) -> str:
        """That it is no longer what KL Lens exported, by the record beside it; empty if it is, or has no record."""
        if (self.folder / RECORD_FILE).is_file():
            try:
                if self.files[0].name in (artifact := read_artifact(self.folder)).files:
                    require_exported(self.folder, artifact)
            except TargetError as error:
                return str(error)
        return ""


class FolderDissection(Dissection):
    """A folder of safetensors with a config.json."""

    # Settings of training and of files, which nothing is computed with.
    without_effect: ClassVar[re.Pattern[str]] = re.compile(
        r"^_|dtype|version|use_cache|initializer|_token_id|dropout|architectures|quantiz"
    )

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config = read_json(folder / CONFIG_FILE)
        self.files = tuple(sorted(folder.glob("model*.safetensors")))
        tensors: dict[str, Tensor] = {}
        for file in self.files:
            try:
                tensors |= load_file(file)
            except (OSError, SafetensorError) as error:
                raise TargetError(
                    f"{file} is damaged: {one_line(error)}; export or download it again"
                ) from error
        self.tensors = tuple(self.stored(tensors))

    @abstractmethod
    def stored(self, tensors: dict[str, Tensor]) -> Iterator[StoredTensor]:
        """The tensors of all files, those of a packed matrix as one."""

    @abstractmethod
    def configuration(self, model: LoadedModel) -> dict[str, Any]:
        """config.json as it should be."""

    def settings(self, model: LoadedModel) -> list[Disagreement]:
        advice = "take it from the original's config.json"
        return [
            setting(f"config.json: {key}", self.config[key], value, advice)
            for key, value in self.configuration(model).items()
            if key in self.config and isinstance(value, int | float | str | list)
            if not self.without_effect.search(key) and not same(self.config[key], value)
        ]


def unpacked(name: str, tensor: Tensor) -> StoredTensor:
    """A tensor that is not quantized."""
    names = (name for name, dtype in DTYPES.items() if dtype == tensor.dtype)
    format_name = next(names, "")
    spelled = format_name or str(tensor.dtype)
    shape = tuple(tensor.shape)
    return StoredTensor(name, spelled, shape, tensor.nbytes, tensor.float, format_name)


@dataclass(frozen=True)
class Texts:
    """What a tokenizer's files say."""

    # Of tokens, merges, token types.
    lists: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    # Wrong only if text becomes other ids.
    splitting: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)  # special tokens and switches
    template: str | None = None

    @classmethod
    def of(cls, folder: Path) -> Texts:
        content = read_json(folder / TOKENIZER_FILE)
        generation = read_json(folder / GENERATION_FILE)
        model = content.get("model", {})
        pairs = model["vocab"].items() if isinstance(model.get("vocab"), dict) else ()
        added = {
            token["id"]: token["content"] for token in content.get("added_tokens", ())
        }
        merges = (
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in model.get("merges", ())
        )
        lists = {
            "token": {i: text for text, i in pairs} | added,
            "merge": dict(enumerate(merges)),
        }
        splitting = {
            key: content.get(key)
            for key in ("normalizer", "pre_tokenizer", "post_processor")
        }
        keys = special_texts(folder) | {
            k: generation.get(k) for k in ("eos_token_id", "bos_token_id")
        }
        return cls(lists, splitting, keys, (template_of(folder) or (None, None))[1])


def other_texts(
    texts: Texts, expected: Texts, advice: Callable[[str, Any], str]
) -> Iterator[Disagreement]:
    """Compares what two tokenizers say. Lists and keys that one of them lacks say nothing."""
    for name in [name for name in expected.lists if name in texts.lists]:
        actual = texts.lists[name]
        wanted = expected.lists[name]
        # A file may name rows of the embedding that have no token.
        numbers = {**wanted, **actual} if name == "merge" else wanted
        if differing := [i for i in numbers if actual.get(i) != wanted.get(i)]:
            first = differing[0]
            example = setting(f"{name} {first}", actual.get(first), wanted.get(first))
            yield Disagreement(
                f"{name}s",
                f"{len(differing):,} of {len(wanted):,} {name}s are not the original's: {example.words}",
                advice(f"{name}s", None),
                None if name == "token type" else True,
                VOCABULARY,
            )
    yield from _other_values(texts.splitting, expected.splitting, VOCABULARY, advice)
    yield from _other_values(texts.keys, expected.keys, TOKENIZER, advice)
    if words := _other_template(texts.template, expected.template):
        yield Disagreement(
            _CHAT, words, advice(_CHAT, None), expected.template is not None, TOKENIZER
        )


def _other_values(
    actual: Mapping[str, Any],
    expected: Mapping[str, Any],
    about: str,
    advice: Callable[[str, Any], str],
) -> Iterator[Disagreement]:
    matters = None if about == VOCABULARY else True
    for key, wanted in expected.items():
        value = actual.get(key)
        comparable = value is not None and wanted is not None
        if comparable and value not in (wanted, [wanted]) and wanted != [value]:
            hint = advice(key, wanted)
            yield setting(key, value, wanted, hint, matters=matters, about=about)


def _other_template(actual: str | None, expected: str | None) -> str:
    text, original = (" ".join((text or "").split()) for text in (actual, expected))
    if text == original:
        return ""
    if not text or not original:
        return f"{_CHAT} was {'removed' if original else 'added: the original has none'}"
    pairs = enumerate(zip(text, original, strict=False))
    shorter = min(len(text), len(original))
    start = next((i for i, (a, b) in pairs if a != b), shorter)
    text, original = (words[start : start + 40] for words in (text, original))
    return f"{_CHAT} was changed: it has {text!r} where the original's has {original!r}"


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def known_name(name: str) -> str:
    """A format's name if we have it; else empty."""
    return name if name in (*known_formats(), *DTYPES) else ""


def rounding(fmt: Format | str) -> Values | None:
    """Rounds any values to nearest in a format; None for one that needs more than the values."""
    if isinstance(fmt, str) and fmt in DTYPES:
        dtype = DTYPES[fmt]
        return lambda value: value.to(dtype).float()
    grid = get_format(fmt) if fmt and isinstance(fmt, str) else fmt
    if not isinstance(grid, Format) or grid.needs_importance:
        return None

    def rounded(value: Tensor) -> Tensor:
        # Blocks that are longer than a row belong to what should not have been quantized.
        for rows in (value, value.reshape(1, -1)):
            if grid.fits(rows.shape) is None:
                return grid.roundtrip(rows).reshape(value.shape)
        return value

    return rounded


def arrangements(
    kind: Sequence[tuple[Tensor, tuple[int, ...], Callable[[], Tensor], bool]],
) -> list[Values]:
    """How tensors of one kind follow from their parameters: as x, 1 + x, exp(x) or −exp(x), whichever fits most of
    them, so that a damaged one is not taken for another kind.

    `kind`: the parameter, the shape that is stored, its values, and whether they are transposed.
    """
    maps: list[Values] = [
        lambda v: v,
        lambda v: v + 1,
        torch.exp,
        lambda v: -torch.exp(v),
    ]

    def error(change: Values) -> float:
        errors = []
        for parameter, shape, read, turned in kind:
            wanted = read()
            difference = _arranged(change, turned, shape, parameter.float()) - wanted
            errors.append(float(difference.norm()) / max(float(wanted.norm()), 1e-9))
        return sorted(errors)[(len(errors) - 1) // 2]

    small = all(parameter.numel() <= _LARGEST_TRANSFORMED for parameter, *_ in kind)
    best = min(maps, key=error) if small and kind else maps[0]
    return [partial(_arranged, best, turned, shape) for _, shape, _, turned in kind]


def _arranged(
    change: Values, turned: bool, shape: tuple[int, ...], value: Tensor
) -> Tensor:
    return change(value.T if turned else value).reshape(shape)


def same(actual: Any, expected: Any) -> bool:
    """Whether two settings mean the same; a list of one number for all layers is that number."""
    if isinstance(expected, list) and not isinstance(actual, list):
        return same(expected, actual)
    if isinstance(actual, list) and not isinstance(expected, list):
        return set(actual) - {0} <= {expected}
    if isinstance(expected, float) and isinstance(actual, int | float):
        return math.isclose(actual, expected, rel_tol=1e-5)
    return bool(actual == expected)


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
