"""The settings of a command: a frozen dataclass. Each field also describes its command-line flag.

The command line, a YAML file and Python fill the same dataclasses; `command_of` turns them back into a command line.
Settings that several commands pass on together are a group: a dataclass of its own, held by one field.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import (
    MISSING,
    Field,
    asdict,
    dataclass,
    field,
    fields,
    is_dataclass,
    replace,
)
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, dataclass_transform

from kl_lens.base import units
from kl_lens.base.errors import KLLensError, PlanError
from kl_lens.base.files import require_outside_models, require_own_file
from kl_lens.base.system import DEFAULT_MEMORY
from kl_lens.targets import ALL_LAYERS, LOAD_MODES, TARGETS, SessionSettings
from kl_lens.targets.abilities import Usage

VERB_MODEL = (
    "folder, hub id (org/name or org/name@revision), or reference:mamba, reference:mamba2, reference:hybrid, "
    "reference:hymba, reference:vision"
)
DEFAULT_MODEL = "reference:mamba"
DEFAULT_RUN = "runs/reference-mamba"


@dataclass(frozen=True)
class Kind:
    """How a value is parsed, checked and written as one word."""

    parse: Callable[[str], Any] = str
    spell: Callable[[Any], str] = str
    metavar: str | None = None
    type: type = str  # of the value, or of each of several
    least: int = 0  # of numbers
    most: int = 0
    pattern: str = ""  # of text
    expected: str = "UTF-8 text without null characters"
    is_output: bool = False
    mark: str = ""  # of an output that is a file: what those that KL Lens made begin with

    def refusal(self, value: Any) -> str | None:
        """What was expected instead of this value; None if the value is fine."""
        if self.type in (str, Path):
            if not isinstance(value, str | Path):
                return "text"
            fits = _is_plain(str(value)) and (
                not self.pattern or re.fullmatch(self.pattern, str(value))
            )
            return None if fits else self.expected
        is_number = isinstance(value, int if self.type is int else int | float)
        if (
            is_number and not isinstance(value, bool) and self.least <= value <= self.most
        ):  # not true of nan
            return None
        return f"{'a whole number' if self.type is int else 'a number'} from {self.least:,} to {self.most:,}"


def _is_plain(text: str) -> bool:
    """File names and the journal can hold it."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # command-line bytes that are not UTF-8
        return False


def number(most: int, least: int = 0, of: type = int, metavar: str | None = "N") -> Kind:
    return Kind(of, str, metavar, of, least, most)


def _layers(text: str) -> int:
    if text != "all" and not text.isdigit():
        raise KLLensError(f"{text}: give a number of layers, or all")
    return ALL_LAYERS if text == "all" else int(text)


AUTO = "auto"
# Where weights are; repeats `model.residency`, which would load torch.
_, MEMORY, DISK = PLACES = (AUTO, "memory", "disk")
DTYPES = ("float32", "bfloat16", "float16", "float64")
MOST_TOKENS = 1 << 20
SIZE = Kind(units.parse_bytes, units.spell_bytes, "SIZE", int, 0, 10**18)
_DEVICES = r"auto|cpu|mps|xpu(:\d{1,3})?|cuda(:\d{1,3})?"
_LAYERS = Kind(
    _layers,
    lambda count: "all" if count >= ALL_LAYERS else str(count),
    "N",
    int,
    0,
    ALL_LAYERS,
)
_PLAIN = {
    str: Kind(),
    int: number(2**62),
    float: number(10**9, of=float, metavar=None),
    Path: Kind(Path, type=Path),
}
# Types of fields. Limits are larger than any real use, small enough that a typo does not ask for terabytes.
Count = Annotated[int, number(1_000_000, 1)]
Tokens = Annotated[int, number(MOST_TOKENS, 1)]
Context = Annotated[int, Kind(units.parse_count, str, "TOKENS", int, 1, MOST_TOKENS)]
Seed = Annotated[int, number(2**62)]
Threads = Annotated[int, number(512, 1)]  # with more, llama.cpp ends the process
Layers = Annotated[int, _LAYERS]
Size = Annotated[int, SIZE]
Share = Annotated[float, Kind(units.parse_share, units.spell_share, "SHARE", float, 0, 1)]
Temperature = Annotated[float, number(1000, of=float, metavar="T")]
Nats = Annotated[float, number(10**9, of=float, metavar="NATS")]
Names = Annotated[tuple[str, ...], Kind(units.parse_names, ",".join, "LIST")]
Text = Annotated[str, Kind(metavar="TEXT")]
Name = Annotated[str, Kind(metavar="NAME")]
Model = Annotated[str, Kind(metavar="MODEL")]
Place = Annotated[str, Kind(metavar="PLACE")]
Folder = Annotated[str, Kind(metavar="DIR")]
Directory = Annotated[Path, Kind(Path, metavar="DIR", type=Path)]
OutputFolder = Annotated[Path, Kind(Path, metavar="DIR", type=Path, is_output=True)]
_DEVICE = Kind(
    pattern=_DEVICES, expected="cpu, cuda, cuda:1, …, or auto (a GPU if there is one)"
)
Device = Annotated[str, _DEVICE]


