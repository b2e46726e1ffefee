"""Arguments that several verbs share, and how they become objects."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from kl_lens.errors import KLLensError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def console(*, stderr: bool = False) -> Console:
    """A console that keeps tables whole when the output is a file or a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 220, highlight=False)


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if optional else None,
        default="reference:mamba" if optional else None,
        help="folder, hub id, or reference:mamba | reference:mamba2 | reference:hybrid"
        + (" (default: reference:mamba)" if optional else ""),
    )
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument(
        "--tokenizer", metavar="PLACE", help="folder, tokenizer.json or hub id of another tokenizer"
    )
    group.add_argument("--dtype", default="float32", help="what to compute in (default: float32)")
    group.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the checkpoint"
    )


def load_model(arguments: argparse.Namespace) -> Any:
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
    json.dump(data, sys.stdout, indent=1)
    print()


def run_folder(arguments: argparse.Namespace, model_name: str) -> Path:
    """--run DIR, or runs/<model>."""
    if arguments.run:
        return Path(arguments.run)
    return Path("runs") / re.sub(r"[^\w.-]+", "-", model_name).strip("-")


def parse_bytes(text: str) -> int:
    """`90MB`, `1.5GiB`, `4096` → bytes."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]i?)?b?\s*", text.lower())
    if not match:
        raise KLLensError(f"{text!r} is no size; write something like 90MB, 1.5GiB or 4096")
    unit = match[2] or ""
    return int(float(match[1]) * (_BINARY.get(unit) or _UNITS[unit]))


def format_bytes(count: float) -> str:
    """Decimal units, as file managers and the paper use them."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError
