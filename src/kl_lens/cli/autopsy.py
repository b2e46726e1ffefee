"""`kl-lens autopsy`: the verdict, the chain of measurements, and what is in the file."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from kl_lens.base.units import human_bytes
from kl_lens.cli.console import console, new_table
from kl_lens.evaluation.autopsy import Autopsy, TensorReport
from kl_lens.reporting.numbers import number, with_error
from kl_lens.study.autopsy import AutopsyResult

_MOST_RESTORED = 8


def as_json(result: AutopsyResult) -> dict[str, Any]:
    return result.autopsy.to_json() | {"faults": len(result.autopsy.faults), "notes": result.notes}


def show(result: AutopsyResult) -> None:
    found, out = result.autopsy, console()
    out.print(_contents(found))
    if found.steps:
        out.print(_chain(found))
        out.print(
            "± is one standard error over windows. “apart”: KL from the step named there, where equal is right."
        )
    if found.restored:
        out.print(_restored(found))
    for finding in found.findings:
        label = "[bold red]Wrong[/]" if finding.is_fault else "Note"
        cost = "" if finding.kl is None else f" ({number(finding.kl)} nats)"
        advice = f" What to do: {escape(finding.advice)}." if finding.advice else ""
        out.print(f"{label} ({finding.step}): {escape(finding.words)}{cost}.{advice}", soft_wrap=True)
    if found.planned_kl is not None:
        size = human_bytes(found.planned_bytes or found.bytes)
        out.print(
            f"Our plan from this run: KL {with_error(found.planned_kl)} at {size} (in PyTorch, same text)."
        )
    for note in result.notes:
        out.print(note, markup=False, soft_wrap=True)
    out.print(f"[bold]{escape(found.headline)}[/]", soft_wrap=True)


def _contents(found: Autopsy) -> Table:
    """Tensors by kind and type."""
    groups: dict[tuple[str, str], list[TensorReport]] = defaultdict(list)
    for tensor in found.tensors:
        groups[tensor.kind or "–", tensor.type].append(tensor)
    numbers = ("tensors", "size", "weight error", "rounding alone")
    table = new_table(f"{found.file}, {human_bytes(found.bytes)}", ("kind", "type"), numbers)
    for (kind, stored), tensors in groups.items():
        errors = [max((e for e in each if e is not None), default=None) for each in (
            [t.error for t in tensors], [t.own_error for t in tensors])]  # fmt: skip
        shown = [number(error) if error is not None else "–" for error in errors]
        table.add_row(kind, stored, str(len(tensors)), human_bytes(sum(t.bytes for t in tensors)), *shown)
    return table


def _chain(found: Autopsy) -> Table:
    title = (
        f"KL from {found.original} on {found.text}, nats per token" if found.original else "The file alone"
    )
    table = new_table(title, ("", "step"), ("KL", "apart"), ("",))
    for step in found.steps:
        kl = "" if step.kl is None else with_error(step.kl)
        apart = "" if step.apart is None else f"{with_error(step.apart)} ({step.beside})"
        table.add_row(step.letter, step.title, kl, apart, escape(step.failure or step.note))
    return table


def _restored(found: Autopsy) -> Table:
    table = new_table("What exact weights would gain", ("part", "type"), ("KL", "share"))
    for each in found.restored[:_MOST_RESTORED]:
        table.add_row(each.what, each.type, number(each.kl), f"{each.share:.0%}")
    return table
