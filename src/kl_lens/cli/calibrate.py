"""`kl-lens calibrate`: what was gathered, and the next command."""

from __future__ import annotations

import shlex
from typing import Any

from kl_lens.cli.console import console
from kl_lens.study.calibrate import CalibrateResult


def as_json(result: CalibrateResult) -> dict[str, Any]:
    text = {name: result.text[name] for name in ("source", "split", "windows", "length", "seed")}
    shown = {
        "folder": str(result.folder),
        "digest": result.statistics.digest,
        "text": text,
        "notes": result.statistics.notes,
    }
    if result.rescaled:
        shown["rescaled"] = {r.vector: {"exponent": r.exponent, "error": r.error} for r in result.rescaled}
    return shown


def show(result: CalibrateResult) -> None:
    text, out = result.text, console()
    label = f"{text['source']}:{text['split']}" if text["split"] else text["source"]
    out.print(
        f"Statistics {result.statistics.digest} of {result.statistics.identity['model']}: {label}, {text['windows']} "
        f"windows of {text['length']} tokens, in {result.statistics.folder}"
    )
    if result.rescaled:
        pay = [one for one in result.rescaled if one.exponent]
        least = min((one.error for one in pay), default=1.0)
        out.print(
            f"Rescaled {len(pay)} of {len(result.rescaled)} norms; the error of the components after them falls to "
            f"{least:.2f} times at best" + ("" if pay else ". Nothing to gain, so no checkpoint was written"),
            soft_wrap=True,
        )
    command = ["measure", result.model, "--run", str(result.folder), "--formats", "int4-g64,int8"]
    out.print(f"Next: kl-lens {shlex.join(command)} --methods rtn,gptq", soft_wrap=True)
