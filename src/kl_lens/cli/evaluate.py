"""`kl-lens evaluate`: perplexity, divergence and tasks of plans in PyTorch and of the files that ship."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kl_lens import evaluation
from kl_lens.checkpoints import LoadedModel
from kl_lens.cli import options
from kl_lens.cli.evaluate_tables import labelled, print_outcome, verdicts
from kl_lens.cli.progress import sweep_progress
from kl_lens.errors import KLLensError
from kl_lens.evaluation.agreement import DISAGREES
from kl_lens.evaluation.task_data import LocalTask, chosen_tasks
from kl_lens.evaluation.tasks import FAIL, require_lm_eval, task_names
from kl_lens.paper import write_published
from kl_lens.runs import CALIBRATION, Run
from kl_lens.targets import TARGETS
from kl_lens.text import refuse_overlap
from kl_lens.units import parse_share

DEFAULT_TEXT = "wikitext2:test"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "artifact",
        metavar="ARTIFACT",
        nargs="*",
        type=Path,
        help="exported folders or .gguf files (default: everything in the run)",
    )
    parser.add_argument("--run", metavar="DIR", help="the run folder (default: runs/reference-mamba)")
    options.add_plans(parser)
    parser.add_argument(
        "--targets",
        default=",".join(("torch", *TARGETS)),
        metavar="LIST",
        help="torch (plans in PyTorch), and targets (exported files); default: all",
    )
    text = parser.add_argument_group("what to measure (default: --perplexity --divergence)")
    text.add_argument(
        "--perplexity",
        nargs="?",
        const=DEFAULT_TEXT,
        metavar="TEXT",
        help=f"token and word perplexity (default text: {DEFAULT_TEXT})",
    )
    text.add_argument(
        "--divergence",
        nargs="?",
        const="",
        metavar="TEXT",
        help="KL from the original's own distribution (default text: that of --perplexity)",
    )
    text.add_argument("--window", type=options.positive, default=2048, metavar="N", help="default: 2048")
    text.add_argument(
        "--stride",
        type=options.positive,
        metavar="S",
        help="score only the last S tokens of each window (default: the window)",
    )
    text.add_argument("--limit", type=options.positive, metavar="N", help="only the first N windows")
    tasks = parser.add_argument_group("tasks (lm-eval)")
    tasks.add_argument("--tasks", metavar="LIST", help="such as arc_easy,hellaswag,lambada_openai,piqa")
    tasks.add_argument(
        "--task-data", type=Path, metavar="DIR", help="local NAME_test.jsonl files, instead of the hub"
    )
    tasks.add_argument("--task-limit", type=options.positive, metavar="N", help="only the first N examples")
    tasks.add_argument("--few-shot", type=int, metavar="N", help="worked examples (default: the task's own)")
    tasks.add_argument("--max-drop", metavar="SHARE", help="accuracy that may be lost, such as 3%% (points)")
    running = parser.add_argument_group("running")
    running.add_argument("--exact", action="store_true", help="float32 arithmetic instead of the fastest")
    running.add_argument("--device", default="CPU", help="OpenVINO device (default: CPU)")
    running.add_argument(
        "--threads", type=options.positive, metavar="N", help="default: the runtime's own choice"
    )
    running.add_argument("--gpu-layers", type=int, default=0, metavar="N", help="llama.cpp: layers on a GPU")
    running.add_argument("--again", action="store_true", help="measure afresh what the run holds already")
    running.add_argument("--tag", help="for perplexity_results_TAG.json (default: the text's name)")
    loading = parser.add_argument_group("loading the model")
    loading.add_argument("--model", metavar="MODEL", help="where the run's model is now, if it moved")
    loading.add_argument("--revision", help="branch, tag or commit of a hub id")
    loading.add_argument("--tokenizer", metavar="PLACE", help="folder, tokenizer.json or hub id")
    loading.add_argument("--dtype", default="float32", help="what PyTorch computes in (default: float32)")
    loading.add_argument("--torch-device", default="cpu", metavar="DEVICE", help="PyTorch's (default: cpu)")
    loading.add_argument("--trust-remote-code", action="store_true")
    options.add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    limit = None if arguments.max_drop is None else parse_share(arguments.max_drop, "--max-drop")
    if arguments.tasks:
        require_lm_eval()
    outcome = evaluation.Outcome()
    written: list[Path] = []
    with _run(arguments) as run:
        model = _model(arguments, run)
        selection = _selection(arguments, run, model)
        outcome.failures |= selection.failures
        if not selection.subjects and model is None:
            raise KLLensError(next(iter(outcome.failures.values()), "there is nothing to evaluate"))
        tokenizer = _tokenizer(arguments, model, selection)
        journal = evaluation.Journal(run, again=arguments.again)
        original = None if model is None else evaluation.JudgedModel(model)
        try:
            for name, kinds in _texts(arguments, original is not None).items():
                text = _text(arguments, run, name, tokenizer)
                outcome.add(_judge_text(journal, original, selection, text, kinds))
                if "perplexity" in kinds and model is not None and _is_kept(arguments):
                    written.append(write_published(run, model.name, text, arguments.tag))
            if arguments.tasks:
                outcome.add(_judge_tasks(arguments, journal, original, selection, tokenizer))
        except KeyboardInterrupt:
            goes_on = f"; the same command goes on from there ({run.folder})" if _is_kept(arguments) else ""
            print(f"\nkl-lens evaluate: stopped{goes_on}", file=sys.stderr)
            return 130
    found = verdicts(outcome, limit)
    if arguments.json:
        options.print_json(
            {
                "scores": [labelled(score) for score in outcome.scores],
                "agreements": [labelled(agreement) for agreement in outcome.agreements],
                "verdicts": found,
                "failures": outcome.failures,
                "notes": selection.notes,
                "files": [str(path) for path in written],
            }
        )
    else:
        print_outcome(outcome, limit, [*selection.notes, *(f"Written: {path}" for path in written)])
    for subject, reason in outcome.failures.items():
        print(f"kl-lens evaluate: {subject}: {reason}", file=sys.stderr)
    if outcome.failures or any(a.verdict == DISAGREES for a in outcome.agreements):
        return 1
    return 2 if any(verdict["verdict"] == FAIL for verdict in found) else 0


def _is_kept(arguments: argparse.Namespace) -> bool:
    """Files given without --run are judged without a run folder."""
    return arguments.run is not None or not arguments.artifact


@contextmanager
def _run(arguments: argparse.Namespace) -> Iterator[Run]:
    if _is_kept(arguments):
        with options.open_run(arguments) as run:
            run.note_command(sys.argv)
            yield run
    else:
        with tempfile.TemporaryDirectory() as folder, Run.create(Path(folder)) as run:
            yield run


def _model(arguments: argparse.Namespace, run: Run) -> LoadedModel | None:
    loading = argparse.Namespace(**{**vars(arguments), "device": arguments.torch_device})
    if arguments.threads is not None:
        import torch

        torch.set_num_threads(arguments.threads)
    if _is_kept(arguments):
        return options.load_run_model(loading, run)
    return None if arguments.model is None else options.load_model(loading)


def _selection(arguments: argparse.Namespace, run: Run, model: LoadedModel | None) -> evaluation.Selection:
    settings = evaluation.RuntimeSettings(
        arguments.device, arguments.threads, arguments.gpu_layers, arguments.exact
    )
    if arguments.artifact:
        kept = run if _is_kept(arguments) else None
        return evaluation.given_subjects(arguments.artifact, settings, model, kept)
    targets = [name.strip() for name in arguments.targets.split(",") if name.strip()]
    unknown = [name for name in targets if name not in ("torch", *TARGETS)]
    if unknown:
        raise KLLensError(f"--targets {unknown[0]!r}: there are {', '.join(['torch', *TARGETS])}")
    assert model is not None
    return evaluation.run_subjects(run, model, settings, plans=arguments.plan, targets=targets)


def _tokenizer(
    arguments: argparse.Namespace, model: LoadedModel | None, selection: evaluation.Selection
) -> Any:
    if model is not None:
        return model.require_tokenizer()
    first = selection.subjects[0]
    assert isinstance(first, evaluation.JudgedArtifact)
    return evaluation.artifact_tokenizer(first, arguments.tokenizer)


def _texts(arguments: argparse.Namespace, has_original: bool) -> dict[str, set[str]]:
    """Text → what is measured on it; a text for both is read once."""
    perplexity, divergence = arguments.perplexity, arguments.divergence
    if perplexity is None and divergence is None and not arguments.tasks:
        perplexity, divergence = DEFAULT_TEXT, "" if has_original else None
    wanted: dict[str, set[str]] = {}
    if perplexity is not None:
        wanted.setdefault(perplexity, set()).add("perplexity")
    if divergence is not None:
        wanted.setdefault(divergence or perplexity or DEFAULT_TEXT, set()).add("divergence")
    return wanted


def _text(arguments: argparse.Namespace, run: Run, name: str, tokenizer: Any) -> evaluation.EvaluationText:
    text = evaluation.prepare_text(
        name, tokenizer, window=arguments.window, stride=arguments.stride, limit=arguments.limit
    )
    if run.text_identity(CALIBRATION) is not None:
        refuse_overlap(options.redraw(run, tokenizer), text.windows)
    return text


def _judge_text(
    journal: evaluation.Journal,
    original: evaluation.JudgedModel | None,
    selection: evaluation.Selection,
    text: evaluation.EvaluationText,
    kinds: set[str],
) -> evaluation.Outcome:
    with sweep_progress(text.label) as progress:
        evaluator = evaluation.Evaluator(journal, original, progress)
        try:
            return evaluator.judge_text(
                selection.subjects,
                text,
                perplexity="perplexity" in kinds,
                divergence="divergence" in kinds,
            )
        finally:
            evaluator.close()


def _judge_tasks(
    arguments: argparse.Namespace,
    journal: evaluation.Journal,
    original: evaluation.JudgedModel | None,
    selection: evaluation.Selection,
    tokenizer: Any,
) -> evaluation.Outcome:
    names = task_names(arguments.tasks)
    chosen: Sequence[LocalTask | str] = (
        chosen_tasks(arguments.task_data, names) if arguments.task_data else names
    )
    subjects = [*([] if original is None else [original]), *selection.subjects]
    outcome = evaluation.Outcome()
    for name, task in zip(names, chosen, strict=True):
        with sweep_progress(name) as progress:
            evaluator = evaluation.TaskEvaluator(
                journal,
                tokenizer,
                max_length=arguments.window,
                limit=arguments.task_limit,
                few_shot=arguments.few_shot,
                progress=progress,
            )
            outcome.add(evaluator.judge_task(subjects, task))
    return outcome
