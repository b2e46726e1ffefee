"""The stages as Python functions, in their order: measure, plan, export."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kl_lens import planning, targets
from kl_lens.checkpoints import LoadedModel
from kl_lens.records import Artifact, Plan, SensitivityTable
from kl_lens.runs import Run
from kl_lens.sensitivity.engines import DEFAULT_MEMORY, FastEngine
from kl_lens.sensitivity.perturbation import find_candidates
from kl_lens.sensitivity.sweep import Progress, Sweep
from kl_lens.text import draw_windows
from kl_lens.text.documents import TextSource
from kl_lens.units import parse_bytes


def measure(
    model: LoadedModel,
    text: TextSource | str = "wikitext2:train",
    formats: Sequence[str] = ("int4", "int8"),
    *,
    windows: int = 64,
    window_length: int = 512,
    seed: int = 42,
    components: str | None = None,
    run: Path | str | None = None,
    engine: str = FastEngine.name,
    memory_budget: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> SensitivityTable:
    """How much each component suffers from each format.

    Args:
        model: from `kl_lens.load`.
        text: a name (`wikitext2:train`), a file, or a source from `kl_lens.text`.
        formats: names from `kl_lens.formats.known_formats()`.
        windows: how many windows of `window_length` tokens are drawn, with `seed`.
        components: regular expression; only components whose name matches.
        run: a run folder to keep the measurements in, and to go on from; a temporary one when not given.
        engine: `fast`, or `plain`, the reference.

    Example:
        >>> table = measure(load("reference:mamba"), formats=["int4", "int8"], windows=8)
    """
    candidates, _ = find_candidates(model.anatomy, formats, components)
    drawn = draw_windows(text, model.require_tokenizer(), windows=windows, length=window_length, seed=seed)
    with tempfile.TemporaryDirectory() as temporary, Run.create(Path(run or temporary)) as journal:
        Sweep(model, journal, engine, memory_budget, progress or Progress()).measure(candidates, drawn)
        return journal.table()


def plan(
    table: SensitivityTable, *, max_bytes: int | str | None = None, name: str | None = None, **limits: Any
) -> Plan:
    """The best plan within a budget, proven optimal; see `kl_lens.planning.plan_for_budget` for all limits.

    Example:
        >>> plan(table, max_bytes="4MB").assignment
    """
    size = parse_bytes(max_bytes) if isinstance(max_bytes, str) else max_bytes
    return planning.plan_for_budget(table, max_bytes=size, name=name, **limits).plan


def export(model: LoadedModel, plan: Plan, target: str, folder: Path | str, **options: Any) -> Artifact:
    """Writes a plan as files of a target (`openvino`, `gguf`).

    Example:
        >>> export(model, plan, "openvino", "out/mamba-4mb")
    """
    return targets.export(model, plan, target, Path(folder), **options)
