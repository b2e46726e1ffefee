"""What an autopsy has seen of one file, as the run keeps it and the report shows it."""

from __future__ import annotations

from dataclasses import dataclass

from kl_lens.run.records import Estimate, Record


@dataclass(frozen=True)
class TensorReport(Record):
    """One tensor of the file beside the parameter that it should hold."""

    name: str
    type: str
    bytes: int
    bits: float  # per weight
    kind: str = ""  # of our component: in_proj, conv1d, …; empty: no part of the original
    component: str = ""
    block: int | None = None
    error: float | None = None  # ‖file − original‖ / ‖original‖
    own_error: float | None = (
        None  # the same for the original, rounded to nearest in this type
    )
    problem: str = ""  # what is wrong with its values, in words
    cause: str = ""  # the same for tensors that share a mistake
    partner: str = ""  # the tensor whose values it holds
    float_only: bool = False  # runtimes expect it in floating point

    @property
    def is_float(self) -> bool:
        return self.bits >= 16


@dataclass(frozen=True)
class Step(Record):
    """One measurement of the chain."""

    letter: str
    title: str
    kl: Estimate | None = None  # from the original, nats per token
    apart: Estimate | None = None  # KL from the step that it should equal
    beside: str = ""  # the letter of that step
    failure: str = ""  # why there is no number
    note: str = ""


@dataclass(frozen=True)
class Restored(Record):
    """What the file would gain if this part of it were exact."""

    what: str  # `all in_proj`, or a component
    type: str
    kl: float  # lower by so much
    share: float  # of the whole loss
    bits: float = 0.0


@dataclass(frozen=True)
class Finding(Record):
    """One thing to know about the file."""

    step: str  # file, weights, type, activations, metadata, runtime, settings, prompt or tokenizer
    where: str  # tensor, component or setting
    words: str
    advice: str = ""
    kl: float | None = None  # what it costs, nats per token
    is_fault: bool = True  # False: worth knowing, nothing wrong


@dataclass(frozen=True)
class Autopsy(Record):
    """What was seen of one file."""

    file: str
    target: str
    bytes: int
    original: str  # empty: nothing to compare with
    text: str
    headline: str
    findings: tuple[Finding, ...]
    steps: tuple[Step, ...] = ()
    restored: tuple[Restored, ...] = ()
    tensors: tuple[TensorReport, ...] = ()
    rounding_kl: Estimate | None = (
        None  # the original, rounded to nearest in the same types
    )
    planned_kl: Estimate | None = (
        None  # our plan of no more bytes, from a run's measurements
    )
    planned_bytes: int | None = None
    unchecked: tuple[str, ...] = ()  # what could not be checked, in words

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_fault)

    @property
    def groups(self) -> dict[tuple[str | None, str], list[TensorReport]]:
        """The tensors by kind and type."""
        groups: dict[tuple[str | None, str], list[TensorReport]] = {}
        for tensor in self.tensors:
            groups.setdefault((tensor.kind, tensor.type), []).append(tensor)
        return groups
