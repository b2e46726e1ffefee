"""What defines an architecture: its metadata, and where each tensor of the file comes from.

A model is described by listing every tensor of the file, not by patterns. So anything left over on either side is an
error that names it, and nothing is silently dropped or matched twice.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from kl_lens.base.errors import TargetError, UnsupportedError
from kl_lens.model.files import and_more
from kl_lens.targets.gguf.header import TensorEntry

Transform = Callable[[torch.Tensor], torch.Tensor]
Factors = float | torch.Tensor  # one, or (rows, 1)
# Key without the architecture's prefix → int, float, bool, list of int, a kind of gguf's; a text names a setting.
Metadata = dict[str, Any]
Reasons = Iterable[str]
# Parameter name → shape, everything the checkpoint holds.
Shapes = Mapping[str, tuple[int, ...]]

# State-space models have no trained limit, but llama.cpp needs a number.
ENDLESS_CONTEXT = 2**20
# Tensors that llama.cpp's kernels read as F32, by their names in the file.
_FLOAT32 = re.compile(
    r"norm|conv1d|shortconv\.conv\.|\.bias$|ssm_[ad]$|gate_inp|attn_[kv]_b\.|^rope_f|^position"
)
# The first of each that a checkpoint has.
_EMBEDDINGS = ("model.embed_tokens", "model.embeddings", "backbone.embeddings")
# Of the last norm in transformers → in llama.cpp.
_LAST_NORMS = {
    "model.norm": "output_norm",
    "model.norm_f": "output_norm",
    "model.final_layernorm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "backbone.norm_f": "output_norm",
}
HEAD = "lm_head.weight"


def as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class TensorRule:
    """One tensor of the file: its name in llama.cpp, the parameter it is made from, and how.

    Transforms also run on tensors without data (device `meta`), to get shapes before anything is read, and on quantized
    rows. They may select, reorder and restack rows, but never look into a row, because formats have their blocks along
    it. Only `float32` tensors may be transposed. `factors` change values, and `columns` reorders runs of columns.
    """

    name: str
    # None: made from nothing (a bias that the checkpoint leaves out).
    parameter: str | None
    transform: Transform = as_is
    factors: Factors = 1.0  # for all rows or each, applied before rounding: multipliers that llama.cpp lacks
    constant: tuple[float, ...] = ()  # of tensors made from nothing
    copied: TensorEntry | None = None  # in another file, as it is
    # Rows of further parameters behind these in the same tensor, which then has this shape.
    further: tuple[TensorRule, ...] = ()
    shape: tuple[int, ...] = ()
    # (a, b): columns are a · b runs, which the file has in the order b, a. No block may be longer than a run.
    columns: tuple[int, int] = (1, 1)

    @property
    def float32(self) -> bool:
        return is_float32(self.name)

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the file has it: values, or the bytes of quantized rows."""
        rows = self.transform(tensor)
        if self.columns == (1, 1):
            return rows
        return rows.unflatten(-1, (*self.columns, -1)).transpose(-3, -2).flatten(-3)

    def stretch(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that formats must fit: with only the columns that stay together."""
        return (*shape[:-1], shape[-1] // math.prod(self.columns)) if shape else shape


Rules = list[TensorRule]


def is_float32(name: str) -> bool:
    """Whether llama.cpp's kernels read a tensor, by its name in the file, as F32."""
    return bool(_FLOAT32.search(name))


@dataclass(frozen=True)
class Module:
    """A module of the checkpoint (`model.layers.3.mixer`), and the block of the file with its tensors (`blk.3`)."""

    block: str
    name: str
    shapes: Shapes
    index: int = 0  # of its layer

    def inside(self, child: str) -> Module:
        return replace(self, name=f"{self.name}.{child}")

    def tensor(
        self, name: str, parameter: str, transform: Transform = as_is
    ) -> TensorRule:
        return TensorRule(f"{self.block}.{name}", f"{self.name}.{parameter}", transform)

    def weights(self, names: Mapping[str, str], transform: Transform = as_is) -> Rules:
        """`names`: of weights in llama.cpp → in transformers."""
        return [
            self.tensor(f"{name}.weight", f"{parameter}.weight", transform)
            for name, parameter in names.items()
        ]


@dataclass(frozen=True)
class Architecture:
    """How families of transformers become an architecture of llama.cpp."""

    # transformers' → llama.cpp's, or how it is found.
    names: Mapping[str, str | Callable[[Any], str]]
    settings: Callable[[Any], Metadata]
    layer: Callable[[Any, Module], Rules]
    # Reasons why this configuration is not supported.
    refusals: Callable[[Any], Reasons]
    # Known small differences.
    notes: Callable[[Any], Reasons] = lambda _: ()
    # Tensors of heads for further tokens, if llama.cpp has a place.
    further: Callable[[Any], Rules] = lambda _: []
    # Tensor without its block's number → the multiplier that transformers applies and llama.cpp does not.
    factors: Callable[[Any, Shapes], Mapping[str, Factors]] = lambda *_: {}
    last_norm: Transform = as_is

    def name(self, config: Any) -> str:
        name = self.names[config.model_type]
        return name if isinstance(name, str) else name(config)

    def metadata(self, config: Any) -> Metadata:
        return {
            key: _value(config, value) for key, value in self.settings(config).items()
        }

    def require(self, config: Any) -> None:
        for reason in self.refusals(config):
            raise UnsupportedError(
                f"this {config.model_type} model cannot be written as GGUF: {reason}"
            )

    def tensors(self, config: Any, shapes: Shapes) -> Rules:
        """Embedding, last norm, the head unless it is tied to the embedding, and all layers."""
        embedding = _first(_EMBEDDINGS, shapes)
        norm = _first(_LAST_NORMS, shapes)
        rules = [
            TensorRule("token_embd.weight", f"{embedding}.weight"),
            TensorRule(f"{_LAST_NORMS[norm]}.weight", f"{norm}.weight", self.last_norm),
        ]
        if HEAD in shapes:
            rules.append(TensorRule("output.weight", HEAD))
        layers = f"{embedding.partition('.')[0]}.layers"
        for index in range(config.num_hidden_layers):
            module = Module(f"blk.{index}", f"{layers}.{index}", shapes, index)
            rules += self.layer(config, module)
        factors = self.factors(config, shapes)
        return [
            replace(rule, factors=factors.get(re.sub(r"^blk\.\d+\.", "", rule.name), 1.0))
            for rule in rules
        ]


def _value(config: Any, value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return getattr(config, value) if isinstance(value, str) else value


def _first(names: Iterable[str], shapes: Shapes) -> str:
    """The first that the checkpoint has; where it has none, the first of all, for the error that names it."""
    candidates = list(names)
    return next(
        (name for name in candidates if f"{name}.weight" in shapes), candidates[0]
    )


def check_complete(rules: Sequence[TensorRule], shapes: Shapes) -> None:
    """Checks the name map: every parameter is used, every tensor has a source, and names are unique."""
    counts = Counter(rule.name for rule in rules)
    used = {rule.parameter for rule in rules if rule.parameter is not None}
    misfits = {
        "the checkpoint lacks": used - set(shapes),
        "no tensor of the file takes": set(shapes) - used,
        "two tensors are called": {name for name, count in counts.items() if count > 1},
    }
    problems = [
        f"{label}: {min(names)}{and_more([*names])}"
        for label, names in misfits.items()
        if names
    ]
    if problems:
        raise TargetError(
            f"weights and the GGUF name map do not fit: {'; '.join(problems)}"
        )
