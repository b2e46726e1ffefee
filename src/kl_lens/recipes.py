"""A recipe says how a component is stored: on which grid, and put there how.

Its spelling is short and the same everywhere: `int4-g64` (rounded to nearest), `int4-g64+gptq`, `q4_k+imatrix`. What a
method learnt from is not part of it: a run has one set of statistics, and the weight store binds recipes to its digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kl_lens import formats
from kl_lens.errors import FormatError
from kl_lens.formats import Format, fitting_format, get_format
from kl_lens.quantizers import Quantizer, get_quantizer, known_quantizers

NEAREST = "rtn"


class Recipe(str):
    """Format and method. It is its own canonical spelling: files and journals take it as the text they hold, and only
    text has to be turned into recipes (`parse`)."""

    __slots__ = ()

    def __new__(cls, format_name: str, method: str = NEAREST) -> Recipe:
        return super().__new__(cls, format_name if method == NEAREST else f"{format_name}+{method}")

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """`FORMAT` or `FORMAT+METHOD`; unknown names are an error that lists the known ones."""
        if isinstance(text, Recipe):
            return text
        name, plus, method = text.strip().partition("+")
        if plus and not method:
            raise FormatError(f"recipe {text!r} names no method behind the +")
        fmt, quantizer = get_format(name), get_quantizer(method or NEAREST)
        if reason := quantizer.suits(fmt):
            raise FormatError(f"recipe {text!r}: {reason}")
        return cls(fmt.name, quantizer.name)

    @property
    def grid(self) -> Format:
        return get_format(self.partition("+")[0])

    @property
    def method(self) -> str:
        return self.partition("+")[2] or NEAREST

    @property
    def quantizer(self) -> Quantizer:
        return get_quantizer(self.method)


FP16 = Recipe(formats.FP16)


def parsed(assignment: Mapping[str, str]) -> dict[str, Recipe]:
    """A plan as files hold it, component → text, as recipes."""
    return {component: Recipe.parse(text) for component, text in assignment.items()}


def preferred(format_name: str, methods: Sequence[str]) -> Recipe:
    """A format by the first of these methods that is known and has a meaning for it."""
    fmt = get_format(format_name)
    fitting = (m for m in methods if m in known_quantizers() and get_quantizer(m).suits(fmt) is None)
    return Recipe(fmt.name, next(fitting, NEAREST))


def fitting_recipe(wanted: Recipe, shape: Sequence[int]) -> tuple[Recipe, str | None]:
    """What a weight of this shape really gets, and why it is not what was asked for (or None).

    A format that stands in keeps the method where that has a meaning for it.
    """
    fmt, reason = fitting_format(wanted.grid, shape)
    if reason is None:
        return wanted, None
    method = wanted.method if wanted.quantizer.suits(fmt) is None else NEAREST
    return Recipe(fmt.name, method), reason
