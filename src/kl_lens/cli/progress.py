"""Progress of long work: a bar with time left in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    Progress as Bar,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kl_lens.cli.console import console
from kl_lens.sensitivity.sweep import Progress

# Seconds between two plain lines.
LINE_INTERVAL = 10.0


@contextmanager
def sweep_progress(title: str, interval: float = LINE_INTERVAL) -> Iterator[Progress]:
    """A `Progress` that shows itself; candidates are weighted by their cost, so the time left is honest."""
    if sys.stderr.isatty():
        with _bar(title) as progress:
            yield progress
    else:
        yield _lines(title, interval)


@contextmanager
def _bar(title: str) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}", style="dim"),
    )
    with Bar(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, what="")

        def started(total: float, done: float) -> None:
            # What an earlier run did is shown, but is no sample of today's speed.
            bar.reset(task, total=total, completed=int(done), what="")

        yield Progress(
            started=started,
            advanced=lambda work, what: bar.update(task, advance=work, what=what),
            message=lambda text: bar.update(task, what=text),
        )


def _lines(title: str, interval: float) -> Progress:
    state = {"total": 0.0, "done": 0.0, "at_start": 0.0, "begin": 0.0, "printed": 0.0}

    def say(text: str) -> None:
        print(f"{title}: {text}", file=sys.stderr, flush=True)

    def started(total: float, done: float) -> None:
        now = time.monotonic()
        state.update(total=total, done=done, at_start=done, begin=now, printed=now)
        if done and interval <= LINE_INTERVAL:
            say(f"{done / total:.0%} done already")

    def advanced(work: float, what: str) -> None:
        state["done"] += work
        now = time.monotonic()
        # Short work that ends needs no line of its own where lines are few.
        if now - state["printed"] < interval and (state["done"] < state["total"] or interval > LINE_INTERVAL):
            return
        state["printed"] = now
        speed = (state["done"] - state["at_start"]) / max(now - state["begin"], 1e-9)
        left = max(0.0, state["total"] - state["done"]) / max(speed, 1e-9)
        say(f"{state['done'] / state['total']:.0%}, about {left:.0f} s left ({what})")

    return Progress(
        started=started, advanced=advanced, message=say if interval <= LINE_INTERVAL else lambda text: None
    )
