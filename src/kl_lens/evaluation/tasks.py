"""Tasks with lm-eval: accuracy, its paired drop against the original, and whether that is within a limit."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kl_lens.base.errors import KLLensError, TextError, one_line
from kl_lens.evaluation import statistics
from kl_lens.evaluation.task_data import LocalTask, write_config
from kl_lens.run.records import Estimate, Record

# Half the width of a 95 % interval in standard errors.
INTERVAL = 1.96
NEAR_CHANCE = 2.0  # standard errors
PASS, FAIL, UNDECIDED = "pass", "fail", "not decided"


@dataclass(frozen=True)
class TaskExamples(Record):
    """One subject's results on every example of one task."""

    task: str
    metrics: dict[str, Sequence[float]]  # metric → value on each example, in the task's order
    higher_is_better: dict[str, bool]
    chance: float | None  # accuracy of guessing; None without choices
    version: str  # lm-eval's version of the task
    few_shot: int


def task_values(examples: TaskExamples, original: TaskExamples | None = None) -> dict[str, Estimate]:
    """Each metric with its standard error over examples; with the original also `…_drop`, paired by example.

    A positive drop is a loss. lm-eval's `perplexity` (of LAMBADA's last words) is exp of a mean; the others are means.
    """
    values = {}
    for name, numbers in examples.metrics.items():
        per_example = np.asarray(numbers, float)
        if name == "perplexity":
            values["last_word_perplexity"] = statistics.perplexity(-per_example, np.ones(len(per_example)))
            continue
        values[name] = statistics.mean(per_example)
        if original is not None and len(original.metrics.get(name, ())) == len(per_example):
            pair = (np.asarray(original.metrics[name], float), per_example)
            if not examples.higher_is_better.get(name, True):
                pair = (per_example, pair[0])
            values[f"{name}_drop"] = statistics.paired_drop(*pair)
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
    if chance is None:
        return False
    return abs(accuracy.value - chance) <= NEAR_CHANCE * accuracy.standard_error


def run_task(
    language_model: Any,
    task: LocalTask | str,
    *,
    limit: int | None = None,
    few_shot: int | None = None,
    requests: Callable[[int], None] = lambda count: None,
) -> list[TaskExamples]:
    """Runs one task, or all tasks of a group such as `lambada`.

    Args:
        language_model: a `SessionLM`, or any other lm-eval model.
        task: local files, or the name of an lm-eval task, whose data then comes from the hub.
        limit: only the first examples.
        few_shot: examples in the prompt (default: the task's own number).
        requests: called with the number of requests before the first is answered.
    """
    require_lm_eval()
    from lm_eval import evaluate

    with _quiet(), tempfile.TemporaryDirectory() as scratch:
        loaded = _load(task, Path(scratch))
        for one in loaded["tasks"].values():
            _few_shot(one, few_shot)
        requests(sum(_request_count(one, limit) for one in loaded["tasks"].values()))
        results: Any = evaluate(
            lm=language_model, task_dict=loaded, limit=limit, log_samples=True, bootstrap_iters=0
        )
        return [_examples(name, one, results) for name, one in loaded["tasks"].items()]


def _load(task: LocalTask | str, scratch: Path) -> Any:
    try:
        if isinstance(task, LocalTask):
            return _manager(index=False).load([str(write_config(task, _own_file(task.name), scratch))])
        if task not in _manager().all_tasks:
            raise TextError(f"--tasks {task}: lm-eval has no such task; `lm-eval ls tasks` lists them")
        return _manager().load([task])
    except KLLensError:
        raise
    except Exception as error:  # datasets and the hub raise all kinds of errors: no connection, gated, moved
        if isinstance(task, LocalTask):
            raise TextError(f"task {task.name}: its files cannot be read: {one_line(error)}") from error
        raise TextError(
            f"task {task}: its data could not be downloaded from the hub ({one_line(error)}); "
            f"go online, or give local files with --task-data DIR ({task}_test.jsonl)"
        ) from error


@functools.cache
def _manager(*, index: bool = True) -> Any:
    """lm-eval's task manager; building the index of all tasks takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=index)


def _own_file(name: str) -> Path | None:
    """lm-eval's own file of a task: by file name, as for nearly all, or from the index."""
    import lm_eval.tasks

    for path in Path(lm_eval.tasks.__file__).parent.rglob(f"{name}.yaml"):
        if f"task: {name}" in path.read_text(encoding="utf-8").splitlines():
            return path
    entry = _manager().task_index.get(name)
    return None if entry is None else entry.yaml_path


def require_lm_eval() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise KLLensError("--tasks needs more packages: pip install 'kl-lens[eval]'") from error


def _few_shot(task: Any, few_shot: int | None) -> None:
    """lm-eval's own rule: a task fixed at zero keeps it; others take `few_shot`, default zero."""
    own = task.get_config("num_fewshot")
    if few_shot is not None and own != 0:
        task.set_config(key="num_fewshot", value=few_shot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=1234)


def _request_count(task: Any, limit: int | None) -> int:
    documents = len(task.eval_docs) if limit is None else min(limit, len(task.eval_docs))
    if task.OUTPUT_TYPE != "multiple_choice" or not documents:
        return documents
    return sum(len(task.doc_to_choice(task.eval_docs[index])) for index in range(documents))


def _examples(name: str, task: Any, results: Any) -> TaskExamples:
    samples = results["samples"][name]
    metrics: dict[str, list[tuple[int, float]]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            value = sample[metric]
            if isinstance(value, bool | int | float):
                label = metric if sample["filter"] == "none" else f"{metric}@{sample['filter']}"
                metrics.setdefault(label, []).append((int(sample["doc_id"]), float(value)))
    if not metrics:
        raise KLLensError(f"task {name} has no numeric metric per example, so it cannot be compared")
    better = results.get("higher_is_better", {}).get(name, {})
    return TaskExamples(
        task=name,
        metrics={label: tuple(value for _, value in sorted(pairs)) for label, pairs in metrics.items()},
        higher_is_better={label: bool(better.get(label.split("@")[0], True)) for label in metrics},
        chance=_chance(task, samples),
        version=str(results.get("versions", {}).get(name, "")),
        few_shot=int(task.get_config("num_fewshot") or 0),
    )


def _chance(task: Any, samples: Sequence[Any]) -> float | None:
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    return float(np.mean([1 / len(task.doc_to_choice(sample["doc"])) for sample in samples]))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences lm-eval and datasets: we show our own progress."""
    import datasets
    from lm_eval.api import task as module

    datasets.disable_progress_bars()
    bars, module.tqdm = module.tqdm, functools.partial(module.tqdm, disable=True)
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        module.tqdm = bars
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def protocol_of(task: LocalTask | str, limit: int | None, few_shot: int | None) -> dict[str, Any]:
    """The settings that define a task's result: files, limit, few-shot."""
    if isinstance(task, LocalTask):
        source: dict[str, Any] = {
            "data": [path.name for path in task.files.values()],
            "fingerprint": task.fingerprint,
        }
        name = task.name
    else:
        source, name = {"data": "hub", "fingerprint": None}, task
    return {"task": name, **source, "limit": limit, "few_shot": few_shot}