def _output(mark: str) -> Kind:
    return Kind(Path, metavar="FILE", type=Path, is_output=True, mark=mark)


CHART_MARK = "<!-- KL Lens -->"
Report = Annotated[Path, _output("<title>KL Lens: ")]
Chart = Annotated[Path, _output(CHART_MARK)]
Shared = Annotated[Path, _output("7zXZ")]  # as such files begin


@dataclass(frozen=True)
class Option:
    """A settings field as a command-line option."""

    name: str  # as a keyword in Python
    flag: str  # --window-length; empty for positional arguments
    kind: Kind
    default: Any
    help: str = ""
    metavar: str | None = None
    group: str = ""
    choices: Collection[str] = ()
    required: bool = False
    is_switch: bool = False
    nargs: str | None = None  # as in argparse
    bare: Any = None  # the value if the flag is given without one
    several: bool = False  # its value is a tuple
    excludes: str = ""  # options with the same word here exclude each other
    former: tuple[str, ...] = ()  # names that it had: understood, not shown
    attribute: str = ""  # the field
    within: str = ""  # the field that holds the group or mapping which it is in

    @property
    def label(self) -> str:
        return self.flag or self.name

    @property
    def meaning(self) -> str:
        """The help text, with the default if there is one."""
        if self.several and self.choices:
            return f"{self.help}: of {', '.join(self.choices)}"
        if self.required or self.is_switch or self.default in (None, (), ""):
            return self.help
        default = f"default: {self.spelled(self.default)}"
        return f"{self.help} ({default})" if self.help else default

    @property
    def has_many(self) -> bool:
        return self.nargs == "*"

    def read(self, text: str) -> Any:
        """Parses one word; raises KLLensError if it is not valid."""
        words = (str, Path, units.parse_names)
        if not text.strip() and text != self.bare and self.kind.parse in words:
            raise KLLensError(f"{self.label} is empty; give it a value, or leave it out")
        try:
            if "_" in text and self.kind.type in (int, float):
                raise ValueError("Python would ignore it")
            value = self.kind.parse(text)
        except KLLensError as error:
            raise KLLensError(f"{self.label} {error}") from None
        except ValueError:
            raise self._wrong(text, self.kind.refusal(None) or "something else") from None
        self._check_each(value)
        return value

    def check(self, value: Any) -> None:
        """Raises KLLensError if the value is not valid."""
        if value is None and self.default is None and not self.required:
            return
        if isinstance(value, tuple) != self.several:
            raise self._wrong(value, "a tuple of values" if self.several else "one value")
        self._check_each(value)

    def _check_each(self, value: Any) -> None:
        for item in value if isinstance(value, tuple) else (value,):
            if self.is_switch:
                expected = None if isinstance(item, bool) else "true or false"
            elif self.choices:
                fits = isinstance(item, str) and item in self.choices
                expected = None if fits else f"one of {', '.join(self.choices)}"
            else:
                expected = self.kind.refusal(item)
            if expected is not None:
                raise self._wrong(item, expected)

    def _wrong(self, value: Any, expected: str) -> KLLensError:
        try:
            text = str(value) if isinstance(value, str | Path | float) else repr(value)
        except ValueError:  # Python refuses to print numbers with thousands of digits
            text = "(a very large number)"
        text = text if len(text) <= 60 else text[:59] + "…"
        return KLLensError(f"{self.label} {text}: expected {expected}")

    def spelled(self, value: Any) -> str:
        """The value as one string, for help and YAML."""
        return ",".join(map(str, value)) if self.has_many else self.kind.spell(value)

    def from_python(self, value: Any) -> Any:
        """Accepts a Python value or its command-line spelling. `check` validates it."""
        if self.is_switch:
            if not isinstance(value, bool):
                raise self._wrong(value, "true or false")
            return (True if self.bare is None else self.bare) if value else self.default
        if isinstance(value, str | Path):
            word = self.read(str(value))
            return (word,) if self.has_many else word
        if not isinstance(value, list | tuple):
            return (value,) if self.several else value
        return tuple(
            self.from_python(item)[0]
            if self.has_many and isinstance(item, str | Path)
            else item
            for item in value
        )

    def words(self, value: Any) -> list[str]:
        """The command-line words that give this value."""
        front = [self.flag] if self.flag else []
        if self.is_switch or (self.bare is not None and value == self.bare):
            return front
        return (
            [*front, *map(str, value)]
            if self.has_many
            else [*front, self.kind.spell(value)]
        )


