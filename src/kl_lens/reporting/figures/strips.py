"""Every plan as a strip of colours over the network: one stripe for each component, in the model's order."""

from __future__ import annotations

from collections.abc import Sequence

from kl_lens.recipes import Recipe
from kl_lens.records import Component
from kl_lens.reporting.markup import Html, join, json_block, tag
from kl_lens.reporting.numbers import size
from kl_lens.reporting.palette import format_class
from kl_lens.reporting.plans import PlanView
from kl_lens.reporting.svg import legend

_CODES = "0123456789abcdefghijklmnopqrstuvwxyz"


def strips(plans: Sequence[PlanView], components: Sequence[Component], recommended: frozenset[str]) -> Html:
    """Strips under one ruler of block numbers. The script reads which component lies under the pointer."""
    shown = [c for c in components if c.quantizable]
    formats = sorted(
        {name for plan in plans for name in plan.stored.values()},
        key=lambda n: (-Recipe.parse(n).grid.bits, n),
    )[: len(_CODES)]
    names = [c.name if c.block is None else f"{c.name} (block {c.block})" for c in shown]
    rows = [_ruler(shown)]
    for plan in plans:
        rows.append(_strip(plan, shown, formats, plan.name in recommended))
    return join(
        [
            legend([(name, "square", format_class(name)) for name in formats]),
            tag("div", *rows, class_="strips"),
            json_block("strips", {"components": names, "formats": formats}),
        ]
    )


def _strip(
    plan: PlanView, components: Sequence[Component], formats: Sequence[str], recommended: bool
) -> Html:
    stored = [plan.stored[c.name] for c in components]
    paths = []
    for name in formats:
        stripes = [index for index, spelling in enumerate(stored) if spelling == name]
        if stripes:
            d = "".join(f"M{first} 0h{length}v10h-{length}z" for first, length in _runs(stripes))
            paths.append(tag("path", d=d, class_=f"cell {format_class(name)}"))
    codes = "".join(_CODES[formats.index(name)] if name in formats else "-" for name in stored)
    words = f"{plan.name}: {plan.row.shares_text}"
    svg = tag(
        "svg",
        tag("title", words),
        *paths,
        viewbox=f"0 0 {len(components)} 10",
        preserveAspectRatio="none",
        role="img",
        aria_label=words,
        data_codes=codes,
    )
    label = tag("span", plan.name + (" ★" if recommended else ""), class_="name")
    return tag("div", label, svg, tag("span", size(plan.bytes), class_="size"), class_="strip")


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring stripes of one colour as (first, length)."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and sum(runs[-1]) == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return runs


def _ruler(components: Sequence[Component]) -> Html:
    """Block numbers where blocks begin; in a deep network only some of them."""
    starts: dict[int, int] = {}
    for index, component in enumerate(components):
        if component.block is not None:
            starts.setdefault(component.block, index)
    every = 1 if len(starts) <= 12 else 4 if len(starts) <= 40 else 8
    marks = [
        tag("span", block, style=f"left:{100 * index / len(components):.2f}%")
        for block, index in starts.items()
        if block % every == 0
    ]
    return tag(
        "div", tag("span", "block", class_="name"), tag("div", *marks, class_="ruler"), class_="strip head"
    )
