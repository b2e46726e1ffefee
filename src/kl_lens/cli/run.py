"""`kl-lens run [MODEL]`: the stages in order, on the embedded model unless another is named.

Each stage is the verb of its own name with the settings shown; every one can be repeated alone, and what is done
already is not done again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from kl_lens import planning
from kl_lens.cli import options
from kl_lens.errors import KLLensError, TargetError
from kl_lens.runs import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser, optional=True)
    options.add_run(parser)
    options.add_text(parser, windows=8)
    parser.add_argument("--formats", default="int4,int8", help="comma-separated (default: int4,int8)")
    parser.add_argument(
        "--budget",
        default="45%",
        metavar="SHARE",
        help="size of the recommended plan, of the FP16 model's (default: 45%%)",
    )
    parser.add_argument("--max-bytes", metavar="SIZE", help="size of the recommended plan, as a number")
    parser.add_argument(
        "--targets",
        default="openvino,gguf",
        help="where to export the recommended plan (default: openvino,gguf)",
    )


def execute(arguments: argparse.Namespace) -> int:
    begin = time.perf_counter()
    model = options.load_model(arguments)
    folder = options.run_folder(arguments, model.name)
    run = ["--run", str(folder)]
    size = arguments.max_bytes or _share(
        arguments.budget, sum(2 * c.parameters for c in model.anatomy.components)
    )
    loading = _loading(arguments)
    _verb("inspect", arguments.model, *loading)
    _verb(
        "measure", arguments.model, *run, *loading, "--text", arguments.text, "--windows", str(arguments.windows),
        "--window-length", str(arguments.window_length), "--seed", str(arguments.seed), "--formats", arguments.formats,
    )  # fmt: skip
    held_out = ["--held-out-windows", "8"]
    _verb("plan", *run, *loading, "--paper", "--verify", *held_out)
    _verb("plan", *run, *loading, "--max-bytes", str(size), "--name", "recommended", "--verify", *held_out)
    _verb("plan", *run, "--compare", "uniform_int8", "uniform_int4", "kl_point05", "recommended")
    exported = []
    for target in [t.strip() for t in arguments.targets.split(",") if t.strip()]:
        extra = ["--map"] if target == "gguf" else []
        try:
            _verb("export", *run, *loading, "--target", target, "--plan", "recommended", *extra)
            exported.append(folder / "artifacts" / target / "recommended")
        except (
            TargetError
        ) as error:  # an architecture that this runtime does not have is no failure of the run
            print(f"kl-lens run: not exported to {target}: {error}", file=sys.stderr)
    _conclude(folder, time.perf_counter() - begin)
    for place in exported:
        print(f'Next: kl-lens generate {shlex.quote(str(place))} --prompt "The history of the city"')
    return 0


def _verb(verb: str, *words: str) -> None:
    from kl_lens.cli.main import build_parser

    print(f"\n== kl-lens {shlex.join([verb, *words])}", flush=True)
    arguments = build_parser().parse_args([verb, *words])
    code = int(arguments.execute(arguments) or 0)
    if code:
        raise SystemExit(code)


def _share(text: str, whole: int) -> int:
    try:
        share = float(text.strip().removesuffix("%")) / (100 if "%" in text else 1)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise KLLensError(f"--budget {text!r}: write a share such as 45%")
    return int(share * whole)


def _loading(arguments: argparse.Namespace) -> list[str]:
    words = ["--dtype", arguments.dtype, "--device", arguments.device]
    for name in ("revision", "tokenizer"):
        if getattr(arguments, name):
            words += [f"--{name}", getattr(arguments, name)]
    return words + (["--trust-remote-code"] if arguments.trust_remote_code else [])


def _conclude(folder: Path, seconds: float) -> None:
    with Run.open(folder) as run:
        table = run.table()
        plan = planning.read_plan(planning.plan_path(run.folder / "plans", "recommended"), table.components)
    row = planning.plan_row(plan, table.components)
    original = plan.notes.get("original_perplexity")
    whole = sum(2 * c.parameters for c in table.components)
    assert row.perplexity is not None
    assert original is not None
    print(
        f"\nRecommended: {row.shares_text}: {row.bytes / whole:.0%} of the FP16 size, perplexity {row.perplexity:.3f} "
        f"against {original:.3f} ({plan.notes['measured_on']}), in {seconds:.0f} s."
    )
