"""Compares every tensor of a file with the original's parameter, and says how it differs.

The yardstick is the tensor itself: the original's values, rounded to nearest in the same type. Methods that learn
(GPTQ, importance matrices) move weights further than that, but by less than `_MOST` times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kl_lens.checkpoints import LoadedModel
from kl_lens.evaluation.autopsy.findings import TensorReport
from kl_lens.records import Component
from kl_lens.targets.dissection import Part, StoredTensor

_MOST = 3.0  # times the error of rounding to nearest
_LEAST = 2e-3  # relative error that no rounding explains, in types that are almost exact
_OTHER_SLOPE = 0.12  # how far the best factor between file and original may be from rounding's own
_ROW = 0.3  # of a row's length, beyond four times its own rounding error
_ALIKE, _UNLIKE = 0.85, 0.5  # correlations
_SAMPLE = 1 << 16  # values that are enough for a correlation
# Names of what runtimes keep in floating point, for files without an original.
_FLOAT_ONLY = re.compile(r"conv1d|A_log|[._](a|d|D)$|dt_bias|norm|router|gate_inp|\.bias$")


@dataclass
class Weights:
    """The weights of a file as the original's parameters, and what was seen on the way."""

    reports: list[TensorReport] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # tensors that the file lacks
    left_out: list[str] = field(default_factory=list)  # tensors that could not be put back into the model
    held: dict[str, torch.Tensor] = field(default_factory=dict)  # parameter → the file's values
    rounded: dict[str, torch.Tensor] = field(default_factory=dict)  # the same in rounding to nearest
    formats: dict[str, str] = field(default_factory=dict)  # component → our name of its type


def examine(parts: Sequence[Part], model: LoadedModel, tensors: Sequence[StoredTensor]) -> Weights:
    """Reads every tensor once, one at a time."""
    state = {name: value.detach() for name, value in model.model.state_dict().items()}
    components = {name: c for c in model.anatomy.components for name in _names(c)}
    found = Weights()
    for part in parts:
        if part.tensor is None:
            found.missing.append(part.name)
            continue
        component = components.get(part.parameter or "")
        if part.parameter is None or part.parameter not in state or component is None:
            found.reports.append(describe(part.tensor))
            continue
        _examine(part, component, state, parts, found)
    known = {part.name for part in parts}
    found.reports += [describe(tensor) for tensor in tensors if tensor.name not in known]
    return found


def _names(component: Component) -> Iterator[str]:
    suffix = component.weight.removeprefix(component.name)
    yield from (component.weight, *(other + suffix for other in component.tied_with))


def describe(tensor: StoredTensor, component: Component | None = None, **seen: Any) -> TensorReport:
    bits = 8 * tensor.bytes / max(math.prod(tensor.shape), 1)
    if component is None:
        only = _FLOAT_ONLY.search(tensor.name) is not None
        return TensorReport(tensor.name, tensor.type, tensor.bytes, bits, float_only=only, **seen)
    return TensorReport(
        tensor.name, tensor.type, tensor.bytes, bits, component.kind, component.name, component.block,
        float_only=not component.quantizable, **seen,
    )  # fmt: skip


def alone(tensor: StoredTensor) -> TensorReport:
    """What can be said of a tensor without an original."""
    count = int((~tensor.read().isfinite()).sum())
    return describe(tensor, problem=f"has {count:,} values that are not finite" if count else "")


def _examine(
    part: Part, component: Component, state: Mapping[str, torch.Tensor], parts: Sequence[Part], found: Weights
) -> None:
    tensor, name = part.tensor, part.parameter
    assert tensor is not None
    assert name is not None
    wanted, values = part.expected(state[name]), tensor.read()
    if values.shape != wanted.shape and values.numel() == wanted.numel() and values.dim() != wanted.dim():
        values = values.reshape(wanted.shape)  # (heads) and (heads, 1) are the same
    if values.shape != wanted.shape:
        sizes = "×".join(map(str, values.shape)), "×".join(map(str, wanted.shape))
        problem = f"has the shape {sizes[0]}, not {sizes[1]}"
        found.left_out.append(tensor.name)
        found.reports.append(describe(tensor, component, problem=problem))
        return
    plain = None if tensor.rounded is None else tensor.rounded(wanted)
    problem, error, own = _compared(values, wanted, plain)
    if problem and values.isfinite().all():
        problem = _recognised(part, values, wanted, state, parts) or problem
    found.reports.append(describe(tensor, component, error=error, own_error=own, problem=problem))
    for put, into in ((values, found.held), (wanted if plain is None else plain, found.rounded)):
        whole = part.written(put, into.get(name, state[name]))
        if whole is not None and whole.isfinite().all():
            if into is found.held and name in into and values.numel() == whole.numel():
                found.left_out.append(
                    tensor.name
                )  # a second tensor for one parameter: the model has one place
            into[name] = whole
        elif into is found.held:
            found.left_out.append(tensor.name)
    if tensor.format and component.quantizable:
        found.formats[component.name] = tensor.format


