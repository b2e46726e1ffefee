"""Compares every tensor of a file with the original's parameter, and finds out how it differs.

The yardstick is the tensor itself: the original's values, rounded to nearest in the same type. Methods that learn
(GPTQ, importance matrices) move weights further than that, but by less than `_MOST` times. A cause is named only if
the values that it predicts are the file's, up to rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kl_lens.model import LoadedModel
from kl_lens.run.autopsies import TensorReport
from kl_lens.run.records import Component
from kl_lens.targets.dissection import Part, StoredTensor

# Causes: another tensor's values, values that are not finite, another shape, unknown. `_predictions` has others.
HOLDS = "holds"
INFINITE = "infinite"
SHAPE = "shape"
OFF = "off"
_MOST = 3.0  # times the error of rounding to nearest
_LEAST = 2e-3  # relative error that no rounding explains, in types that are almost exact
_UNKNOWN = 0.5  # the same for a type that we cannot round to
_EXPLAINED = 0.6  # relative error that is left at most, however coarse the type
_OTHER_SLOPE = (
    0.12  # how far the best factor between file and original may be from rounding's own
)
_BLOCK = 32
_BLOCK_ERROR = (
    0.3  # values side by side; of their length, beyond four times their rounding error
)
_VALUE = 0.03
_OF_MEAN = 0.003  # of a value and of the mean: what an almost exact type changes at most
_ENOUGH = 16  # tensors without a known cause: it is another model, and nothing is gained by looking further
_MATCHED = (
    1 << 17,
    64,
)  # rows that are looked for among each other, by so many of their columns
# Names of what runtimes keep in floating point, for files without an original.
_FLOAT_ONLY = re.compile(
    r"conv1d|A_log|[._](a|d|D)$|dt_bias|norm|router|gate_inp|\.bias$"
)
# What tensors with the same mistake share, the mistake in words, another tensor.
Cause = tuple[str, str, str]
_SOUND: Cause = ("", "", "")


@dataclass
class Weights:
    """The weights of a file as the original's parameters, and what was seen on the way."""

    reports: list[TensorReport] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # tensors that the file lacks
    left_out: list[str] = field(
        default_factory=list
    )  # tensors that could not be put back into the model
    uncompared: list[str] = field(
        default_factory=list
    )  # parameters that were found nowhere in the file
    stored: dict[str, Tensor] = field(
        default_factory=dict
    )  # parameter → the file's values
    rounded: dict[str, Tensor] = field(
        default_factory=dict
    )  # the same in rounding to nearest
    formats: dict[str, str] = field(
        default_factory=dict
    )  # component → our name of its type
    parameters: dict[str, str] = field(default_factory=dict)  # tensor → parameter


def examine(
    parts: Sequence[Part], model: LoadedModel, tensors: Sequence[StoredTensor]
) -> Weights:
    """Reads every tensor once, one at a time."""
    named: dict[str, Tensor] = dict(model.model.named_buffers())
    named |= dict(model.model.named_parameters(remove_duplicate=False))
    state = {name: value.detach() for name, value in named.items()}
    components = {name: c for c in model.anatomy.components for name in _names(c)}
    weights = Weights()
    for part in parts:
        if part.tensor is None:
            weights.missing.append(part.name)
        elif part.parameter is None or part.parameter in state:
            component = components.get(part.parameter or "")
            _examine(part, part.tensor, component, state, parts, weights)
    reported = {report.name for report in weights.reports}
    weights.reports += [
        describe(tensor) for tensor in tensors if tensor.name not in reported
    ]
    wanted = {part.parameter for part in parts}
    weights.uncompared = [
        c.weight for c in model.anatomy.components if not wanted & set(_names(c))
    ]
    return weights


def _names(component: Component) -> Iterator[str]:
    suffix = component.weight.removeprefix(component.name)
    yield from (component.weight, *(twin + suffix for twin in component.tied_with))


