"""What a verb's settings give the method of its name: keywords, their help, and errors in Python's words.

`python scripts/keywords.py` writes the same keywords for type checkers, to typed.pyi.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator
from functools import update_wrapper
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar, cast

from kl_lens.base.errors import KLLensError
from kl_lens.study.settings import OPENING_NAMES, Option, Settings, options_of

Method = TypeVar("Method", bound=Callable[..., Any])
# A flag in a message, and what stands before a colon or is a number: the value that it has.
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]+)(?: (?=\S+: |[\d.]))?")


def verb(
    function: Method, settings: Callable[[], type[Settings]], *without: str
) -> Method:
    """The function, which has `**flags`, telling that its keywords are the options of these settings; `without`: those
    that are not for Python."""
    return cast(Method, _Verb(function, settings, without))


class _Verb:
    """A function whose signature and help are made when somebody asks: verbs load on first use."""

    def __init__(
        self,
        function: Callable[..., Any],
        settings: Callable[[], type[Settings]],
        without: Collection[str],
    ) -> None:
        update_wrapper(self, function, ("__module__", "__name__", "__qualname__"))
        self._function = function
        self._settings = settings
        self._without = without

    def __get__(self, study: object, owner: object) -> object:
        return self if study is None else MethodType(self, study)

    def __call__(self, *arguments: Any, **flags: Any) -> Any:
        try:
            return self._function(*arguments, **flags)
        except KLLensError as error:
            error.args = (in_python(str(error)),)
            raise

    @property
    def options(self) -> Iterator[Option]:
        named = {*inspect.signature(self._function).parameters, *self._without}
        if "self" in named:
            named |= {"model", "run", *OPENING_NAMES}  # the study's
        for option in options_of(self._settings()):
            if option.flag and option.name not in named:
                yield option

    @property
    def __signature__(self) -> inspect.Signature:
        own = inspect.signature(self._function)
        *first, _ = own.parameters.values()
        keywords = [
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option.default,
                annotation=annotation(option),
            )
            for option in self.options
        ]
        return own.replace(parameters=[*first, *keywords])

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        meanings = {o.name: in_python(o.meaning) for o in self.options}
        lines = [f"    {name}: {meaning}" for name, meaning in meanings.items()]
        own = inspect.cleandoc(self._function.__doc__ or "")
        return "\n".join([own, "", "Keywords:", *lines])


def annotation(option: Option) -> str:
    """The type of a keyword, as Python spells it."""
    kind = option.kind
    plain = kind.type.__name__
    if option.is_switch:
        one = "bool"
    elif option.choices:
        one = f"Literal[{', '.join(map(repr, option.choices))}]"
    elif kind.type is Path or (kind.type in (int, float) and kind.parse is not kind.type):
        one = f"{plain} | str"
    else:
        one = plain
    if option.several:
        one = f"Sequence[{one}] | {one if option.has_many else 'str'}"
    return one if option.default is not None or option.required else f"{one} | None"


def in_python(message: str) -> str:
    """A message with the names of keywords in place of flags; the commands in it stay."""
    words, command, rest = message.partition("kl-lens ")
    words = _FLAG.sub(lambda flag: f"{flag[1].replace('-', '_')}=", words)
    return words + command + rest
