"""Tasks with lm-eval: accuracy, its paired drop against the original, and whether that is within a limit.

Local files are named `arc_easy_test.jsonl` or `hellaswag_validation_2000.jsonl`: the task, then the split. Their rows
have the fields of lm-eval's own data set, or one of the plain layouts below. lm-eval's prompts, choices and metrics are
used for a task that it knows, with only the data set replaced; others need a plain layout.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kl_lens.base.errors import KLLensError, TextError, one_line
from kl_lens.base.files import write_text
from kl_lens.evaluation import statistics
from kl_lens.evaluation.evaluator import Outcome
from kl_lens.evaluation.journal import ANSWERS, EXAMPLES, RUNTIME, ScoreJournal
from kl_lens.evaluation.judged import RUNTIME_ERRORS, Judged, JudgedModel
from kl_lens.evaluation.texts import protocol_digest
from kl_lens.measuring.sweep import Progress
from kl_lens.run.records import ORIGINAL, Estimate, Record, Score

INTERVAL = 1.96  # half the width of a 95 % interval in standard errors
NEAR_CHANCE = 2.0  # standard errors
PASS, FAIL, UNDECIDED = "pass", "fail", "not decided"
_FILE = re.compile(r"(?P<task>.+?)_(?P<split>train|validation|test)(?![a-zA-Z]).*\.jsonl")
_MEAN = {"aggregation": "mean", "higher_is_better": True}
_PERPLEXITY = {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
# Fields of a row → settings for lm-eval.
_LAYOUTS: dict[tuple[str, ...], dict[str, Any]] = {
    ("choices", "gold", "query"): {
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc", **_MEAN}, {"metric": "acc_norm", **_MEAN}],
    },
    ("context", "continuation"): {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{' ' + continuation}}",
        "metric_list": [_PERPLEXITY, {"metric": "acc", **_MEAN}],
    },
}
_OWN_QUERY = {"process_docs": None, "should_decontaminate": False, "doc_to_decontamination_query": None}


@dataclass(frozen=True)
class TaskData:
    """A task, and where its examples are."""

    name: str
    files: dict[str, Path] = field(default_factory=dict)  # split → file; none: the data comes from the hub

    @property
    def source(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=12)
        for split, path in sorted(self.files.items()):
            digest.update(split.encode() + path.read_bytes())
        names = [path.name for path in self.files.values()]
        return {"data": names or "hub", "fingerprint": digest.hexdigest() if names else None}


def chosen_tasks(folder: Path | None, names: Sequence[str]) -> list[TaskData]:
    """The tasks with these names: from the hub, or from a folder."""
    if folder is None:
        return [TaskData(name) for name in names]
    if not folder.is_dir():
        raise TextError(f"--task-data {folder}: no such folder")
    present: dict[str, TaskData] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if match := _FILE.fullmatch(path.name):
            present.setdefault(match["task"], TaskData(match["task"])).files.setdefault(match["split"], path)
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
            sign = 1 if examples.higher_is_better.get(name, True) else -1
            before = np.asarray(original.metrics[name], float)
            values[f"{name}_drop"] = statistics.paired_drop(*(before, per_example)[::sign])
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
    return chance is not None and abs(accuracy.value - chance) <= NEAR_CHANCE * accuracy.standard_error


def judge_task(
    journal: ScoreJournal,
    subjects: Sequence[Judged],
    task: TaskData,
    tokenizer: Any,
    *,
    max_length: int = 2048,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Scores of all subjects on one task, stored in the journal; the original, if included, goes first.

    Args:
        journal: also stores answers, a few at a time, so that an interrupted task can resume.
        max_length: tokens of context and continuation together.
        limit: only the first examples of each task.
    """
    require_lm_eval()
    from kl_lens.evaluation.language_model import SessionLM

    progress = progress or Progress()
    protocol = {"task": task.name, **task.source, "limit": limit, "max_length": max_length}
    outcome, original = Outcome(), dict[str, TaskExamples]()
    order = sorted(subjects, key=lambda judged: judged.subject.what != ORIGINAL)
    for position, judged in enumerate(order):

        def examples(position: int = position, judged: Judged = judged) -> list[dict[str, Any]]:
            judged.check()
            with contextlib.closing(judged.open()) as session:
                journal.store(RUNTIME, judged, "", session.description)
                model = SessionLM(
                    session,
                    tokenizer,
                    max_length=max_length,
                    kept=lambda key, answer: journal.kept(ANSWERS, judged, key, answer),
                    begun=lambda count: progress.started(float(count * len(order)), float(count * position)),
                    advanced=lambda count: progress.advanced(float(count), judged.label),
                )
                return [one.to_json() for one in run_task(model, task, limit=limit)]

        begin = time.perf_counter()
        try:
            known = journal.kept(EXAMPLES, judged, protocol_digest(protocol), examples)
        except RUNTIME_ERRORS as error:
            if isinstance(judged, JudgedModel):
                raise
            outcome.failures[judged.label] = one_line(error)
            continue
        for found in map(TaskExamples.from_json, known):
            values = task_values(found, original.get(found.task))
            if judged.subject.what == ORIGINAL:
                original[found.task] = found
            score = Score(
                subject=judged.subject,
                kind="task",
                what=found.task,
                values=values,
                tokens=len(next(iter(found.metrics.values()))),
                protocol=protocol
                | {name: getattr(found, name) for name in ("few_shot", "version", "chance")},
                runtime=journal.runtime(judged),
                seconds=time.perf_counter() - begin,
            )
            journal.store_score(score)
            outcome.scores.append(score)
    return outcome