def _compared(
    values: torch.Tensor, wanted: torch.Tensor, plain: torch.Tensor | None
) -> tuple[str, float | None, float | None]:
    """What is wrong in words (or nothing), the relative error, and that of rounding to nearest."""
    if count := int((~values.isfinite()).sum()):
        return f"has {count:,} values that are not finite", None, None
    length = float(wanted.norm()) or 1.0
    error = float((values - wanted).norm()) / length
    own = None if plain is None else float((plain - wanted).norm()) / length
    slope = float((values * wanted).sum()) / length**2
    usual = 1.0 if plain is None else float((plain * wanted).sum()) / length**2
    if error <= max(_MOST * (own or 0.0), _LEAST) and abs(slope - usual) <= _OTHER_SLOPE:
        return _odd_rows(values, wanted, plain), error, own
    if own is None and error < _UNLIKE and abs(slope - usual) <= _OTHER_SLOPE:  # a type we cannot round to
        return "", error, own
    rest = float((values - slope * wanted).norm()) / length
    if rest <= max(_MOST * (own or 0.0) * max(abs(slope), 0.1), _LEAST) and abs(slope) > 1e-3:
        return f"holds the original's values times {slope / usual:.3g}", error, own
    rounding = "" if own is None else f", where rounding to this type gives {own:.2g}"
    rows = _odd_rows(values, wanted, plain)
    return rows or f"is off by {error:.2g} of its length{rounding}", error, own


def _odd_rows(values: torch.Tensor, wanted: torch.Tensor, plain: torch.Tensor | None) -> str:
    """Rows that are far off in a tensor whose other rows are not."""
    if wanted.dim() < 2 or wanted.shape[-2] < 8:
        return ""
    values, wanted = values.flatten(0, -2), wanted.flatten(0, -2)
    lengths = wanted.norm(dim=-1)
    own = 0 if plain is None else (plain.flatten(0, -2) - wanted).norm(dim=-1)
    matter = lengths > 0.05 * lengths.mean()
    off = ((values - wanted).norm(dim=-1) > 4 * own + _ROW * lengths) & matter
    empty = (values == 0).all(dim=-1) & matter
    odd = torch.nonzero(off | empty).flatten()
    if not len(odd) or len(odd) > 0.9 * len(values):
        return ""
    words = "are zero" if bool(empty[odd].all()) else "are not the original's"
    return f"has {len(odd):,} of {len(values):,} rows that {words} (from row {int(odd[0]):,} on)"


def _recognised(
    part: Part,
    values: torch.Tensor,
    wanted: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    parts: Sequence[Part],
) -> str:
    """Whose values these are, if they are not at their place."""
    if abs(_correlation(values, wanted)) > _UNLIKE or wanted.numel() < 16:
        return ""
    if wanted.dim() == 2 and _correlation(values.reshape(wanted.shape[::-1]).T, wanted) > _ALIKE:
        return "is transposed"
    for other in parts:
        if other.parameter in state and other is not part:
            theirs = other.expected(state[other.parameter])  # type: ignore[index]
            if theirs.shape == values.shape and _correlation(values, theirs) > _ALIKE:
                return f"holds the values of {other.name}"
    if wanted.dim() == 2:
        norms = [each.norm(dim=-1).sort().values for each in (values, wanted)]
        if float(norms[1].std()) > 0.01 * float(norms[1].mean()) and torch.allclose(
            norms[0], norms[1], rtol=0.05
        ):
            return "has the original's rows in another order"
    return ""


def _correlation(one: torch.Tensor, two: torch.Tensor) -> float:
    one, two = (each.flatten()[:_SAMPLE].double() for each in (one, two))
    one, two = one - one.mean(), two - two.mean()
    norm = float(one.norm() * two.norm())
    return float(one @ two) / norm if norm else 0.0
