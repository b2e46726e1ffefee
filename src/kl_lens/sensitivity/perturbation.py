"""A perturbation: some components with the weights that a format would leave of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kl_lens.checkpoints import Anatomy, LoadedModel
from kl_lens.errors import FormatError, RunError
from kl_lens.formats import get_format
from kl_lens.records import Component


@dataclass(frozen=True)
class Perturbation:
    """Component name → format name, for one candidate of the sweep or for a whole plan."""

    formats: Mapping[str, str]

    @classmethod
    def single(cls, component: str, format_name: str) -> Perturbation:
        return cls({component: format_name})


@dataclass(frozen=True)
class Candidate:
    """One component in one format: what the sweep measures."""

    component: Component
    format: str

    @property
    def perturbation(self) -> Perturbation:
        return Perturbation.single(self.component.name, self.format)

    def __str__(self) -> str:
        return f"{self.component.name} {self.format}"


def find_candidates(
    anatomy: Anatomy, formats: Sequence[str], pattern: str | None = None
) -> tuple[list[Candidate], list[tuple[Component, str, str]]]:
    """Every quantizable component × format, in the order of the network, and what does not fit, with the reason.

    A pattern that matches nothing, or an unknown format, is an error.
    """
    try:
        expression = re.compile(pattern or "")
    except re.error as error:
        raise RunError(f"--components {pattern!r} is no regular expression: {error}") from error
    matching = [c for c in anatomy.candidates if any(expression.search(n) for n in (c.name, *c.tied_with))]
    if not matching:
        raise RunError(
            f"--components {pattern!r} matches none of the {len(anatomy.candidates)} quantizable components; "
            "`kl-lens inspect --components` lists their names"
        )
    fitting: list[Candidate] = []
    unfit: list[tuple[Component, str, str]] = []
    for component in matching:
        for name in formats:
            reason = get_format(name).fits(component.shape)
            if reason is None:
                fitting.append(Candidate(component, get_format(name).name))
            else:
                unfit.append((component, name, reason))
    if not fitting:
        component, name, reason = unfit[0]
        raise FormatError(f"no component can be held in {', '.join(formats)}: {component.name}: {reason}")
    return fitting, unfit


Replacement = tuple[torch.nn.Parameter, torch.Tensor]


def replacements(model: LoadedModel, perturbation: Perturbation) -> list[Replacement]:
    """The weights that the perturbation's formats leave, each with the parameter whose place it takes."""
    found: list[Replacement] = []
    for name, format_name in perturbation.formats.items():
        component = model.anatomy.component(name)
        if not component.quantizable:
            raise FormatError(f"{name} is not to be quantized: {component.reason}")
        parameters = _parameters(model, component)
        weight = get_format(format_name).roundtrip(parameters[0].data, name).to(parameters[0].dtype)
        found += [(parameter, weight) for parameter in parameters]
    return found


@contextmanager
def swapped(weights: Sequence[Replacement]) -> Iterator[None]:
    """Within the block the parameters hold these weights; the originals come back whatever happens inside."""
    originals = [parameter.data for parameter, _ in weights]
    try:
        for parameter, weight in weights:
            parameter.data = weight
        yield
    finally:
        for (parameter, _), original in zip(weights, originals, strict=True):
            parameter.data = original


def _parameters(model: LoadedModel, component: Component) -> list[torch.nn.Parameter]:
    """Every parameter object that holds this weight: one, unless a library ties by storage and not by object."""
    suffix = component.weight.removeprefix(component.name)
    names = [component.weight, *(other + suffix for other in component.tied_with)]
    unique = {id(p): p for p in (model.model.get_parameter(name) for name in names)}
    return list(unique.values())


def first_block(anatomy: Anatomy, perturbation: Perturbation) -> int:
    """Where a perturbed forward parts from the teacher's: -1 before the blocks, the number of blocks at the head."""
    starts = [anatomy.blocks]  # nothing perturbed: nothing but the head to run
    for name in perturbation.formats:
        component = anatomy.component(name)
        if component.block is not None:
            starts.append(component.block)
        elif component.name == anatomy.head != anatomy.embedding:
            starts.append(anatomy.blocks)
        else:
            starts.append(-1)
    return min(starts)
