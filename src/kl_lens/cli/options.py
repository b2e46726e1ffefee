"""Arguments that several verbs share, and how they become objects."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_lens.errors import RunError
from kl_lens.runs import ALL_PLANS, CALIBRATION, Run

if TYPE_CHECKING:  # `kl-lens generate` runs on small devices: libraries load in the functions that need them
    from rich.console import Console

    from kl_lens.checkpoints import LoadedModel
    from kl_lens.text import Windows


def console(*, stderr: bool = False) -> Console:
    """A console that keeps tables whole when the output is a file or a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 220, highlight=False)


_MODEL_HELP = "folder, hub id, or reference:mamba | reference:mamba2 | reference:hybrid"


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """MODEL as the first argument, and what goes with it."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if optional else None,
        default="reference:mamba" if optional else None,
        help=_MODEL_HELP + (" (default: reference:mamba)" if optional else ""),
    )
    add_loading(parser)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model MODEL, and what goes with it."""
    parser.add_argument("--model", required=True, metavar="MODEL", help=_MODEL_HELP)
    add_loading(parser)


def add_run_model(parser: argparse.ArgumentParser) -> None:
    """--run DIR of an existing run; --model only when the run's model is not where it was."""
    parser.add_argument("--run", metavar="DIR", help="the run folder (default: runs/reference-mamba)")
    parser.add_argument("--model", metavar="MODEL", help="where the run's model is now, if it moved")
    add_loading(parser)


def add_loading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loading the model")
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument(
        "--tokenizer", metavar="PLACE", help="folder, tokenizer.json or hub id of another tokenizer"
    )
    group.add_argument("--dtype", default="float32", help="what to compute in (default: float32)")
    group.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the checkpoint"
    )


def add_plans(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan", default=ALL_PLANS, metavar="NAMES", help="plans of the run: a, or a,b, or all (default)"
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="DIR", help="the run folder (default: runs/<model>)")


def add_text(parser: argparse.ArgumentParser, windows: int = 64) -> None:
    group = parser.add_argument_group("calibration text")
    group.add_argument(
        "--text",
        default="wikitext2:train",
        help="name:split, or a .txt, .jsonl, .jsonl.zst or .parquet file or folder (default: wikitext2:train)",
    )
    group.add_argument(
        "--windows", type=positive, default=windows, help=f"how many windows (default: {windows})"
    )
    group.add_argument(
        "--window-length", type=positive, default=512, metavar="N", help="tokens each (default: 512)"
    )
    group.add_argument("--seed", type=int, default=42, help="chooses the windows (default: 42)")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def open_run(arguments: argparse.Namespace) -> Run:
    """The run of --run DIR."""
    return Run.open(Path(arguments.run or "runs/reference-mamba"))


def load_run_model(arguments: argparse.Namespace, run: Run) -> LoadedModel:
    """The model a run was made with, from where it was, or from --model; refused when its weights differ."""
    arguments.model = arguments.model or run.identity.get("source") or run.identity.get("model")
    arguments.tokenizer = arguments.tokenizer or run.identity.get("tokenizer")
    model = load_model(arguments)
    known = run.identity.get("model_fingerprint")
    if known != model.fingerprint:
        raise RunError(f"{arguments.model} is not the model of {run.folder}: its weights differ")
    return model


def redraw(run: Run, tokenizer: Any) -> Windows:
    """The calibration windows of a run, drawn again."""
    from kl_lens.text import draw_windows

    identity = run.text_identity(CALIBRATION)
    if identity is None:
        raise RunError(f"{run.folder} holds no measurements of our own")
    return draw_windows(
        identity["source"],
        tokenizer,
        windows=identity["windows"],
        length=identity["length"],
        seed=identity["seed"],
        split=identity["split"],
    )


def add_held_out(parser: Any, windows: int) -> None:
    """--held-out TEXT --held-out-windows N, on a parser or a group of arguments."""
    parser.add_argument(
        "--held-out", default="wikitext2:valid", metavar="TEXT", help="default: wikitext2:valid"
    )
    parser.add_argument(
        "--held-out-windows", type=positive, default=windows, metavar="N", help=f"default: {windows}"
    )


def held_out_windows(arguments: argparse.Namespace, run: Run, tokenizer: Any) -> Windows:
    """The windows of --held-out, of the run's window length; refused where they overlap its calibration text."""
    from kl_lens.text import evaluation_windows, refuse_overlap

    text = run.text_identity(CALIBRATION)
    length = text["length"] if text else 512
    held_out = evaluation_windows(
        arguments.held_out, tokenizer, length=length, limit=arguments.held_out_windows
    )
    if text is not None:
        refuse_overlap(redraw(run, tokenizer), held_out)
    return held_out


def text_name(windows: Windows) -> str:
    return f"{windows.source}{':' + windows.split if windows.split else ''}"


def load_model(arguments: argparse.Namespace) -> LoadedModel:
    from kl_lens.checkpoints import load

    return load(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        revision=arguments.revision,
        tokenizer=arguments.tokenizer,
        trust_remote_code=arguments.trust_remote_code,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print records as JSON instead of a table")


def print_json(data: Any) -> None:
    """Strict JSON: what is not a number (an error that is not defined) becomes null."""
    json.dump(_finite(data), sys.stdout, indent=1, allow_nan=False)
    print()


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data


def run_folder(arguments: argparse.Namespace, model_name: str) -> Path:
    """--run DIR, or runs/<model>."""
    if arguments.run:
        return Path(arguments.run)
    return Path("runs") / re.sub(r"[^\w.-]+", "-", model_name).strip("-")


def rest(windows: Windows, first: int) -> Windows:
    """The windows from `first` on."""
    return replace(
        windows, ids=windows.ids[first:], starts=windows.starts[first:], documents=windows.documents[first:]
    )
