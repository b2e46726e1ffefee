"""What `run --estimate` and `measure --estimate` print."""

from __future__ import annotations

from kl_lens.cli.console import console, new_table
from kl_lens.cli.progress import TITLES, clock_time
from kl_lens.pipeline.estimating import JobEstimate
from kl_lens.reporting.names import runtime_title
from kl_lens.units import human_bytes


def show_estimate(result: JobEstimate) -> None:
    table = new_table(f"Estimate for {result.windows} calibration windows", ("stage",), ("time", "disk"))
    for stage in result.stages:
        title = TITLES[stage.verb] + (f", {runtime_title(stage.target)}" if stage.target else "")
        table.add_row(title, clock_time(stage.seconds), human_bytes(stage.disk) if stage.disk else "")
    table.add_section()
    table.add_row("in all", clock_time(result.seconds), human_bytes(result.disk), style="bold")
    out = console()
    out.print(table)
    out.print(
        f"Memory: about {human_bytes(result.memory)}. On this machine, as busy as it is now; nothing was measured."
    )
