"""`kl-lens run [MODEL]`: every stage in order, on the embedded model unless another is named.

Each stage is the verb of its own name with the words shown; each can be repeated alone, and what is done already is
not done again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kl_lens import planning
from kl_lens.checkpoints import LoadedModel
from kl_lens.cli import config, options
from kl_lens.cli.run_summary import UNIFORM_FP16, print_summary
from kl_lens.cli.stages import Stages
from kl_lens.errors import KLLensError, TargetError, UnsupportedError
from kl_lens.evaluation import JudgedArtifact
from kl_lens.evaluation.continuations import store_continuations
from kl_lens.formats import get_format
from kl_lens.paper import best_paper_point
from kl_lens.runs import Run
from kl_lens.targets import TARGETS, describe_target, read_artifact
from kl_lens.units import parse_bytes, parse_share

RECOMMENDED, EXACT = "recommended", "exact"
PROMPTS = ("The history of the city", "In the early years of the war ,")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, optional=True)
    options.add_run(parser)
    options.add_text(parser, windows=8)
    parser.add_argument("--formats", default="int4,int8", help="comma-separated (default: int4,int8)")
    wanted = parser.add_argument_group("the recommended plan (one of them)")
    wanted.add_argument(
        "--budget", default="45%", metavar="SHARE", help="its size, of the FP16 model's (default: 45%%)"
    )
    wanted.add_argument("--max-bytes", metavar="SIZE", help="its size, as a number")
    wanted.add_argument(
        "--max-drop",
        metavar="SHARE",
        help="the smallest whose held-out perplexity rises by no more, e.g. 3%%",
    )
    proof = parser.add_argument_group("proof")
    proof.add_argument(
        "--targets", default=",".join(TARGETS), help=f"where to export to (default: {','.join(TARGETS)})"
    )
    proof.add_argument(
        "--evaluation-text", default="wikitext2:test", metavar="TEXT", help="default: wikitext2:test"
    )
    proof.add_argument(
        "--evaluation-windows", type=options.positive, default=8, metavar="N",
        help="windows of the evaluation text for rank and evaluate (default: 8)",
    )  # fmt: skip
    options.add_held_out(proof, windows=8)
    proof.add_argument(
        "--refinements",
        type=int,
        default=8,
        metavar="N",
        help="measured swaps to try; 0 for none (default: 8)",
    )
    proof.add_argument("--tasks", metavar="LIST", help="lm-eval tasks too (needs kl-lens[eval])")
    proof.add_argument("--task-data", metavar="DIR", help="local task files, instead of the hub")
    proof.add_argument("--task-limit", type=options.positive, metavar="N", help="examples of each task")
    proof.add_argument(
        "--repeats", type=options.positive, default=3, metavar="N", help="of timings (default: 3)"
    )
    proof.add_argument("--threads", type=options.positive, metavar="N", help="of the runtimes (default: all)")
    proof.add_argument("--prompt", help="for the samples of text (default: two of our own)")
    proof.add_argument("--without", default="", metavar="STAGES", help="of rank, evaluate, benchmark, report")
    proof.add_argument("--again", action="store_true", help="do again what is done already")
    config.add_arguments(parser)


def execute(arguments: argparse.Namespace) -> int:
    if arguments.write_config:
        config.write(arguments, arguments.write_config)
        return 0
    begin = time.perf_counter()
    skipped = _skipped(arguments)
    _check(arguments)
    model = options.load_model(arguments)
    folder = options.run_folder(arguments, model.name)
    with Run.create(folder) as run:
        run.note_command(sys.argv)
    stages = Stages(folder, again=arguments.again)
    loading, run_words = _loading(arguments), ["--run", str(folder)]
    try:
        stages.do("inspect", arguments.model, *loading)
        _measure(arguments, stages, run_words, loading, "rank" not in skipped)
        _plan(arguments, stages, run_words, loading, model)
        compared = _compared(folder, _formats(arguments))
        exported = _export(arguments, stages, run_words, loading, compared)
        if "evaluate" not in skipped:
            _evaluate(arguments, stages, run_words, compared, list(exported))
            _generate(arguments, stages, model, exported)
        if "benchmark" not in skipped and exported:
            _benchmark(arguments, stages, run_words, compared, list(exported))
        if "report" not in skipped:
            stages.do("report", *run_words)
    except KeyboardInterrupt:
        print(f"\nkl-lens run: stopped; the same command goes on from there ({folder})", file=sys.stderr)
        return 130
    limit = parse_share(arguments.max_drop) if arguments.max_drop else None
    print_summary(folder, compared, exported, stages, time.perf_counter() - begin, limit)
    print(_shortened(arguments))
    return 1 if stages.failures else 0


def _skipped(arguments: argparse.Namespace) -> set[str]:
    known = ("rank", "evaluate", "benchmark", "report")
    names = {name.strip() for name in arguments.without.split(",") if name.strip()}
    if unknown := sorted(names - set(known)):
        raise KLLensError(f"--without {unknown[0]!r}: only {', '.join(known)} can be left out")
    return names


def _check(arguments: argparse.Namespace) -> None:
    """What would fail after minutes is refused at once."""
    if unknown := [t for t in _targets(arguments) if t not in TARGETS]:
        raise KLLensError(f"--targets: no target is called {unknown[0]!r}; there are {', '.join(TARGETS)}")
    if arguments.max_drop and arguments.max_bytes:
        raise KLLensError("--max-drop and --max-bytes: give one of them; each sets the size of the plan")
    if arguments.max_drop:
        parse_share(arguments.max_drop, "--max-drop")
    if arguments.max_bytes:
        parse_bytes(arguments.max_bytes)
    parse_share(arguments.budget, "--budget")
    if arguments.tasks:
        from kl_lens.evaluation.tasks import require_lm_eval

        require_lm_eval()


def _targets(arguments: argparse.Namespace) -> list[str]:
    return [name.strip() for name in arguments.targets.split(",") if name.strip()]


def _measure(
    arguments: argparse.Namespace, stages: Stages, run: list[str], loading: list[str], with_rank: bool
) -> None:
    stages.do(
        "measure", arguments.model, *run, *loading, "--text", arguments.text, "--windows", str(arguments.windows),
        "--window-length", str(arguments.window_length), "--seed", str(arguments.seed), "--formats", arguments.formats,
    )  # fmt: skip
    if with_rank:
        stages.do(
            "rank", *run, *loading, "--evaluation-text", arguments.evaluation_text,
            "--evaluation-windows", str(arguments.evaluation_windows), key="rank", inputs=stages.measurements(),
        )  # fmt: skip


def _plan(
    arguments: argparse.Namespace, stages: Stages, run: list[str], loading: list[str], model: LoadedModel
) -> None:
    """The paper's points, the exact plan, and the same improved by measured swaps: the recommendation."""
    held_out = ["--held-out", arguments.held_out, "--held-out-windows", str(arguments.held_out_windows)]
    inputs = stages.measurements()
    formats = _formats(arguments)
    # The paper's points mix INT4 and INT8; with other formats there are only the uniform plans to compare with.
    paper = ["--paper"] if {"int4", "int8"} <= set(formats) else []
    uniform = ["fp16", *(f for f in formats if not paper or f not in ("int4", "int8"))]
    stages.do("plan", *run, *loading, "--uniform", ",".join(uniform), *paper, "--verify", *held_out,
              key="plan uniform", inputs=inputs,
              outputs=["plans/uniform_*.json", "plans/*_point[0-9][0-9].json"])  # fmt: skip
    exact = EXACT if arguments.refinements else RECOMMENDED
    stages.do("plan", *run, *loading, *_limit(arguments, model), "--name", exact, "--verify", *held_out,
              key="plan exact", inputs=inputs, outputs=[f"plans/{exact}.json"])  # fmt: skip
    if arguments.refinements:
        stages.do("plan", *run, *loading, "--plan", EXACT, "--refine", "--max-evaluations", str(arguments.refinements),
                  "--name", RECOMMENDED, *held_out, key="plan refined",
                  inputs=inputs + stages.files(f"plans/{EXACT}.json"),
                  outputs=[f"plans/{RECOMMENDED}.json"])  # fmt: skip


