"""The records that stages exchange: plain, typed, JSON-serialisable."""

from __future__ import annotations

import html
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from typing import Any, Self, TypeVar

from kl_lens.base.errors import PlanError

T = TypeVar("T")


class Record:
    """Mixin: a dataclass that goes to JSON and comes back unchanged."""

    def to_json(self) -> dict[str, Any]:
        """Strict JSON: an undefined standard error is null."""
        return asdict(self, dict_factory=_strict)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Checks names and types of all fields; ValueError names the first that is wrong."""
        if not isinstance(data, Mapping):
            raise ValueError(f"{cls.__name__}: expected a record, found {_shown(data)}")
        kinds = _kinds(cls)  # type: ignore[arg-type]
        if unknown := set(data) - set(kinds):
            raise ValueError(
                f"{cls.__name__}: unknown fields {sorted(map(str, unknown))}"
            )
        required = [f.name for f in fields(cls) if _is_required(f)]  # type: ignore[arg-type]
        if missing := [name for name in required if name not in data]:
            raise ValueError(f"{cls.__name__}: {missing[0]} is missing")
        return cls(
            **{k: _checked(v, kinds[k], f"{cls.__name__}.{k}") for k, v in data.items()}
        )


def _strict(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    return {
        name: None if name == "standard_error" and not math.isfinite(v) else v
        for name, v in entries
    }


@cache
def _kinds(record: type) -> dict[str, Any]:
    return {f.name: typing.get_type_hints(record)[f.name] for f in fields(record)}


def _is_required(entry: Any) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def _checked(value: Any, kind: Any, name: str) -> Any:
    """Converts a JSON value to the field's type: lists to tuples, dictionaries to records."""
    if kind is Any or (value is None and kind is types.NoneType):
        return value
    origin = typing.get_origin(kind)
    inner = typing.get_args(kind)
    if origin is types.UnionType:
        options = [item for item in inner if item is not types.NoneType]
        return (
            None
            if value is None and len(options) < len(inner)
            else _checked(value, options[0], name)
        )
    if origin in (tuple, Sequence) and isinstance(value, (list, tuple)):
        return tuple(_checked(item, inner[0], name) for item in value)
    if origin is dict and isinstance(value, dict):
        return {
            str(key): _checked(item, inner[1], f"{name}[{key}]")
            for key, item in value.items()
        }
    if isinstance(kind, type) and issubclass(kind, Record):
        return value if isinstance(value, kind) else kind.from_json(value)
    plain = (int, float) if kind is float else kind
    if (
        origin is None
        and isinstance(value, plain)
        and (kind is bool or not isinstance(value, bool))
    ):
        return value
    raise ValueError(
        f"{name}: expected {getattr(kind, '__name__', kind)}, found {_shown(value)}"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


Row = dict[str, Any]  # column → value


class Tabular:
    """Mixin: rows, as a DataFrame, and as a table in a notebook."""

    def rows(self) -> list[Row]:
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """A DataFrame of `rows`."""
        import pandas  # optional dependency

        return pandas.DataFrame(self.rows())

    def _repr_html_(self) -> str | None:
        rows = self.rows()
        heads = dict.fromkeys(name for row in rows for name in row)
        lines = [_line("th", heads), *(_line("td", map(row.get, heads)) for row in rows)]
        return f"<table>{''.join(lines)}</table>"


def _line(tag: str, values: Iterable[Any]) -> str:
    cells = (f"<{tag}>{html.escape(_text(value))}</{tag}>" for value in values)
    return f"<tr>{''.join(cells)}</tr>"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Rows(list[T], Tabular):
    """Records, of which each is a row."""

    def rows(self) -> list[Row]:
        return [
            record.summary() if isinstance(record, Plan) else _row(record)
            for record in self
        ]


def _row(record: Any) -> Row:
    """The record's plain values, and those of the mappings and estimates in it."""
    row: Row = {}
    for entry in fields(record):
        value = getattr(record, entry.name)
        inner = value if isinstance(value, dict) else {"": value}
        for key, item in inner.items():
            name = key if key and key not in row else f"{entry.name}_{key}".strip("_")
            if isinstance(item, Estimate):
                row |= {name: item.value, f"{name}_se": item.standard_error}
            elif isinstance(item, Quartiles):
                row |= {
                    name: item.median,
                    f"{name}_low": item.low,
                    f"{name}_high": item.high,
                }
            elif isinstance(item, Subject):
                row[name] = item.label
            elif isinstance(item, str | int | float | None):
                row[name] = item
    return row


@dataclass(frozen=True)
class Component(Record):
    """One weight matrix (or stack of expert matrices) that can have its own format."""

    name: str  # dotted PyTorch module name, or parameter name if a module has several
    weight: str  # dotted name of the parameter that holds the weight
    kind: str  # in_proj, x_proj, q_proj, embedding, lm_head, conv1d, …
    family: str  # ssm, attention, mlp, moe, embedding, head, other
    block: int | None  # index of its block; None outside the blocks
    shape: tuple[int, ...]  # (rows, columns), or (experts, rows, columns)
    parameters: int
    blocks: tuple[int, ...] = ()  # every block that uses this weight, if several share it
    tied_with: tuple[str, ...] = ()  # other names of the same weight
    # Siblings that runtimes fuse into one matmul (q/k/v, gate/up).
    fused_with: tuple[str, ...] = ()
    quantizable: bool = True
    reason: str | None = None  # why it is not quantizable


@dataclass(frozen=True)
class Estimate(Record):
    """A mean with its standard error; nan if undefined."""

    value: float
    standard_error: float = float("nan")

    def __str__(self) -> str:
        """`0.0103 ± 0.0001`; an unknown error is not shown."""
        error = self.standard_error
        return _text(self.value) + (f" ± {error:.1g}" if math.isfinite(error) else "")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        error = data.get("standard_error")
        return super().from_json(
            {**data, "standard_error": math.nan if error is None else error}
        )


@dataclass(frozen=True)
class Measurement(Record):
    """The effect of quantizing one component to one format on the model's output."""

    component: str
    format: str
    metrics: dict[str, Estimate]
    tokens: int
    windows: int
    compute_dtype: str
    seconds: float


# `--plan all` means every plan, -x looks like a flag; Windows has such devices, and drops a dot at the end.
_DEVICES = r"(?i:con|prn|aux|nul|com\d|lpt\d)(?:\.|$)"
_PLAN_NAME = re.compile(rf"(?!all$|-|{_DEVICES})[A-Za-z0-9._-]{{0,79}}[A-Za-z0-9_-]")
_OUR_PLANS = ("stock.", "uniform_", "recommended")
# Where a plan comes from: one recipe for all components, the paper's points, an exact budget, γ-greedy, a stock recipe,
# anything else.
PLAN_FAMILIES = ("uniform", "paper", "exact", "greedy", "stock", "other")


def checked_plan_name(name: str) -> str:
    """Returns a valid plan name or raises: it becomes part of file names, commands and records."""
    if not isinstance(name, str) or not _PLAN_NAME.fullmatch(name):
        raise PlanError(
            f"{name!r} is not a valid plan name: use letters, digits, dots, dashes and underscores, at most 80, "
            "no dash in front, no dot at the end; `all` means every plan, and con, nul, … are devices of Windows"
        )
    return name


def require_own_plan_name(name: str) -> None:
    """Raises if a user's plan would look like one that KL Lens makes by itself."""
    if checked_plan_name(name).casefold().startswith(_OUR_PLANS):
        raise PlanError(
            f"--name {name}: plans that KL Lens makes by itself begin with {', '.join(_OUR_PLANS)}; use another name"
        )


@dataclass(frozen=True)
class Measured(Record):
    """The effect of a whole plan on the model on held-out text, computed in PyTorch."""

    kl: Estimate  # KL(original ‖ planned), nats per token
    perplexity: Estimate  # per token, of the planned model
    original_perplexity: float
    text: str
    windows: int

    @property
    def rise(self) -> Estimate:
        """Of the perplexity, as a share of the original's."""
        change = self.perplexity.value / self.original_perplexity - 1
        return Estimate(change, self.perplexity.standard_error / self.original_perplexity)

    @property
    def place(self) -> str:
        """`wikitext2:valid, 4 windows`."""
        return f"{self.text}, {self.windows} window{'' if self.windows == 1 else 's'}"


# In a plan's notes: options of the export that it was made for, by keyword. What the user names goes before.
EXPORT_OPTIONS = "export_options"


@dataclass(frozen=True, repr=False)
class Plan(Record, Tabular):
    """Which recipe each component gets. Components not named stay FP16."""

    name: str
    # Component name → recipe, as `kl_lens.weights.recipes` spells it.
    assignment: dict[str, str]
    made_by: str  # for people only
    predicted_kl: float | None = None
    bytes: int | None = None  # of the weights
    notes: dict[str, Any] = field(default_factory=dict)
    family: str = "other"  # of PLAN_FAMILIES
    measured: Measured | None = None
    # By the user: bytes, kl, seconds (per token), drop, loss.
    limits: dict[str, float] = field(default_factory=dict)
    fixed_bytes: int = 0  # bytes of the file besides the weights
    statistics: str | None = None  # digest of the statistics behind recipes that learn
    target: str | None = None  # the target it was made for
    # How much more whole plans lose than their parts; included in `predicted_kl`.
    interaction: float = 1.0
    # Keys and values → the format the runtime keeps them in.
    caches: dict[str, str] = field(default_factory=dict)
    # In memory beside the file, with --memory: the runtime, states, caches.
    held_bytes: int = 0
    contest: str | None = None  # how it compares with stock recipes, in a sentence
    edited: bool = False  # by hand since KL Lens wrote it

    def __repr__(self) -> str:
        words = [
            f"{name} {_text(value)}" for name, value in self.summary().items() if value
        ]
        return f"Plan({', '.join(words)})"

    def rows(self) -> list[Row]:
        """One row per component that is not left in FP16."""
        return [{"component": c, "recipe": r} for c, r in self.assignment.items()]

    def summary(self) -> Row:
        """The plan as one row."""
        measured = None if self.measured is None else self.measured.kl.value
        row: Row = {"plan": self.name, "target": self.target, "bytes": self.file_bytes}
        return row | {"predicted_kl": self.predicted_kl, "measured_kl": measured}

    @property
    def missed(self) -> Estimate | None:
        """The loss on held-out text (of KL, or the rise of perplexity) if that, with its error, is above the limit."""
        if self.measured is None:
            return None
        loss = self.measured.rise if "drop" in self.limits else self.measured.kl
        most = self.limits.get("drop", self.limits.get("loss", math.inf))
        # The error of one window is not defined.
        error = 0.0 if math.isnan(loss.standard_error) else loss.standard_error
        return loss if loss.value + error > most else None

    @property
    def memory_bytes(self) -> int:
        """Of the file, and with --memory of all that is held beside it."""
        return (self.file_bytes or 0) + self.held_bytes

    @property
    def file_bytes(self) -> int | None:
        """Size of the target's file, or of the weights without a target."""
        return None if self.bytes is None else self.bytes + self.fixed_bytes


@dataclass(frozen=True, repr=False)
class SensitivityTable(Tabular):
    """All measurements of a run and the components they are about: the input of planning."""

    model: str
    model_type: str
    components: tuple[Component, ...]  # every weight of the model, quantizable or not
    head: str  # component that holds the head; the embedding if they are tied
    embedding: str
    measurements: tuple[Measurement, ...]
    statistics: str | None = None  # digest of the statistics behind recipes that learn

    @property
    def candidates(self) -> tuple[Component, ...]:
        return tuple(c for c in self.components if c.quantizable)

    @property
    def formats(self) -> tuple[str, ...]:
        """Measured formats, in order of first appearance."""
        return tuple(dict.fromkeys(m.format for m in self.measurements))

    def __repr__(self) -> str:
        words = (
            f"{len(self.components)} components, {len(self.measurements)} measurements"
        )
        return f"SensitivityTable({self.model}: {words} of {', '.join(self.formats)})"

    def rows(self) -> list[Row]:
        """One row per component and recipe: bytes and bits per weight, whether it was measured, every metric, and its
        standard error as `…_se`."""
        from kl_lens.weights.recipes import Recipe  # loads torch

        components = {c.name: c for c in self.components}
        rows = []
        for m in self.measurements:
            about = components[m.component]
            row: Row = {"component": m.component, "recipe": m.format}
            row |= {
                name: getattr(about, name)
                for name in ("kind", "family", "block", "parameters")
            }
            size = Recipe.parse(m.format).grid.bytes(about.shape)
            row |= {"bytes": size, "bits": 8 * size / about.parameters}
            row["measured"] = m.compute_dtype != PREDICTED
            for name, metric in m.metrics.items():
                row |= {name: metric.value, f"{name}_se": metric.standard_error}
            rows.append(row)
        return rows


PREDICTED = "predicted"  # `compute_dtype` of a Measurement that was not measured


@dataclass(frozen=True)
class ExportedTensor(Record):
    """Where a component is in an artifact, and its format there."""

    component: str
    runtime_name: str  # the runtime's own tensor name
    planned: str  # recipe
    realised: str
    bytes: int
    reason: str | None = None  # why realised differs from planned
    digest: str = ""  # of the bytes in the file
    weights: str = ""  # of the quantized weight in the weight store; empty without a recipe (norms in F32)


@dataclass(frozen=True)
class Artifact(Record):
    """One exported model: files that a runtime loads."""

    target: str  # openvino, gguf, mlx
    plan: str  # name of the plan
    files: tuple[str, ...]  # relative to the artifact's record
    tensors: tuple[ExportedTensor, ...]
    planned_bytes: int
    realised_bytes: int  # of the files that the runtime loads (`Target.loaded_bytes`)
    model: str
    model_fingerprint: str
    # Device profile, rewrites, versions, …
    settings: dict[str, Any] = field(default_factory=dict)
    # File → digest of its bytes as they were exported.
    digests: dict[str, str] = field(default_factory=dict)


# Kinds of what a sequence carries along: recurrent states, and keys and values in caches.
STATE, KEYS, VALUES = KINDS = ("state", "keys", "values")
CACHES = (KEYS, VALUES)

ORIGINAL = "original"
PLAN = "plan"
ARTIFACT = "artifact"


@dataclass(frozen=True)
class Subject(Record):
    """What was scored or timed: the original, a plan computed in PyTorch, or an exported artifact.

    `settings` holds what differs from the usual case: `{"exact": True}`, `{"device": "GPU"}`, `{"activations":
    "deployed"}`, and for a file outside the run its `{"path": …}`.
    """

    what: str  # original, plan, artifact
    plan: str | None = None
    # Of an artifact; for a plan: the target whose stored weights it uses.
    target: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    digest: str = ""  # of the recipes or of the artifact's record

    @property
    def label(self) -> str:
        """For people: `original`, `torch/small`, `torch/small as gguf`, `gguf/small (exact)`, a path."""
        if self.what == ORIGINAL:
            return ORIGINAL
        settings = dict(self.settings)
        path = settings.pop("path", None)
        if self.what == PLAN:
            stored = f" as {self.target}" if self.target else ""
            return f"torch/{self.plan}{stored}" + (
                " deployed" if "activations" in settings else ""
            )
        return (f"{self.target}/{self.plan}" if path is None else str(path)) + _bracketed(
            settings
        )

    @property
    def key(self) -> str:
        """Identifies the subject without its digest."""
        return json.dumps(
            [self.what, self.plan, self.target, self.settings], sort_keys=True
        )

    @property
    def file_key(self) -> str:
        """The key of the file that this is, or that PyTorch with its weights stands in for."""
        if self.what != PLAN or self.target is None:
            return self.key
        settings = {
            name: value for name, value in self.settings.items() if name != "activations"
        }
        return replace(self, what=ARTIFACT, settings=settings).key

    @property
    def own_plan(self) -> str | None:
        """The plan of the run; None for the original and for files outside the run."""
        return None if self.what == ORIGINAL or "path" in self.settings else self.plan

    def __hash__(self) -> int:
        return hash((self.key, self.digest))


def _bracketed(settings: Mapping[str, Any]) -> str:
    words = {
        "device": "on {}",
        "gpu_layers": "{} GPU layers",
        "exact": "exact",
        "load": "{}",
    }
    parts = [
        words.get(name, name + " {}").format(value)
        for name, value in settings.items()
        if value
    ]
    return f" ({', '.join(parts)})" if parts else ""


@dataclass(frozen=True, repr=False)
class Score(Record):
    """The quality of the original, a plan in PyTorch or an exported file on one text or task."""

    subject: Subject
    kind: str  # perplexity, divergence, task
    what: str  # the text ("wikitext2:test") or the task ("arc_easy")
    values: dict[str, Estimate]  # token_perplexity, word_perplexity, kl_mean, acc, …
    tokens: int  # scored tokens; for a task, examples
    protocol: dict[str, Any]  # window, stride, limit, few-shot, …: what the number means
    runtime: dict[str, Any]  # library, version, device, threads; dtype for PyTorch
    seconds: float

    def __repr__(self) -> str:
        values = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return f"Score({self.subject.label}, {self.what}: {values})"


@dataclass(frozen=True)
class Quartiles(Record):
    """Median and quartiles of repeated timings."""

    median: float
    low: float
    high: float
    repeats: int


@dataclass(frozen=True, repr=False)
class Profile(Record):
    """Speed and size of an exported file on one device with one protocol."""

    subject: Subject
    protocol: str  # "use": loading, prompt, generation
    device: str
    threads: int
    # load_seconds, first_token_seconds@N (N prompt tokens), seconds_per_token, tokens_per_second.
    timings: dict[str, Quartiles]
    # Relative to the FP16 subject of the same session, same names; larger is better. Low and high are a 95 %
    # interval. `ratio_of` decides whether one may be shown.
    ratios: dict[str, Quartiles]
    peak_memory_bytes: int | None
    file_bytes: int
    bound: dict[str, float]  # bytes_per_token, read_bandwidth, tokens_per_second, share
    settings: dict[str, Any]  # repeats, warm-up, quick or not, prompt lengths
    runtime: dict[str, Any]
    # Shares of all processors during timing: stolen (by the host), used by others, asked (threads over processors);
    # unknown ones are missing.
    load: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        medians = (f"{name} {time.median:.4g}" for name, time in self.timings.items())
        return f"Profile({self.subject.label}, {self.device}: {', '.join(medians)})"