def option(
    default: Any = MISSING, help: str = "", *, positional: bool = False, **metadata: Any
) -> Any:
    """A settings field; `metadata` are fields of `Option`. Without a default it is required."""
    if positional:
        metadata["flag"] = ""
    return field(default=default, metadata={"help": help, **metadata})


def grouped(title: str, **metadata: Any) -> Callable[..., Any]:
    """`option` for a group of flags under a heading."""
    return partial(option, group=title, **metadata)


def group(kind: type[Any], **changed: Any) -> Any:
    """A field with a group of settings. `changed`: its options that are different in this command; None: it has none of
    this name."""
    usual = kind(**{name: option and option.default for name, option in changed.items()})
    return field(default=usual, metadata={"holds": kind, "changed": changed})


def options_of(settings: type[Settings]) -> tuple[Option, ...]:
    """The options of a verb, in the order of its fields."""
    hints = typing.get_type_hints(settings, include_extras=True)
    options: list[Option] = []
    for f in fields(settings):
        if "spread" in f.metadata:
            options += f.metadata["spread"](f.name)
        elif "holds" in f.metadata:
            kind = f.metadata["holds"]
            changed = f.metadata["changed"]
            inner = typing.get_type_hints(kind, include_extras=True)
            options += [
                _option(changed.get(g.name, g), g.name, inner[g.name], within=f.name)
                for g in fields(kind)
                if changed.get(g.name, g) is not None
            ]
        else:
            options.append(_option(f, f.name, hints[f.name]))
    return tuple(options)


def _option(f: Field[Any], name: str, hint: Any, within: str = "") -> Option:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # `int | None`
        hint = typing.get_args(hint)[0]
    (kind,) = getattr(hint, "__metadata__", (None,))  # of Annotated
    hint = hint if kind is None else hint.__origin__
    several = typing.get_origin(hint) is tuple
    kind = kind or _PLAIN.get(typing.get_args(hint)[0] if several else hint, _PLAIN[str])
    required = f.default is MISSING
    flag = f"--{name.replace('_', '-')}"
    usual = None if required else f.default
    described: dict[str, Any] = {
        "name": name,
        "flag": flag,
        "metavar": kind.metavar,
        **f.metadata,
    }
    return Option(
        kind=kind,
        default=usual,
        required=required,
        is_switch=hint is bool,
        several=several,
        attribute=name,
        within=within,
        **described,
    )


def values_of(settings: Settings) -> Iterator[tuple[Option, Any]]:
    """Every option with its value."""
    for option in options_of(type(settings)):
        holder = getattr(settings, option.within) if option.within else settings
        yield (
            option,
            holder.get(option.name)
            if isinstance(holder, Mapping)
            else getattr(holder, option.attribute),
        )