def _limit(arguments: argparse.Namespace, model: LoadedModel) -> list[str]:
    if arguments.max_drop:
        return ["--max-drop", arguments.max_drop]
    if arguments.max_bytes:
        return ["--max-bytes", str(parse_bytes(arguments.max_bytes))]
    whole = sum(2 * c.parameters for c in model.anatomy.components)
    return ["--max-bytes", str(int(parse_share(arguments.budget) * whole))]


def _formats(arguments: argparse.Namespace) -> list[str]:
    """What is measured, the most bits first."""
    names = [get_format(name.strip()).name for name in arguments.formats.split(",") if name.strip()]
    return sorted(dict.fromkeys(names), key=lambda name: -get_format(name).bits)


def _compared(folder: Path, formats: list[str]) -> list[str]:
    """The plans that are exported and set side by side, the recommendation last."""
    with Run.open(folder) as run:
        components = run.table().components
    plans = [planning.read_plan(path, components) for path in sorted((folder / "plans").glob("*.json"))]
    found = {plan.name: plan for plan in plans}
    best = best_paper_point(plans, found[RECOMMENDED])
    names = [UNIFORM_FP16, *(f"uniform_{name}" for name in formats), best.name if best else None, RECOMMENDED]
    return [name for name in names if name in found]


def _export(
    arguments: argparse.Namespace, stages: Stages, run: list[str], loading: list[str], plans: list[str]
) -> dict[str, Path]:
    """Target → folder of the recommendation there. An architecture that a runtime does not have is no failure."""
    exported = {}
    for target in _targets(arguments):
        # What a runtime cannot hold is lowered, visibly: the table of the export says which and why.
        extra = ["--fallback"]
        if describe_target(target).translations:
            extra += ["--map", "--held-out", arguments.held_out, "--held-out-windows", "2"]
        folder = stages.folder / "artifacts" / target
        try:
            stages.do("export", *run, *loading, "--target", target, "--plan", ",".join(plans), *extra,
                      key=f"export {target}", inputs=stages.files(*(f"plans/{name}.json" for name in plans)),
                      lost=not all(_is_whole(folder / name) for name in plans),
                      outputs=[f"artifacts/{target}/{name}/artifact.json" for name in plans])  # fmt: skip
        except UnsupportedError as error:
            print(f"kl-lens run: not exported to {target}: {error}", file=sys.stderr)
            continue
        except TargetError as error:
            print(f"kl-lens run: {error}", file=sys.stderr)
            stages.failures.append(f"export --target {target}")
            continue
        exported[target] = folder / RECOMMENDED
    return exported