def describe(
    tensor: StoredTensor, component: Component | None = None, **details: Any
) -> TensorReport:
    bits = 8 * tensor.bytes / max(math.prod(tensor.shape), 1)
    only = _FLOAT_ONLY.search(tensor.name) is not None
    if component is not None:
        details |= {
            "kind": component.kind,
            "component": component.name,
            "block": component.block,
        }
        only = not component.quantizable
    return TensorReport(
        tensor.name, tensor.type, tensor.bytes, bits, float_only=only, **details
    )


def alone(tensor: StoredTensor) -> TensorReport:
    """What can be said of a tensor without an original."""
    cause, problem, _ = _infinite(tensor.read())
    return describe(tensor, problem=problem, cause=cause)


def together(reports: Sequence[TensorReport]) -> list[list[TensorReport]]:
    """Tensors that share a mistake, to be restored in one step: one cause, or each other's values."""
    partners = {report.name: report.partner for report in reports}
    groups: dict[tuple[object, ...], list[TensorReport]] = {}
    for report in reports:
        chain = [report.name]
        while (partner := partners.get(chain[-1])) and partner not in chain:
            chain.append(partner)
        place_of: tuple[object, ...] = (report.block,) if report.cause == OFF else ()
        key = (report.cause, *place_of, *(sorted(chain) if report.partner else ()))
        if report.problem:
            groups.setdefault(key, []).append(report)
    return list(groups.values())


def _infinite(values: Tensor) -> Cause:
    count = int((~values.isfinite()).sum())
    words = f"{count:,} of {values.numel():,} values are not finite"
    return (INFINITE, words, "") if count else _SOUND


def _examine(
    part: Part,
    tensor: StoredTensor,
    component: Component | None,
    state: Mapping[str, Tensor],
    parts: Sequence[Part],
    weights: Weights,
) -> None:
    name = part.parameter
    values = tensor.read()
    wanted = part.constant
    if wanted is None:
        wanted = torch.zeros_like(values) if name is None else part.expected(state[name])
    same_size = values.numel() == wanted.numel()
    if same_size and values.dim() != wanted.dim():
        values = values.reshape(wanted.shape)  # (heads) and (heads, 1) are the same
    if values.shape != wanted.shape:
        actual, expected = ("×".join(map(str, v.shape)) for v in (values, wanted))
        weights.left_out.append(tensor.name)
        problem = f"its shape is {actual}, not {expected}"
        weights.reports.append(describe(tensor, component, problem=problem, cause=SHAPE))
        return
    twins = [
        twin
        for twin in parts
        if twin.parameter in state
        and twin.parameter != name
        and twin.tensor is not None
        and twin.tensor.shape == tensor.shape
    ]
    alike = ((twin.name, twin.expected(state[twin.parameter or ""])) for twin in twins)
    plain = None if tensor.rounded is None else tensor.rounded(wanted)
    searched = [report.cause for report in weights.reports].count(OFF) < _ENOUGH
    pair = _Pair(values, wanted, plain)
    cause, problem, partner = pair.cause(component, alike if searched else None)
    finite = cause != INFINITE
    errors = {"error": pair.error, "own_error": pair.plain_error} if finite else {}
    weights.reports.append(
        describe(
            tensor, component, problem=problem, cause=cause, partner=partner, **errors
        )
    )
    if name is None:
        return
    weights.parameters[tensor.name] = name
    # A second tensor for one parameter has no place.
    again = name in weights.stored and values.numel() == state[name].numel()
    stored = _placed(part, values, weights.stored, state[name])
    if again or not stored:
        weights.left_out.append(tensor.name)
    _placed(part, wanted if plain is None else plain, weights.rounded, state[name])
    if tensor.format and component is not None and component.quantizable:
        weights.formats[component.name] = tensor.format


def _placed(
    part: Part,
    values: Tensor,
    parameters: dict[str, Tensor],
    original: Tensor,
) -> bool:
    """Puts a tensor's values where the model has them; whether that is possible."""
    name = part.parameter or ""
    whole = part.written(values, parameters.get(name, original))
    if whole is None or not bool(whole.isfinite().all()):
        return False
    parameters[name] = whole
    return True


