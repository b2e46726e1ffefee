"""A recipe says how a component is stored: on which grid, put there how, learnt from what.

Its spelling is short and the same everywhere: `int4-g64` (rounded to nearest), `int4-g64+gptq`, `q4_k+imatrix`. What a
method learnt from is part of the recipe but not of that spelling: a run has one set of statistics, and `key` adds its
digest where two runs, or two states of one, must not be mixed up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kl_lens.errors import FormatError
from kl_lens.formats import Format, fitting_format, get_format
from kl_lens.quantizers import Quantizer, get_quantizer, known_quantizers

NEAREST = "rtn"


@dataclass(frozen=True)
class Recipe:
    """Format, method, and the digest of what the method learnt from (None: nothing, or not yet bound)."""

    format: str
    method: str = NEAREST
    learnt: str | None = None

    @classmethod
    def parse(cls, text: str | Recipe) -> Recipe:
        """`FORMAT`, `FORMAT+METHOD` or `FORMAT+METHOD@DIGEST`; unknown names are an error that lists the known ones."""
        if isinstance(text, Recipe):
            return text
        spelling, _, learnt = text.strip().partition("@")
        name, plus, method = spelling.partition("+")
        if plus and not method:
            raise FormatError(f"recipe {text!r} names no method behind the +")
        fmt, quantizer = get_format(name), get_quantizer(method or NEAREST)
        if reason := quantizer.suits(fmt):
            raise FormatError(f"recipe {text!r}: {reason}")
        return cls(fmt.name, quantizer.name, learnt or None)

    @property
    def grid(self) -> Format:
        return get_format(self.format)

    @property
    def quantizer(self) -> Quantizer:
        return get_quantizer(self.method)

    @property
    def key(self) -> str:
        """The spelling with the digest of what was learnt from."""
        return f"{self}@{self.learnt}" if self.learnt else str(self)

    def bound(self, learnt: str | None) -> Recipe:
        """The recipe as learnt from the statistics with this digest; one that learns nothing stays as it is."""
        return replace(self, learnt=learnt if self.quantizer.learns else None)

    def __str__(self) -> str:
        return self.format if self.method == NEAREST else f"{self.format}+{self.method}"


def spelled(text: str) -> str:
    """The canonical spelling of a recipe."""
    return str(Recipe.parse(text))


def preferred(format_name: str, methods: Sequence[str]) -> str:
    """The spelling of a format with the first of these methods that is known and has a meaning for it."""
    fmt = get_format(format_name)
    fitting = (m for m in methods if m in known_quantizers() and get_quantizer(m).suits(fmt) is None)
    return str(Recipe(fmt.name, next(fitting, NEAREST)))


def fitting_recipe(recipe: Recipe | str, shape: Sequence[int]) -> tuple[Recipe, str | None]:
    """What a weight of this shape really gets, and why it is not what was asked for (or None).

    A format that stands in keeps the method where that has a meaning for it.
    """
    wanted = Recipe.parse(recipe)
    fmt, reason = fitting_format(wanted.grid, shape)
    if reason is None:
        return wanted, None
    if wanted.quantizer.suits(fmt) is None:
        return replace(wanted, format=fmt.name), reason
    return Recipe(fmt.name), reason
