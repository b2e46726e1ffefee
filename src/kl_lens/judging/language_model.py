"""Tasks in lm-eval: a session as its model, the same for every runtime, and its tasks with local files.

Rows of local files have the fields of lm-eval's own data set, or one of the plain layouts below. lm-eval's prompts,
choices and metrics are used for a task that it knows, with only the data set replaced; others need a plain layout.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import yaml
from lm_eval import evaluate, tasks
from lm_eval.api import task as api_task
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from kl_lens.base.errors import KLLensError, TextError, one_line
from kl_lens.base.files import write_text
from kl_lens.base.progress import Progress
from kl_lens.judging.evaluator import ANSWERS, EXAMPLES, RUNTIME, Outcome, ScoreJournal
from kl_lens.judging.judged import RUNTIME_ERRORS, Judged, likeliest
from kl_lens.judging.tasks import TaskData, TaskExamples, task_values
from kl_lens.judging.texts import decode, protocol_digest
from kl_lens.measuring.engines import ranges
from kl_lens.run.records import ORIGINAL
from kl_lens.targets.session import Logits, Session

# Answers stored together: what a kill can lose.
ANSWERS_TOGETHER = 32

TokenRequest = tuple[Any, list[int], list[int]]  # (text or None, context, continuation)
Answer = tuple[float, bool]

_MEAN = {"aggregation": "mean", "higher_is_better": True}
_PERPLEXITY = {
    "metric": "perplexity",
    "aggregation": "perplexity",
    "higher_is_better": False,
}
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
_OWN_QUERY = {
    "process_docs": None,
    "should_decontaminate": False,
    "doc_to_decontamination_query": None,
}


class SessionLM(TemplateLM):  # type: ignore[misc]
    """A session as a model for lm-eval.

    Each request is one call of `session.logits` on context and continuation, because a recurrent runtime cannot return
    to the state after a shared context. Requests with the same input share one call: those with one-token continuations
    (A, B, C, D) all read the same row. Inputs longer than `max_length` lose their beginning, as in lm-eval's own.
    `stored`: given a key and a function, returns stored answers, or stores what the function returns. `begun` and
    `advanced` hear the number of requests, and of those answered.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Any,
        *,
        max_length: int = 2048,
        stored: Callable[[str, Callable[[], Any]], Any] = lambda key, answers: answers(),
        begun: Callable[[int], None] = lambda count: None,
        advanced: Callable[[int], None] = lambda count: None,
    ) -> None:
        super().__init__()
        self.session = session
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._stored = stored
        self._begun = begun
        self._advanced = advanced
        self._fed: list[int] = []  # what the logits are of
        self._logits: Logits | None = None

    @property
    def eot_token_id(self) -> int:
        """In place of an empty context."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise KLLensError(
            "this task needs a start token, and the tokenizer has no beginning or end token"
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Adds the tokenizer's special tokens by default, as lm-eval's own class for transformers does."""
        if add_special_tokens is None:
            beginning = getattr(self.tokenizer, "bos_token", None)
            add_special_tokens = not (beginning and string.startswith(beginning))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[Answer]:
        self._begun(len(requests))
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        raise KLLensError(
            "tasks that score whole texts have no examples to pair; use --perplexity TEXT"
        )

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[str]:
        self._begun(len(requests))
        answers = (self._answers([request.args], self._generate) for request in requests)
        return [text for (text,) in answers]

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], **_: Any
    ) -> list[Answer]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        groups = (
            pairs[part.start : part.stop] for part in ranges(len(pairs), ANSWERS_TOGETHER)
        )
        answers = (
            answer
            for group in groups
            for answer in self._answers(group, self._likelihood)
        )
        return [(float(total), bool(greedy)) for total, greedy in answers]

    def _answers(self, requests: Sequence[Any], answer: Callable[..., Any]) -> list[Any]:
        """Stored or new answers to these requests."""
        content = json.dumps([self.max_length, requests]).encode()
        key = hashlib.blake2b(content, digest_size=12).hexdigest()
        answers = self._stored(key, lambda: [answer(*request) for request in requests])
        self._advanced(len(requests))
        return list(answers)

    def _likelihood(self, context: list[int], continuation: list[int]) -> Answer:
        """ln p(continuation | context), and whether each token was the most likely one."""
        fed = [*context, *continuation][-(self.max_length + 1) :][:-1]
        if self._logits is None or self._fed != fed:
            self._logits = self.session.logits(fed)
            self._fed = fed
        rows = self._logits[-len(continuation) :].astype(np.float64)
        scored = np.asarray(continuation[-len(rows) :])
        largest = rows.max(-1)
        normaliser = largest + np.log(np.exp(rows - largest[:, None]).sum(-1))
        chosen = rows[np.arange(len(rows)), scored]
        return float((chosen - normaliser).sum()), bool((rows.argmax(-1) == scored).all())

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample") or float(settings.get("temperature") or 0) > 0:
            raise KLLensError(
                "only greedy generation is supported; this task asks for sampling"
            )
        settings = normalize_gen_kwargs(settings)
        stops = [stop for stop in settings["until"] if stop]
        most = settings["max_gen_toks"]
        ids = self.tok_encode(context)[-max(1, self.max_length - most) :]
        end = getattr(self.tokenizer, "eos_token_id", None)
        tokens: list[int] = []
        text = ""
        for token in likeliest(self.session, ids, end, most):
            tokens.append(token)
            text = decode(self.tokenizer, tokens)
            if any(stop in text for stop in stops):
                break
        return str(postprocess_generated_text(text, stops, None))


