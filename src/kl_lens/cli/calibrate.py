"""`kl-lens calibrate`: what was gathered, and the next command."""

from __future__ import annotations

import shlex
from typing import Any

from kl_lens.cli.console import console
from kl_lens.study.calibrate import CalibrateResult


def as_json(result: CalibrateResult) -> dict[str, Any]:
    text = {name: result.text[name] for name in ("source", "split", "windows", "length", "seed")}
    return {
        "folder": str(result.folder),
        "digest": result.statistics.digest,
        "text": text,
        "notes": result.statistics.notes,
    }


def show(result: CalibrateResult) -> None:
    text, out = result.text, console()
    label = f"{text['source']}:{text['split']}" if text["split"] else text["source"]
    out.print(
        f"Statistics {result.statistics.digest} of {result.statistics.identity['model']}: {label}, {text['windows']} "
        f"windows of {text['length']} tokens, in {result.statistics.folder}"
    )
    command = ["measure", result.model, "--run", str(result.folder), "--formats", "int4-g64,int4-g64+gptq"]
    out.print(f"Next: kl-lens {shlex.join(command)}", soft_wrap=True)
