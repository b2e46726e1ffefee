"""`kl-lens autopsy`: the verdict, the chain of measurements, and what is in the file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rich.markup import escape
from rich.table import Table

from kl_lens.base.units import human_bytes
from kl_lens.cli.console import console, table
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
    rows = [
        {
            "kind": kind,
            "type": stored,
            "tensors": str(len(tensors)),
            "size": human_bytes(sum(t.bytes for t in tensors)),
            "weight error": _largest(t.error for t in tensors),
            "rounding alone": _largest(t.own_error for t in tensors),
        }
        for (kind, stored), tensors in groups.items()
    ]
    return table(f"{found.file}, {human_bytes(found.bytes)}", rows)


def _largest(errors: Iterable[float | None]) -> str:
    return number(max((e for e in errors if e is not None), default=None))


def _chain(found: Autopsy) -> Table:
    title = (
        f"KL from {found.original} on {found.text}, nats per token" if found.original else "The file alone"
    )
    rows = [
        {
            "": step.letter,
            "step": step.title,
            "KL": "" if step.kl is None else with_error(step.kl),
            "apart": "" if step.apart is None else f"{with_error(step.apart)} ({step.beside})",
            "note": escape(step.failure or step.note),
        }
        for step in found.steps
    ]
    return table(title, rows)


def _restored(found: Autopsy) -> Table:
    rows = [
        {"part": each.what, "type": each.type, "KL": number(each.kl), "share": f"{each.share:.0%}"}
        for each in found.restored[:_MOST_RESTORED]
    ]
    return table("What exact weights would gain", rows)