# -- tasks ---------------------------------------------------------------------------------------------------


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
    """Scores of all subjects on one task, stored in the journal; the original, if included, goes first. Answers are
    stored a few at a time, so that an interrupted task can resume. `max_length`: tokens of context and continuation
    together; `limit`: only the first examples of each task."""
    shown = progress or Progress()
    protocol = {
        "task": task.name,
        **task.source,
        "limit": limit,
        "max_length": max_length,
    }
    outcome = Outcome()
    originals = dict[str, TaskExamples]()
    order = sorted(subjects, key=lambda judged: judged.subject.what != ORIGINAL)

    def answered(judged: Judged, position: int) -> list[dict[str, Any]]:
        judged.check()
        with contextlib.closing(judged.open()) as session:
            journal.store(RUNTIME, judged, "", session.description)
            model = SessionLM(
                session,
                tokenizer,
                max_length=max_length,
                stored=partial(journal.kept, ANSWERS, judged),
                begun=lambda count: shown.started(count * len(order), count * position),
                advanced=lambda count: shown.advanced(count, judged.label),
            )
            return [examples.to_json() for examples in run_task(model, task, limit=limit)]

    for position, judged in enumerate(order):
        begin = time.perf_counter()
        compute = partial(answered, judged, position)
        try:
            stored = journal.kept(EXAMPLES, judged, protocol_digest(protocol), compute)
        except RUNTIME_ERRORS as error:
            outcome.failed(judged, error)
            continue
        for examples in map(TaskExamples.from_json, stored):
            values = task_values(examples, originals.get(examples.task))
            if judged.subject.what == ORIGINAL:
                originals[examples.task] = examples
            count = len(next(iter(examples.metrics.values())))
            seconds = time.perf_counter() - begin
            details = {
                name: getattr(examples, name)
                for name in ("few_shot", "version", "chance")
            }
            outcome.scores.append(
                journal.score(
                    judged,
                    "task",
                    examples.task,
                    values,
                    count,
                    protocol | details,
                    seconds,
                )
            )
    return outcome


def run_task(
    language_model: Any, task: TaskData, *, limit: int | None = None
) -> list[TaskExamples]:
    """Runs one task, or all tasks of a group such as `lambada`, with any lm-eval model."""
    with _quiet(), tempfile.TemporaryDirectory() as scratch:
        loaded = _loaded(task, Path(scratch))
        for single in loaded["tasks"].values():
            single.set_config(
                key="num_fewshot", value=single.get_config("num_fewshot") or 0
            )
            single.set_fewshot_seed(seed=1234)
        results: Any = evaluate(
            lm=language_model,
            task_dict=loaded,
            limit=limit,
            log_samples=True,
            bootstrap_iters=0,
        )
        return [
            _examples(name, single, results) for name, single in loaded["tasks"].items()
        ]