class _Pair:
    """The values of a tensor beside those that it should hold."""

    def __init__(self, values: Tensor, wanted: Tensor, plain: Tensor | None) -> None:
        self.values = values
        self.wanted = wanted
        self.plain = plain
        self.error = _distance(values, wanted)
        self.plain_error = None if plain is None else _distance(plain, wanted)
        self.limit = (
            _UNKNOWN
            if self.plain_error is None
            else max(_MOST * self.plain_error, _LEAST)
        )

    def cause(
        self,
        component: Component | None,
        candidates: Iterator[tuple[str, Tensor]] | None,
    ) -> Cause:
        """Empty: it differs by rounding only. `candidates`: other tensors, whose values these may be; None: do not look
        far."""
        if (infinite := _infinite(self.values)) != _SOUND:
            return infinite
        odd = self._odd()
        slope = _slope(self.values, self.wanted)
        usual = 1.0 if self.plain is None else _slope(self.plain, self.wanted) or 1.0
        turned = abs(slope - usual) > _OTHER_SLOPE
        if self.error <= self.limit and not turned and not odd.any():
            return _SOUND
        first = float(self.values.flatten()[0]) + 0.0  # −0 + 0 is 0
        if bool((self.values == first).all()):
            return f"all {first:g}", f"all values are {first:.4g}", ""
        searched = candidates is not None
        for cause, words, predicted in self._predictions(
            slope / usual, component, searched
        ):
            if self._is(predicted):
                return cause, words, ""
        for name, expected in candidates or ():
            if self._is(expected):
                return HOLDS, f"holds the values of {name}", name
        mixed = torch.where(odd, self.values, self.wanted)
        if 0 < odd.sum() < 0.9 * odd.numel() and self._is(mixed):
            return self._partly(odd)
        words = f"off by {self.error:.2g} of its length"
        if self.plain_error is not None:
            words += f", where rounding to this type gives {self.plain_error:.2g}"
        return OFF, words, ""

    def _is(self, predicted: Tensor) -> bool:
        return _distance(self.values, predicted) <= min(self.limit, _EXPLAINED)

    def _predictions(
        self, factor: float, component: Component | None, searched: bool
    ) -> Iterator[tuple[str, str, Tensor]]:
        """(cause, words, the values that it would give)."""
        values = self.values
        wanted = self.wanted
        if abs(factor - 1) > 2 * _LEAST and abs(factor) > 1e-3:
            negative = abs(factor + 1) < _LEAST
            words = "with the other sign" if negative else f"times {factor:.3g}"
            yield words, f"the original's values {words}", factor * wanted
        if abs(shift := float((values - wanted).mean())) > _LEAST:
            yield "shifted", f"the original's values {shift:+.3g}", wanted + shift
        words = "the logarithm of the size of the original's values"
        yield "logarithm", words, wanted.abs().log()
        yield "exponential", "the exponential of the original's values", wanted.exp()
        plain = wanted.squeeze()
        if plain.dim() == 2:
            yield "transposed", "transposed", plain.T.reshape(wanted.shape)
        taps = component is not None and "conv" in component.kind
        labels = ["experts", "rows", "taps" if taps else "columns"]
        if plain.dim() < 2:
            labels = ["values"]
        if not searched or len(plain) > _MATCHED[0]:
            return
        for axis in reversed(range(plain.dim())):
            order = _order(values.reshape(plain.shape), plain, axis)
            if not torch.equal(order, torch.arange(len(order))):
                moved = plain.index_select(axis, order).reshape(wanted.shape)
                yield *_named(order, labels[axis - plain.dim()]), moved

    def _odd(self) -> Tensor:
        """Places that no rounding explains, where most others may be right."""
        if self.plain_error is not None and self.plain_error < _LEAST:
            size = (
                _VALUE * self.wanted.abs() + _OF_MEAN * self.wanted.square().mean().sqrt()
            )
            return (self.values - self.wanted).abs() > size
        width = self.values.shape[-1]
        shape = (-1, _BLOCK if width % _BLOCK == 0 else width)
        blocks = self.values.reshape(shape)
        right = self.wanted.reshape(shape)
        lengths = right.norm(dim=-1)
        errors = (blocks - right).norm(dim=-1)
        plain_error = lengths * float((errors / lengths.clamp_min(1e-30)).median())
        empty = (blocks == 0).all(dim=-1)
        if self.plain is not None:
            plain = self.plain.reshape(shape)
            plain_error = (plain - right).norm(dim=-1)
            empty = empty & (plain != 0).any(dim=-1)
        odd = ((errors > 4 * plain_error + _BLOCK_ERROR * lengths) | empty) & (
            lengths > 0.05 * lengths.mean()
        )
        return odd[:, None].expand(blocks.shape).reshape(self.values.shape)

    def _partly(self, odd: Tensor) -> Cause:
        values = self.values[odd]
        wanted = self.wanted[odd]
        count = int(odd.sum())
        if _distance(values, -wanted) <= min(self.limit, _EXPLAINED):
            words = f"{count:,} of {odd.numel():,} values have the wrong sign"
            return f"signs: {words}", words, ""
        fault = "not the original's" if values.any() else "zero"
        kind = "values"
        lines = odd
        if odd.dim() > 1:
            kind = "rows"
            lines = odd.flatten(0, -2).any(dim=-1)
        words = f"{int(lines.sum()):,} of {len(lines):,} {kind} are {fault}, from number {int(lines.nonzero()[0]):,} on"
        return f"partly {fault}: {words}", words, ""


