"""What `run --estimate` and `measure --estimate` print."""

from __future__ import annotations

from kl_lens.base.units import human_bytes
from kl_lens.cli.console import console, new_table
from kl_lens.cli.progress import TITLES, clock_time
from kl_lens.reporting.names import runtime_title
from kl_lens.study.costs import JobEstimate

BUSY = 1.3  # times slower than idle: worth saying


def in_all(estimate: JobEstimate) -> str:
    idle = estimate.seconds / estimate.load
    busy = f"; {clock_time(idle)} on an idle machine" if estimate.load > BUSY else ""
    return f"About {clock_time(estimate.seconds)} in all{busy}."


def show_estimate(result: JobEstimate) -> None:
    table = new_table(f"Estimate for {result.windows} calibration windows", ("stage",), ("time", "disk"))
    for stage in result.stages:
        title = TITLES[stage.verb] + (f", {runtime_title(stage.target)}" if stage.target else "")
        table.add_row(title, clock_time(stage.seconds), human_bytes(stage.disk) if stage.disk else "")
    table.add_section()
    table.add_row("in all", clock_time(result.seconds), human_bytes(result.disk), style="bold")
    out = console()
    out.print(table)
    out.print(f"{in_all(result)} Memory: about {human_bytes(result.memory)}. Nothing was measured.")
