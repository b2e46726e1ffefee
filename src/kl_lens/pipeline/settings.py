"""The settings of a verb: a frozen dataclass whose fields also say how they are written on a command line.

The command line, a YAML file and Python fill the same dataclasses, and `command_of` turns them back into words.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from kl_lens import units
from kl_lens.environment import processors
from kl_lens.errors import KLLensError
from kl_lens.targets import ALL_LAYERS, LOAD_MODES, TARGETS

VERB_MODEL = "folder, hub id, or reference:mamba, reference:mamba2, reference:hybrid, reference:hymba, reference:vision"
DEFAULT_MODEL, DEFAULT_RUN = "reference:mamba", "runs/reference-mamba"


@dataclass(frozen=True)
class Kind:
    """How a value is written as one word, and read back."""

    parse: Callable[[str], Any]
    spell: Callable[[Any], str] = str
    metavar: str | None = None


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{text} is not positive")
    return value


def _threads(text: str) -> int:
    value = _positive(text)
    if value > MOST_THREADS:
        raise ValueError(f"{text} is more than {MOST_THREADS}")
    return value


def thread_counts(text: str) -> tuple[int, ...]:
    """`2`, `1,2,4`, or `auto`: every count up to 8, from there on doubled, and all processors."""
    if text == AUTO:
        every = processors()
        doubled = (16 << step for step in range(5))
        return (*range(1, min(every, 8) + 1), *(n for n in doubled if n < every), *([every] * (every > 8)))
    try:
        return tuple(sorted({_threads(each) for each in units.parse_names(text) or (text,)}))
    except ValueError:
        raise KLLensError(f"{text}: give numbers of threads from 1 to {MOST_THREADS}, or {AUTO}") from None


def layer_counts(text: str) -> tuple[int, ...]:
    """`0`, `0,8,16`, `0,8,all`: the last puts all layers on a GPU."""
    words = units.parse_names(text)
    if not words or not all(word == "all" or word.isdigit() for word in words):
        raise KLLensError(f"{text}: give numbers of layers, or all")
    return tuple(sorted({ALL_LAYERS if word == "all" else int(word) for word in words}))


def _layers(text: str) -> int:
    counts = layer_counts(text)
    if len(counts) > 1:
        raise KLLensError(f"{text}: one number of layers, or all; `kl-lens benchmark` takes several")
    return counts[0]


def spell_layers(counts: int | tuple[int, ...]) -> str:
    each = counts if isinstance(counts, tuple) else (counts,)
    return ",".join("all" if count >= ALL_LAYERS else str(count) for count in each)


def load_modes(text: str) -> tuple[str, ...]:
    words = tuple(LOAD_MODES) if text == "all" else units.parse_names(text)
    if not words or not set(words) <= {AUTO, *LOAD_MODES}:
        raise KLLensError(f"{text}: there are {', '.join((AUTO, *LOAD_MODES))}, and all to compare them")
    return words


def _load(text: str) -> str:
    if text not in (AUTO, *LOAD_MODES):
        raise KLLensError(f"{text}: there are {', '.join((AUTO, *LOAD_MODES))}")
    return text


AUTO = "auto"
LOAD_HELP = (
    f"llama.cpp: how weights come into memory: {', '.join(LOAD_MODES)} (plain: not repacked for kernels)"
)
PLACES = ("auto", "memory", "disk")  # of weights; as `checkpoints.residency` has them, which loads torch
MOST_THREADS = 512  # llama.cpp ends the process at more
COUNT = Kind(_positive, metavar="N")
THREADS = Kind(_threads, metavar="N")
LAYERS = Kind(_layers, spell_layers, "N")
LOAD = Kind(_load, metavar="MODE")
SIZE = Kind(units.parse_bytes, units.spell_bytes, "SIZE")
SHARE = Kind(units.parse_share, units.spell_share, "SHARE")
TIME = Kind(units.parse_seconds, units.spell_seconds, "TIME")
NAMES = Kind(units.parse_names, ",".join, "LIST")
_PLAIN = {str: Kind(str), int: Kind(int, metavar="N"), float: Kind(float), Path: Kind(Path)}


@dataclass(frozen=True)
class Option:
    """How a field of the settings is written on a command line."""

    name: str  # of the field
    flag: str  # --window-length; empty for what stands alone
    kind: Kind
    default: Any
    help: str = ""
    metavar: str | tuple[str, ...] | None = None
    group: str = ""
    choices: Collection[str] = ()
    required: bool = False
    is_switch: bool = False
    nargs: str | int | None = None  # as argparse has it
    bare: Any = None  # the value of a flag without a word behind it
    repeated: bool = False
    excludes: str = ""  # options with the same word here exclude each other
    within: str = ""  # the field that holds it beside others, by keyword

    @property
    def title(self) -> str:
        """Its name for people and in YAML files, without dashes in front."""
        return self.flag.removeprefix("--") or self.name

    @property
    def meaning(self) -> str:
        """The help, with the default where there is one to name."""
        if self.required or self.is_switch or self.default in (None, (), ""):
            return self.help
        default = f"default: {self.spelled(self.default)}"
        return f"{self.help} ({default})" if self.help else default

    @property
    def has_many(self) -> bool:
        return self.nargs in ("*", "+") or isinstance(self.nargs, int)

    def spelled(self, value: Any) -> str:
        """For people and YAML: one text."""
        return ",".join(map(str, value)) if self.repeated or self.has_many else self.kind.spell(value)

    def from_python(self, value: Any) -> Any:
        """A Python caller's value, or the words that mean it on a command line."""
        if self.is_switch:
            return (True if self.bare is None else self.bare) if value else None
        if self.has_many or self.repeated:
            each = [value] if isinstance(value, str | Path) else value
            return tuple(self._one(one) for one in each)
        if isinstance(value, list | tuple) and self.kind is NAMES:
            value = ",".join(map(str, value))
        return tuple(value) if isinstance(value, list) else self._one(value)

    def _one(self, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
            word = value if isinstance(value, str) else self.kind.spell(value)
            try:
                value = self.kind.parse(word)
            except (ValueError, KLLensError) as error:
                raise KLLensError(f"{self.name}={value!r} does not fit: {error}") from None
        if self.choices and value not in self.choices:
            raise KLLensError(f"{self.name}={value!r} is none of {', '.join(self.choices)}")
        return value

    def words(self, value: Any) -> list[str]:
        """What gives this value on a command line."""
        front = [self.flag] if self.flag else []
        if self.is_switch or (self.bare is not None and value == self.bare):
            return front
        if self.repeated:
            each = value if self.has_many else [(one,) for one in value]
            return [word for one in each for word in (*front, *map(str, one))]
        return [*front, *map(str, value)] if self.has_many else [*front, self.kind.spell(value)]


def option(default: Any = MISSING, help: str = "", *, positional: bool = False, **metadata: Any) -> Any:
    """A field of settings; `metadata` are fields of `Option`. Without a default it has to be given."""
    if positional:
        metadata["flag"] = ""
    return field(default=default, metadata={"help": help, **metadata})


def grouped(title: str) -> Callable[..., Any]:
    """`option` for a group of flags under a heading."""
    return partial(option, group=title)


def options_of(settings: type[Settings]) -> list[Option]:
    """The options of a verb, in the order of its fields."""
    hints = typing.get_type_hints(settings)
    options: list[Option] = []
    for f in fields(settings):
        metadata = dict(f.metadata)
        if "spread" in metadata:
            options += metadata["spread"](f.name)
            continue
        kind = metadata.pop("kind", None) or _PLAIN.get(_bare_type(hints[f.name]), _PLAIN[str])
        flag = metadata.pop("flag", f"--{f.name.replace('_', '-')}")
        required = f.default is MISSING
        default = None if required else f.default
        switch = hints[f.name] is bool
        metadata = {"metavar": kind.metavar} | metadata
        options.append(Option(f.name, flag, kind, default, required=required, is_switch=switch, **metadata))
    return options


def values_of(settings: Settings) -> Iterator[tuple[Option, Any]]:
    """Every option with its value."""
    for each in options_of(type(settings)):
        held = getattr(settings, each.within or each.name)
        yield each, held.get(each.name) if each.within else held


def from_python(settings: type[T], values: Mapping[str, Any]) -> T:
    """Settings from a Python caller's keywords: values, or words as a command line has them ("4.5MB", "int4,int8")."""
    known = {each.name: each for each in options_of(settings)}
    if unknown := [name for name in values if name not in known]:
        raise KLLensError(f"{settings.verb} takes no {unknown[0]!r}; there are {', '.join(sorted(known))}")
    given = {name: known[name].from_python(value) for name, value in values.items() if value is not None}
    if missing := [each.name for each in known.values() if each.required and each.name not in given]:
        raise KLLensError(f"{settings.verb} needs {missing[0]}: {known[missing[0]].help}")
    return with_values(settings, given)


def with_values(settings: type[T], values: Mapping[str, Any]) -> T:
    """Settings from values by the names of their options."""
    given: dict[str, Any] = {}
    for each in options_of(settings):
        if each.name in values:
            (given.setdefault(each.within, {}) if each.within else given)[each.name] = values[each.name]
    return settings(**given)


def _bare_type(hint: Any) -> Any:
    """`int | None` → int, `tuple[Path, ...]` → Path."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint


T = TypeVar("T", bound="Settings")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a verb is asked to do."""

    verb: ClassVar[str]
    opens_models: ClassVar[bool] = True  # its function takes a workbench


def command_of(settings: Settings) -> list[str]:
    """The words behind `kl-lens` that give these settings: only what differs from the defaults."""
    alone: list[str] = []
    flagged: list[str] = []
    for each, value in values_of(settings):
        if value is None or (value == each.default and not each.required):
            continue
        (flagged if each.flag else alone).extend(each.words(value))
    return [settings.verb, *alone, *flagged]


loading = grouped("loading the model")


@dataclass(frozen=True, kw_only=True)
class Loading(Settings):
    """Which model, and how it is opened. Verbs say for themselves where on the command line the model stands."""

    model: str | None = option(None, "where the run's model is now, if it moved", metavar="MODEL")
    revision: str | None = loading(None, "branch, tag or commit of a hub id")
    tokenizer: str | None = loading(
        None, "folder, tokenizer.json or hub id of another tokenizer", metavar="PLACE"
    )
    dtype: str = loading("float32", "what to compute in")
    device: str = loading("cpu", "where to compute")
    trust_remote_code: bool = loading(False, "run Python code that comes with the checkpoint")
    task: str | None = loading(
        None, "what the model is asked (default: what its config.json says)", choices=("text", "image")
    )
    images: str | None = loading(
        None,
        "images for a classifier, in place of text: a folder of CLASS/*.png, with or without train/, val/ and test/",
        metavar="FOLDER",
    )

    @property
    def how(self) -> dict[str, Any]:
        """The loading settings alone, to hand on to another verb's."""
        return {name: getattr(self, name) for name in LOADING_NAMES}


LOADING_NAMES = ("revision", "tokenizer", "dtype", "device", "trust_remote_code", "task", "images")


@dataclass(frozen=True, kw_only=True)
class FromDisk(Loading):
    """Of verbs that can work on a model that does not fit into memory."""

    weights: str = loading(
        "auto",
        "disk: they stay there, and go through memory a block at a time, with the same numbers; auto: where the model "
        "does not fit into --memory-budget, or into the memory that is free",
        choices=PLACES,
    )


@dataclass(frozen=True, kw_only=True)
class OfRun(Settings):
    """About a run that is there."""

    run: str | None = option(None, f"the run folder (default: {DEFAULT_RUN})", metavar="DIR")

    @property
    def run_folder(self) -> Path:
        return Path(self.run or DEFAULT_RUN)


@dataclass(frozen=True, kw_only=True)
class OfModel(Loading):
    """About a model, the embedded one unless another is named."""

    model: str = option(DEFAULT_MODEL, VERB_MODEL, positional=True, metavar="MODEL", nargs="?")


@dataclass(frozen=True, kw_only=True)
class HeldOut(Settings):
    """Text that judges what was made from other text."""

    held_out: str = option("wikitext2:valid", metavar="TEXT")
    held_out_windows: int = option(32, kind=COUNT)


def new_run_folder(run: str | None, model_name: str) -> Path:
    """--run DIR, or runs/<model>."""
    return Path(run) if run else Path("runs") / units.tag_of(model_name)


def chosen_targets(names: tuple[str, ...] | None, *others: str) -> tuple[str, ...]:
    """The targets of --targets, or all; `others` may be named there too."""
    known = (*others, *TARGETS)
    if unknown := [name for name in names or () if name not in known]:
        raise KLLensError(f"--targets: no target is called {unknown[0]!r}; there are {', '.join(known)}")
    return known if names is None else names
