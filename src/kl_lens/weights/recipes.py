"""A recipe says how a component is stored: the format (grid) and the method that quantizes.

It has one short spelling everywhere: `int4-g64` (rounded to nearest), `int4-g64+gptq`, `q4_k+imatrix`. Statistics are
not part of it: a run has one set, and the weight store binds recipes to its digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kl_lens.base.errors import FormatError
from kl_lens.weights import formats
from kl_lens.weights.formats import Format, fitting_format, get_format
from kl_lens.weights.quantizers import TUNED, Quantizer, get_quantizer, known_quantizers

NEAREST = "rtn"


class Recipe(str):
    """Format and method, as a string in canonical spelling. Only outside text has to be parsed."""

    __slots__ = ()

    def __new__(cls, format_name: str, method: str = NEAREST) -> Recipe:
        return super().__new__(
            cls, format_name if method == NEAREST else f"{format_name}+{method}"
        )

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """Parses `FORMAT` or `FORMAT+METHOD`; the error for an unknown name lists the known ones."""
        if isinstance(text, Recipe):
            return text
        name, plus, method = text.strip().partition("+")
        if plus and not method:
            raise FormatError(f"recipe {text!r} names no method after the +")
        fmt = get_format(name)
        quantizer = get_quantizer(method or NEAREST)
        if reason := quantizer.suits(fmt):
            raise FormatError(f"recipe {text!r}: {reason}")
        return cls(fmt.name, method.lower() or NEAREST)

    @property
    def grid(self) -> Format:
        return get_format(self.partition("+")[0])

    @property
    def method(self) -> str:
        return self.partition("+")[2] or NEAREST

    @property
    def is_tuned(self) -> bool:
        return self.quantizer.name == TUNED

    @property
    def quantizer(self) -> Quantizer:
        return get_quantizer(self.method)


FP16 = Recipe(formats.FP16)


def parsed(assignment: Mapping[str, str]) -> dict[str, Recipe]:
    """Parses an assignment component → text."""
    return {component: Recipe.parse(text) for component, text in assignment.items()}


def preferred(format_name: str, methods: Sequence[str]) -> Recipe:
    """A format with the first of these methods that is known and suits it."""
    fmt = get_format(format_name)
    fitting = (
        m
        for m in methods
        if m in known_quantizers() and get_quantizer(m).suits(fmt) is None
    )
    return Recipe(fmt.name, next(fitting, NEAREST))


def fitting_recipe(wanted: Recipe, shape: Sequence[int]) -> tuple[Recipe, str | None]:
    """The recipe for a weight of this shape, and why it differs from the wanted one (or None).

    A substitute format keeps the method if that suits it; tuned weights have none.
    """
    fmt, reason = fitting_format(wanted.grid, shape)
    if reason is None:
        return wanted, None
    keeps = wanted.quantizer.suits(fmt) is None and not wanted.is_tuned
    method = wanted.method if keeps else NEAREST
    return Recipe(fmt.name, method), reason