def _loaded(task: TaskData, scratch: Path) -> Any:
    try:
        if task.files:
            path = scratch / f"{task.name}.yaml"
            write_text(path, yaml.safe_dump(_config(task, scratch)))
            return _manager(index=False).load(str(path))
        if task.name not in _manager().all_tasks:
            raise TextError(
                f"--tasks {task.name}: lm-eval has no such task; `lm-eval ls tasks` lists them"
            )
        return _manager().load(task.name)
    except KLLensError:
        raise
    except Exception as error:  # datasets and the hub raise all kinds of errors: no connection, gated, moved
        reason = (
            f"its files cannot be read: {one_line(error)}"
            if task.files
            else f"its data could not be downloaded from the hub ({one_line(error)}); "
            f"go online, or give local files with --task-data DIR ({task.name}_test.jsonl)"
        )
        raise TextError(f"task {task.name}: {reason}") from error


@functools.cache
def _manager(*, index: bool = True) -> Any:
    """lm-eval's task manager; building the index of all tasks takes seconds."""
    return tasks.TaskManager(include_defaults=index)


def _config(task: TaskData, scratch: Path) -> dict[str, Any]:
    """An lm-eval task that reads the local files; `scratch` is the cache of `datasets`."""
    path = task.files.get("test") or task.files.get("validation")
    if path is None:
        raise TextError(
            f"{task.files['train']}: only a training split; add a _test or _validation file"
        )
    try:
        with path.open(encoding="utf-8") as file:
            row = dict(json.loads(next(filter(str.strip, file))))
    except (ValueError, TypeError, OSError, StopIteration):
        raise TextError(f"{path}: its first line is not a JSON object") from None
    own_file = _own_file(task.name)
    layouts = (layout for fields, layout in _LAYOUTS.items() if set(fields) <= set(row))
    layout = next(layouts, None)
    if layout is None and own_file is None:
        raise TextError(
            f"{path}: lm-eval has no task {task.name!r}, so rows need the fields "
            f"{' or '.join(map('+'.join, _LAYOUTS))}; they have {', '.join(row)}"
        )
    # Few-shot examples come from the training file or, without one, from the others.
    splits = {
        "training": "train",
        "validation": "validation",
        "test": "test",
        "fewshot": "train",
    }
    return {
        **({} if own_file is None else {"include": str(own_file)}),
        "task": task.name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {
                split: str(path.resolve()) for split, path in task.files.items()
            },
            "cache_dir": str(scratch / "datasets"),
        },
        **{
            f"{use}_split": split if split in task.files else None
            for use, split in splits.items()
        },
        **({} if layout is None else layout | _OWN_QUERY),
    }


def _own_file(name: str) -> Path | None:
    """lm-eval's own file of a task: by file name, as for nearly all, or from the index."""
    for path in Path(tasks.__file__).parent.rglob(f"{name}.yaml"):
        if f"task: {name}" in path.read_text(encoding="utf-8").splitlines():
            return path
    entry = _manager().task_index.get(name)
    return None if entry is None else entry.yaml_path


def _examples(name: str, task: Any, results: Mapping[str, Any]) -> TaskExamples:
    samples = results["samples"][name]
    better = results["higher_is_better"][name]
    metrics: dict[str, dict[int, float]] = {}
    for sample in samples:
        suffix = "" if sample["filter"] == "none" else f"@{sample['filter']}"
        for metric in sample["metrics"]:
            if isinstance(sample[metric], bool | int | float):
                values = metrics.setdefault(metric + suffix, {})
                values[sample["doc_id"]] = float(sample[metric])
    if not metrics:
        raise KLLensError(
            f"task {name} has no numeric metric per example, so it cannot be compared"
        )
    chance = None
    if task.OUTPUT_TYPE == "multiple_choice":
        chance = float(np.mean([1 / len(task.doc_to_choice(s["doc"])) for s in samples]))
    return TaskExamples(
        task=name,
        metrics={
            label: tuple(values[index] for index in sorted(values))
            for label, values in metrics.items()
        },
        higher_is_better={
            label: bool(better.get(label.split("@")[0], True)) for label in metrics
        },
        chance=chance,
        version=str(results["versions"].get(name, "")),
        few_shot=int(task.get_config("num_fewshot")),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences lm-eval and datasets: we show our own progress."""
    datasets.disable_progress_bars()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with patch.object(api_task, "tqdm", partial(api_task.tqdm, disable=True)):
            yield
    finally:
        logging.disable(before)
