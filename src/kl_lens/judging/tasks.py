"""Tasks: where their examples are, accuracy, its paired drop against the original, and whether that is within a limit.
`language_model.py` runs them in lm-eval.

Local files are named `arc_easy_test.jsonl` or `hellaswag_validation_2000.jsonl`: the task, then the split.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kl_lens.base.errors import KLLensError, TextError
from kl_lens.run.readings import mean, paired_drop, perplexity
from kl_lens.run.records import Estimate, Record

INTERVAL = 1.96  # half the width of a 95 % interval in standard errors
NEAR_CHANCE = 2.0  # standard errors
PASS = "pass"
FAIL = "fail"
UNDECIDED = "not decided"
_FILE = re.compile(r"(?P<task>.+?)_(?P<split>train|validation|test)(?![a-zA-Z]).*\.jsonl")


@dataclass(frozen=True)
class TaskData:
    """A task, and where its examples are."""

    name: str
    files: dict[str, Path] = field(
        default_factory=dict
    )  # split → file; none: the data comes from the hub

    @property
    def source(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=12)
        for split, path in sorted(self.files.items()):
            digest.update(split.encode() + path.read_bytes())
        names = [path.name for path in self.files.values()]
        return {
            "data": names or "hub",
            "fingerprint": digest.hexdigest() if names else None,
        }


def chosen_tasks(folder: Path | None, names: Sequence[str]) -> list[TaskData]:
    """The tasks with these names: from the hub, or from a folder."""
    if folder is None:
        return [TaskData(name) for name in names]
    if not folder.is_dir():
        raise TextError(f"--task-data {folder}: no such folder")
    present: dict[str, TaskData] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if match := _FILE.fullmatch(path.name):
            present.setdefault(match["task"], TaskData(match["task"])).files.setdefault(
                match["split"], path
            )
    if missing := [name for name in names if name not in present]:
        raise TextError(
            f"--task-data {folder} has no {missing[0]}_test.jsonl or {missing[0]}_validation.jsonl; "
            f"it has {', '.join(present) or 'no tasks'}"
        )
    return [present[name] for name in names]


# -- results -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskExamples(Record):
    """One subject's results on every example of one task."""

    task: str
    metrics: dict[
        str, Sequence[float]
    ]  # metric → value on each example, in the task's order
    higher_is_better: dict[str, bool]
    chance: float | None  # accuracy of guessing; None without choices
    version: str  # lm-eval's version of the task
    few_shot: int


def task_values(
    examples: TaskExamples, original: TaskExamples | None = None
) -> dict[str, Estimate]:
    """Each metric with its standard error over examples; with the original also `…_drop`, paired by example.

    A positive drop is a loss. lm-eval's `perplexity` (of LAMBADA's last words) is exp of a mean; the others are means.
    """
    values = {}
    for name, numbers in examples.metrics.items():
        per_example = np.asarray(numbers, float)
        if name == "perplexity":
            values["last_word_perplexity"] = perplexity(
                -per_example, np.ones(len(per_example))
            )
            continue
        values[name] = mean(per_example)
        if original is not None and len(original.metrics.get(name, ())) == len(
            per_example
        ):
            sign = 1 if examples.higher_is_better.get(name, True) else -1
            before = np.asarray(original.metrics[name], float)
            values[f"{name}_drop"] = paired_drop(*(before, per_example)[::sign])
    return values


def judge(drop: Estimate, limit: float) -> str:
    """`pass` or `fail` if the whole 95 % interval of the drop is on one side of the limit, else `not decided`.

    Both are accuracies, so a limit of 0.03 is three percentage points.
    """
    error = INTERVAL * drop.standard_error
    if drop.value + error <= limit:
        return PASS
    return FAIL if drop.value - error > limit else UNDECIDED


def near_chance(accuracy: Estimate, chance: float | None) -> bool:
    """Whether this accuracy is within two standard errors of guessing; a drop from it says little."""
    return (
        chance is not None
        and abs(accuracy.value - chance) <= NEAR_CHANCE * accuracy.standard_error
    )


def require_lm_eval() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise KLLensError(
            "--tasks needs more packages: pip install 'kl-lens[eval]'"
        ) from error