def _order(values: Tensor, wanted: Tensor, axis: int) -> Tensor:
    """Where along this axis each part of the file comes from: its nearest in the original."""
    order = torch.arange(wanted.shape[axis])
    if wanted.dim() == 1:
        order[values.argsort()] = wanted.argsort()
        return order
    rows, originals = (tensor.movedim(axis, 0).flatten(1) for tensor in (values, wanted))
    odd = (
        ((rows - originals).norm(dim=1) > _LEAST * originals.norm(dim=1))
        .nonzero()
        .flatten()
    )
    sample = slice(None, None, max(1, rows.shape[1] // _MATCHED[1]))
    rows = rows[:, sample]
    originals = originals[:, sample]
    for part in odd.split(1024):
        order[part] = (
            rows[part] @ originals.T - originals.square().sum(dim=1) / 2
        ).argmax(dim=1)
    return order


def _named(order: Tensor, label: str) -> tuple[str, str]:
    """What an order of rows, columns, taps is called: for tensors that share it, and in words."""
    whole = torch.arange(len(order))
    moved = (order != whole).nonzero().flatten()
    if torch.equal(order, whole.flip(0)):
        return f"{label} reversed", f"its {label} are in reverse order"
    if len(moved) == 2:
        one, two = moved.tolist()
        return f"{label} swapped", f"{label} {one:,} and {two:,} are swapped"
    start = int(order[0])
    if torch.equal(order, whole.roll(-start)):
        words = f"its {label} are shifted by {-start % len(order):,} places"
        return f"{label} rolled", words
    if label == "rows" and any(torch.equal(order, rows) for rows in _rotary(whole)):
        return "rotary", "its rows are in the order of the other rotary layout"
    words = f"{len(moved):,} of {len(order):,} {label} are at other places"
    return f"{label} moved", words


def _rotary(rows: Tensor) -> Iterator[Tensor]:
    """Heads of any size, with pairs of rows side by side instead of half a head apart, or the other way round."""
    for size in range(4, len(rows) + 1, 2):
        if len(rows) % size == 0:
            for pairs in ((2, -1), (-1, 2)):
                yield (
                    rows.reshape(-1, size).unflatten(1, pairs).transpose(1, 2).reshape(-1)
                )


def _distance(values: Tensor, wanted: Tensor) -> float:
    """Of the length of what is wanted."""
    return float((values - wanted).norm()) / (float(wanted.norm()) or 1.0)


def _slope(values: Tensor, wanted: Tensor) -> float:
    length = float(wanted.norm()) ** 2
    return float((values * wanted).sum()) / length if length else 1.0