# -- lm-eval -------------------------------------------------------------------------------------------------


def require_lm_eval() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise KLLensError("--tasks needs more packages: pip install 'kl-lens[eval]'") from error


def run_task(language_model: Any, task: TaskData, *, limit: int | None = None) -> list[TaskExamples]:
    """Runs one task, or all tasks of a group such as `lambada`, with any lm-eval model."""
    from lm_eval import evaluate

    with _quiet(), tempfile.TemporaryDirectory() as scratch:
        loaded = _loaded(task, Path(scratch))
        for one in loaded["tasks"].values():
            one.set_config(key="num_fewshot", value=one.get_config("num_fewshot") or 0)
            one.set_fewshot_seed(seed=1234)
        results: Any = evaluate(
            lm=language_model, task_dict=loaded, limit=limit, log_samples=True, bootstrap_iters=0
        )
        return [_examples(name, one, results) for name, one in loaded["tasks"].items()]


def _loaded(task: TaskData, scratch: Path) -> Any:
    try:
        if task.files:
            write_text(scratch / f"{task.name}.yaml", yaml.safe_dump(_config(task, scratch)))
            return _manager(index=False).load([str(scratch / f"{task.name}.yaml")])
        if task.name not in _manager().all_tasks:
            raise TextError(f"--tasks {task.name}: lm-eval has no such task; `lm-eval ls tasks` lists them")
        return _manager().load([task.name])
    except KLLensError:
        raise
    except Exception as error:  # datasets and the hub raise all kinds of errors: no connection, gated, moved
        if task.files:
            raise TextError(f"task {task.name}: its files cannot be read: {one_line(error)}") from error
        raise TextError(
            f"task {task.name}: its data could not be downloaded from the hub ({one_line(error)}); "
            f"go online, or give local files with --task-data DIR ({task.name}_test.jsonl)"
        ) from error


@functools.cache
def _manager(*, index: bool = True) -> Any:
    """lm-eval's task manager; building the index of all tasks takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=index)


def _config(task: TaskData, scratch: Path) -> dict[str, Any]:
    """An lm-eval task that reads the local files; `scratch` is the cache of `datasets`."""
    judged = next((split for split in ("test", "validation") if split in task.files), None)
    if judged is None:
        raise TextError(f"{task.files['train']}: only a training split; add a _test or _validation file")
    row, known = _first_row(task.files[judged]), _own_file(task.name)
    layout = next((settings for fields, settings in _LAYOUTS.items() if set(fields) <= set(row)), None)
    if layout is None and known is None:
        raise TextError(
            f"{task.files[judged]}: lm-eval has no task {task.name!r}, so rows need the fields "
            f"{' or '.join(map('+'.join, _LAYOUTS))}; they have {', '.join(row)}"
        )
    train, validation, test = (
        name if name in task.files else None for name in ("train", "validation", "test")
    )
    return {
        **({} if known is None else {"include": str(known)}),
        "task": task.name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: str(path.resolve()) for split, path in task.files.items()},
            "cache_dir": str(scratch / "datasets"),
        },
        # Few-shot examples come from the training file or, without one, from the others.
        "training_split": train,
        "validation_split": validation,
        "test_split": test,
        "fewshot_split": train,
        **({} if layout is None else layout | _OWN_QUERY),
    }


def _own_file(name: str) -> Path | None:
    """lm-eval's own file of a task: by file name, as for nearly all, or from the index."""
    import lm_eval.tasks

    for path in Path(lm_eval.tasks.__file__).parent.rglob(f"{name}.yaml"):
        if f"task: {name}" in path.read_text(encoding="utf-8").splitlines():
            return path
    entry = _manager().task_index.get(name)
    return None if entry is None else entry.yaml_path


def _first_row(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            return dict(json.loads(next(line for line in file if line.strip())))
    except (ValueError, TypeError, OSError, StopIteration):
        raise TextError(f"{path}: its first line is not a JSON object") from None


def _examples(name: str, task: Any, results: Mapping[str, Any]) -> TaskExamples:
    samples, better = results["samples"][name], results["higher_is_better"][name]
    metrics: dict[str, list[tuple[int, float]]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            if isinstance(sample[metric], bool | int | float):
                label = metric if sample["filter"] == "none" else f"{metric}@{sample['filter']}"
                metrics.setdefault(label, []).append((int(sample["doc_id"]), float(sample[metric])))
    if not metrics:
        raise KLLensError(f"task {name} has no numeric metric per example, so it cannot be compared")
    choices = [len(task.doc_to_choice(s["doc"])) for s in samples if task.OUTPUT_TYPE == "multiple_choice"]
    return TaskExamples(
        task=name,
        metrics={label: tuple(value for _, value in sorted(pairs)) for label, pairs in metrics.items()},
        higher_is_better={label: bool(better.get(label.split("@")[0], True)) for label in metrics},
        chance=float(np.mean([1 / count for count in choices])) if choices else None,
        version=str(results["versions"].get(name, "")),
        few_shot=int(task.get_config("num_fewshot")),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences lm-eval and datasets: we show our own progress."""
    import datasets
    from lm_eval.api import task as module

    datasets.disable_progress_bars()
    bars, module.tqdm = module.tqdm, functools.partial(module.tqdm, disable=True)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        module.tqdm = bars
        logging.disable(before)