def _is_whole(folder: Path) -> bool:
    try:
        read_artifact(folder)
    except TargetError:
        return False
    return True


def _evaluate(
    arguments: argparse.Namespace, stages: Stages, run: list[str], plans: list[str], targets: list[str]
) -> None:
    words = ["--perplexity", arguments.evaluation_text, "--divergence", "--window", str(arguments.window_length),
             "--limit", str(arguments.evaluation_windows), "--targets", ",".join(["torch", *targets])]  # fmt: skip
    if arguments.threads:
        words += ["--threads", str(arguments.threads)]
    if arguments.trust_remote_code:
        words.append("--trust-remote-code")
    if arguments.again:
        words.append("--again")
    for name in ("tasks", "task_data", "task_limit"):
        if getattr(arguments, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    stages.do("evaluate", *run, "--plan", ",".join(plans), *words, optional=True)


def _generate(
    arguments: argparse.Namespace, stages: Stages, model: LoadedModel, exported: dict[str, Path]
) -> None:
    """What the original and the recommendation write, side by side, for the report."""
    prompts = (arguments.prompt,) if arguments.prompt else PROMPTS
    print("\n== samples of text", flush=True)
    begin = time.perf_counter()
    try:
        with Run.open(stages.folder) as run:
            files = [JudgedArtifact(place, plan=RECOMMENDED) for place in exported.values()]
            store_continuations(run, model, files, prompts)
    except (KLLensError, RuntimeError, OSError) as error:
        print(f"kl-lens run: no samples of text: {error}", file=sys.stderr)
        stages.failures.append("generate")
    stages.seconds["samples"] = time.perf_counter() - begin


def _benchmark(
    arguments: argparse.Namespace, stages: Stages, run: list[str], plans: list[str], targets: list[str]
) -> None:
    words = ["--repeats", str(arguments.repeats), "--prompt-lengths", "32,128", "--new-tokens", "32",
             "--targets", ",".join(targets)]  # fmt: skip
    if arguments.threads:
        words += ["--threads", str(arguments.threads)]
    artifacts = [f"artifacts/{target}/{plan}/artifact.json" for target in targets for plan in plans]
    stages.do("benchmark", *run, "--plan", ",".join(plans), *words, key="benchmark",
              inputs=stages.files(*artifacts), optional=True)  # fmt: skip


def _shortened(arguments: argparse.Namespace) -> str:
    return (
        f"Short for a first look: {arguments.windows} calibration windows (kl-lens measure takes 64), "
        f"{arguments.evaluation_windows} of {arguments.window_length} tokens for evaluation (evaluate takes the whole "
        f"text in windows of 2048), {arguments.held_out_windows} held-out ones (plan takes 32), {arguments.repeats} "
        "rounds of timing with 32 new tokens (benchmark takes 5 with 64). The flags of kl-lens run raise them."
    )


def _loading(arguments: argparse.Namespace) -> list[str]:
    words = ["--dtype", arguments.dtype, "--device", arguments.device]
    for name in ("revision", "tokenizer"):
        if getattr(arguments, name):
            words += [f"--{name}", getattr(arguments, name)]
    return words + (["--trust-remote-code"] if arguments.trust_remote_code else [])