def converted(settings: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values from Python or YAML, or strings as on the command line ("4.5MB", "int4,int8"). None: not given."""
    options = options_of(settings)
    named = {name: o for o in options for name in (*o.former, o.name)}
    attributes = {}
    for name, value in values.items():
        if name not in named:
            names = sorted(option.name for option in options)
            raise KLLensError(
                f"{settings.verb} has no setting {name!r}; it has {', '.join(names)}"
            )
        if value is not None:
            option = named[name]
            attributes[option.name] = option.from_python(value)
            option.check(attributes[option.name])
    return attributes


def from_python(settings: type[S], values: Mapping[str, Any]) -> S:
    typed = converted(settings, values)
    if missing := [
        option
        for option in options_of(settings)
        if option.required and option.name not in typed
    ]:
        raise KLLensError(f"{settings.verb} needs {missing[0].name}: {missing[0].help}")
    return settings.of(**typed)


S = TypeVar("S", bound="Settings")
T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def with_options(kind: type[T]) -> type[T]:
    """A frozen dataclass with keywords, whose fields describe options."""
    return dataclass(frozen=True, kw_only=True)(kind)


@with_options
class Settings:
    """Of one verb, whose name is that of its module or folder in `study`."""

    verb: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.verb = cls.__module__.removeprefix(f"{__package__}.").partition(".")[0]

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Settings from values by option name, those in groups too."""
        by_group: dict[str, dict[str, Any]] = {}
        for option in options_of(cls):
            if option.name in values:
                by_group.setdefault(option.within, {})[option.attribute] = values[
                    option.name
                ]
        ungrouped = by_group.pop("", {})
        for within, changed in by_group.items():
            usual = getattr(cls, within, None)
            if is_dataclass(usual) and not isinstance(usual, type):
                ungrouped[within] = replace(usual, **changed)
            else:
                ungrouped[within] = changed
        return cls(**ungrouped)

    def parts(self) -> Mapping[str, Settings]:
        """What is done one after another, by target."""
        return {"": self}

    def check(self) -> None:
        """Raises KLLensError if these settings cannot work, before anything is opened: by their values, and by options
        that exclude each other. Verbs add their own rules."""
        exclusive: dict[str, str] = {}
        for option, value in values_of(self):
            option.check(value)
            if option.kind.is_output and value is not None:
                require_outside_models(Path(value), option.flag)
                if option.kind.mark:
                    require_own_file(Path(value), option.flag, option.kind.mark)
            if not option.excludes or value == option.default:
                continue
            if (
                flag := exclusive.setdefault(option.excludes, option.flag)
            ) != option.flag:
                raise KLLensError(f"{flag} and {option.flag}: give only one of them")


@with_options
class ForTargets(Settings):
    """Of a verb that serves one target after another."""

    target: Names | None = option(
        None,
        "runtimes, one after another: their formats, arithmetic and files",
        choices=TARGETS,
    )

    @property
    def runtime(self) -> str | None:
        """The target of this part of the work."""
        return self.target[0] if self.target else None

    def parts(self) -> dict[str, Self]:
        names = self.target
        return {n: replace(self, target=(n,)) for n in names} if names else {"": self}

    def check(self) -> None:
        super().check()
        if self.target == ():
            raise KLLensError("--target names no target; give for example gguf")


def command_of(settings: Settings) -> list[str]:
    """The arguments of `kl-lens` that give these settings; flags with their defaults are left out."""
    alone: list[str] = []
    flagged: list[str] = []
    for option, value in values_of(settings):
        if value is None or (
            option.flag and value == option.default and not option.required
        ):
            continue
        (flagged if option.flag else alone).extend(option.words(value))
    return [settings.verb, *alone, *flagged]


def as_yaml(settings: Settings) -> str:
    """The settings under the names of their flags, those left empty not named."""
    import yaml  # only `run` needs it

    values = {}
    for option, value in values_of(settings):
        if value is not None and (value != () or value != option.default):
            plain = isinstance(value, bool | int | float) and str(
                value
            ) == option.kind.spell(value)
            values[option.name.replace("_", "-")] = (
                value if plain else option.spelled(value)
            )
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


# -- groups ---------------------------------------------------------------------------------------------------

loading = grouped("loading the model")


@with_options
class Opening:
    """How a model is opened."""

    tokenizer: Place | None = loading(
        None, "another tokenizer: folder, tokenizer.json, list of tokens (.txt), hub id"
    )
    dtype: str = loading("float32", "data type for computing", choices=DTYPES)
    device: Device = loading(
        AUTO, "where to compute: cpu, cuda, cuda:1, …; auto: the GPU if there is one"
    )
    trust_remote_code: bool = loading(
        False, "run the Python code that comes with the checkpoint"
    )
    bos: str = loading(
        AUTO,
        "whether texts begin with the model's first token, BOS; auto: as its tokenizer says, else measured",
        choices=(AUTO, "yes", "no"),
    )
    template: Place | None = loading(
        None, "llama.cpp's 16-bit GGUF of the model: GGUF files are made like it"
    )
    images: Folder | None = loading(
        None, "for a classifier: a folder of CLASS/*.png, or of train/, val/, test/"
    )
    weights: str | None = loading(
        AUTO,
        "disk: weights are read one block at a time, with the same results; auto: disk if they do not fit into free "
        "memory, or into --working-memory",
        choices=PLACES,
    )
    working_memory: Size | None = loading(
        None,
        "what KL Lens itself may use for cached states and outputs, and for weights if the model is larger (default: "
        f"{units.spell_bytes(DEFAULT_MEMORY)}; on a GPU most of its free memory)",
        former=("memory_budget",),
    )

    @property
    def memory(self) -> int:
        return self.working_memory or DEFAULT_MEMORY

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `kl_lens.load`."""
        named = {**asdict(self), "memory_budget": self.working_memory}
        del named["working_memory"]
        return named | {"weights": self.weights or MEMORY}


OPENING_NAMES = tuple(f.name for f in fields(Opening))
calibration_text = grouped("calibration text")


@with_options
class Calibration:
    """The text that the sweep measures on."""

    text: str = calibration_text(
        "wikitext2:train",
        "name:split, or a .txt, .json, .jsonl or .parquet file of texts or chats, or a folder of them",
    )
    windows: Count | None = calibration_text(64, "number of windows")
    window_length: Tokens | None = calibration_text(
        None, "tokens per window (default: 512; 16 images)"
    )
    seed: Seed = calibration_text(42, "chooses the windows")


@with_options
class HeldOut:
    """Text that plans are measured on; it must not overlap the calibration text."""

    held_out: Text = option("wikitext2:valid", "text that plans are measured on")
    held_out_windows: Count = option(32, "number of windows")

    def check(self, *, searches: bool) -> None:
        """`searches`: plans are measured until mean + standard error of the loss fits."""
        if searches and self.held_out_windows < 3:
            few = f"--held-out-windows {self.held_out_windows}"
            raise PlanError(
                f"{few}: --max-loss and --max-drop need at least 3, to search with a standard error"
            )
        if self.held_out_windows < 2:
            raise PlanError(
                "--held-out-windows must be at least 2: one half decides, the other confirms"
            )


GRADIENTS = "in deep models, predict from gradients and measure only what decides: faster, not as exact"
LIMIT = "limit on size or loss (give one)"
wanted = grouped(LIMIT, excludes="limit")
in_use = grouped(LIMIT)


@with_options
class Limits:
    """What is asked of a plan; at most one is given."""

    max_bytes: Size | None = wanted(
        None, "the best plan (of a target: file) of at most this size, as 90MB"
    )
    max_loss: Nats | None = wanted(
        None, "the smallest plan of at most this measured KL, for example 0.01"
    )
    max_drop: Share | None = wanted(
        None, "the smallest plan with at most this rise of perplexity, as 3%"
    )
    memory: Size | None = wanted(
        None,
        "the best plan that runs on a device with this memory: file, states, caches and the runtime's share, as 8GB",
    )
    context: Context | None = in_use(
        None, "tokens that each sequence may have, as 32k (default: 4096)"
    )
    batch: Count | None = in_use(None, "sequences at once (default: 1)")

    @property
    def bytes(self) -> int | None:
        """Of the file, or with --memory of all that is held."""
        return self.max_bytes if self.memory is None else self.memory

    @property
    def use(self) -> Usage | None:
        return (
            None
            if self.memory is None
            else Usage(self.context or Usage.context, self.batch or Usage.batch)
        )

    def measured(self, *, beside: bool) -> dict[str, float]:
        """The limit on the loss if whole plans are measured for it: not `beside` another limit."""
        return {} if beside or self.bytes is not None else self.loss

    @property
    def loss(self) -> dict[str, float]:
        """The limit on the loss, as plans record it."""
        if self.max_drop is not None:
            return {"drop": self.max_drop}
        return {} if self.max_loss is None else {"loss": self.max_loss}

    def check(self) -> None:
        if self.memory is None and (self.context or self.batch):
            raise PlanError(
                "--context and --batch say what --memory is for: give that, too"
            )

    @property
    def given(self) -> dict[str, float]:
        return {
            f.name: value
            for f in fields(self)
            if (value := getattr(self, f.name)) is not None
        }


several = grouped("several processes")


@with_options
class Processes:
    """Where a sweep runs: this process, several on this machine, or a Ray cluster."""

    ray: str | None = several(
        None,
        "HOST:PORT of a Ray cluster, or local for this machine (needs kl-lens[ray])",
        metavar="ADDRESS",
    )
    workers: Count | None = several(
        None,
        "number of processes (default: several on 8 or more cores if that is faster; with --ray one per GPU, or per "
        "machine without GPUs); 1: only this process",
    )


_tasks = grouped("tasks (lm-eval)")


@with_options
class Tasks:
    """Tasks of lm-eval."""

    tasks: Names | None = _tasks(
        None, "for example arc_easy,hellaswag,piqa (needs kl-lens[eval])"
    )
    task_data: Directory | None = _tasks(
        None, "local NAME_test.jsonl files, instead of the hub"
    )
    task_limit: Count | None = _tasks(None, "only the first N examples of each task")

    def check(self) -> None:
        """Raises if lm-eval is missing, or if something is said about tasks and none is named."""
        if self.tasks is None:
            for flag, value in (
                ("--task-data", self.task_data),
                ("--task-limit", self.task_limit),
            ):
                if value is not None:
                    raise KLLensError(f"{flag} needs tasks; name them with --tasks")
            return
        if not self.tasks:
            raise KLLensError("--tasks names no task; give for example arc_easy,piqa")
        from kl_lens.judging.tasks import require_lm_eval

        require_lm_eval()


running = grouped("running")


@with_options
class Runtime:
    """How a runtime opens a file."""

    device: str = running(
        AUTO,
        "device: CPU, GPU or NPU (OpenVINO), CPU or GPU (MLX); auto: the CPU, and for text on a Mac its GPU",
        metavar="DEVICE",
    )
    threads: Threads | None = running(None, "default: the runtime's own choice")
    gpu_layers: Layers = running(0, "llama.cpp: layers on a GPU, or all")
    load: str = running(
        AUTO, "llama.cpp: how weights are loaded", choices=(AUTO, *LOAD_MODES)
    )

    def session(self, *, exact: bool = False, auto: str = "CPU") -> SessionSettings:
        """`auto`: the device if the user named none."""
        device = auto if self.device == AUTO else self.device.upper()
        return SessionSettings(device, self.threads, self.gpu_layers, exact, self.load)


# -- options that several commands have ---------------------------------------------------------------------

of_targets = partial(option, None, choices=TARGETS, metavar="LIST", former=("targets",))
of_run = partial(option, None, f"the run folder (default: {DEFAULT_RUN})")
of_new_run = partial(option, None, "the run folder (default: runs/<model>)")
of_model = partial(option, DEFAULT_MODEL, VERB_MODEL, positional=True, nargs="?")
of_files = partial(
    option,
    (),
    "files or folders, whoever made them (default: all of the run)",
    positional=True,
    nargs="*",
    metavar="ARTIFACT",
)
of_plans = partial(option, "all", "plans of the run: a, or a,b, or all", metavar="NAMES")
moved_model = partial(option, None, "the run's model, if it has moved")


def new_run_folder(run: str | None, model_name: str) -> Path:
    """--run DIR, or runs/<model>."""
    return Path(run) if run else Path("runs") / units.tag_of(model_name)
