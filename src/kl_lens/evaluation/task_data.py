"""Tasks from local files: `arc_easy_test.jsonl`, `hellaswag_validation_2000.jsonl`, …

A file's name begins with the task, then the split. Its rows may have the fields of lm-eval's own data set, or one of
the plain layouts below. For a task that lm-eval knows, its own prompts, choices and metrics are used, with only the
data set replaced. Other names work with the plain layouts.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kl_lens.base.errors import TextError
from kl_lens.base.files import write_text

_FILE = re.compile(r"(?P<task>.+?)_(?P<split>train|validation|test)(?![a-zA-Z]).*\.jsonl")
_ACCURACY = [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")]
_OWN_QUERY = {"process_docs": None, "should_decontaminate": False, "doc_to_decontamination_query": None}
# Fields of a row → settings for lm-eval.
_LAYOUTS: tuple[tuple[frozenset[str], dict[str, Any]], ...] = (
    (
        frozenset({"query", "choices", "gold"}),
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{query}}\nAnswer:",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
            "metric_list": _ACCURACY,
            **_OWN_QUERY,
        },
    ),
    (
        frozenset({"context", "continuation"}),
        {
            "output_type": "loglikelihood",
            "doc_to_text": "{{context}}",
            "doc_to_target": "{{' ' + continuation}}",
            "metric_list": [
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
                _ACCURACY[0],
            ],
            **_OWN_QUERY,
        },
    ),
)


@dataclass(frozen=True)
class LocalTask:
    """The files of one task."""

    name: str
    files: dict[str, Path]  # split → file

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=12)
        for split, path in sorted(self.files.items()):
            digest.update(split.encode() + path.read_bytes())
        return digest.hexdigest()


def find_tasks(folder: Path) -> dict[str, LocalTask]:
    """The tasks with files in a folder."""
    if not folder.is_dir():
        raise TextError(f"--task-data {folder}: no such folder")
    splits: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        match = _FILE.fullmatch(path.name)
        if match:
            splits.setdefault(match["task"], {}).setdefault(match["split"], path)
    return {name: LocalTask(name, files) for name, files in splits.items()}


def chosen_tasks(folder: Path, names: list[str]) -> list[LocalTask]:
    """The tasks with these names; the error for a missing one lists the others."""
    present = find_tasks(folder)
    missing = [name for name in names if name not in present]
    if missing:
        raise TextError(
            f"--task-data {folder} has no {missing[0]}_test.jsonl or {missing[0]}_validation.jsonl; "
            f"it has {', '.join(present) or 'no tasks'}"
        )
    return [present[name] for name in names]


def write_config(task: LocalTask, known: Path | None, scratch: Path) -> Path:
    """Writes an lm-eval task file that reads the local files.

    Args:
        task: the files.
        known: lm-eval's own task file of that name, if any.
        scratch: folder to write to, also used by `datasets` as cache.
    """
    splits = [split for split in ("test", "validation") if split in task.files]
    if not splits:
        raise TextError(
            f"{next(iter(task.files.values()))}: only a training split; add a _test or _validation file"
        )
    row = _first_row(task.files[splits[0]])
    layout = next((settings for fields, settings in _LAYOUTS if fields <= set(row)), None)
    if layout is None and known is None:
        raise TextError(
            f"{task.files[splits[0]]}: lm-eval has no task {task.name!r}, so rows need the fields "
            + " or ".join("+".join(sorted(fields)) for fields, _ in _LAYOUTS)
            + f"; they have {', '.join(row)}"
        )
    config: dict[str, Any] = {} if known is None else {"include": str(known)}
    config |= {
        "task": task.name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: str(path.resolve()) for split, path in task.files.items()},
            "cache_dir": str(scratch / "datasets"),
        },
        # Few-shot examples come from the training file or, without one, from the others.
        "training_split": "train" if "train" in task.files else None,
        "validation_split": "validation" if "validation" in task.files else None,
        "test_split": "test" if "test" in task.files else None,
        "fewshot_split": "train" if "train" in task.files else None,
        **(layout or {}),
    }
    path = scratch / f"{task.name}.yaml"
    write_text(path, yaml.safe_dump(config, sort_keys=False))
    return path


def _first_row(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            row = json.loads(next((line for line in file if line.strip()), "null"))
    except (ValueError, OSError) as error:
        raise TextError(f"{path}: its first line is not a JSON object ({error})") from None
    if not isinstance(row, dict):
        raise TextError(f"{path}: empty, or its first line is not a JSON object")
    return row
