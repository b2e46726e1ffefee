"""The tools by name.

To add a tool, write one module with a function `write(model, plan, folder, statistics)` and one line here. A tool gets
the format of every component. How values are rounded is its own affair; only llama.cpp takes our statistics too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kl_lens.base.files import replacing
from kl_lens.measuring.statistics import StoredStatistics
from kl_lens.model import LoadedModel
from kl_lens.planning.handover.base import Handover
from kl_lens.run.records import Plan

# Name → module, in the order in which they are listed for users.
TOOLS = {
    "llama.cpp": "kl_lens.planning.handover.llama_cpp",
    "nncf": "kl_lens.planning.handover.nncf",
    "auto-round": "kl_lens.planning.handover.auto_round",
    "modelopt": "kl_lens.planning.handover.modelopt",
    "mlx-lm": "kl_lens.planning.handover.mlx_lm",
}


def write_recipe(
    tool: str, model: LoadedModel, plan: Plan, folder: Path, statistics: StoredStatistics | None = None
) -> Handover:
    """Writes a plan for a tool. Raises PlanError, which names the component, if the tool has no words for it.

    `statistics`: of the run, for tools that weigh columns by importance.
    """
    write: Callable[..., Handover] = importlib.import_module(TOOLS[tool]).write
    with replacing(folder) as place:
        made = write(model, plan, place, statistics)
        names = sorted(path.name for path in place.iterdir())
    files = tuple(folder / name for name in names)
    return replace(made, use=made.use.replace("FOLDER", str(folder)), files=files)
