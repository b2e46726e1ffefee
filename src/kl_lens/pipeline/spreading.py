"""One sweep, several processes: shares by hand or by a queue, and workers that Ray keeps."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from kl_lens.errors import KLLensError

SLURM = "slurm"


def share_of(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """`3/16` → the third of sixteen; `slurm` → what the variables of a Slurm array say."""
    if text == SLURM:
        return _slurm(environment)
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        raise KLLensError(f"--shard {text}: write 3/16 for the third of sixteen, or {SLURM} in a job array")
    return index, count


def _slurm(environment: Mapping[str, str]) -> tuple[int, int]:
    def number(name: str, default: int | None = None) -> int:
        text = environment.get(f"SLURM_ARRAY_TASK_{name}", "" if default is None else str(default))
        if not re.fullmatch(r"\d{1,9}", text):
            raise KLLensError(
                f"--shard {SLURM}: SLURM_ARRAY_TASK_{name} is {text or 'not set'}; submit a job array "
                "(sbatch --array=1-16), or write --shard 3/16"
            )
        return int(text)

    place, count = number("ID"), number("COUNT")
    first, step = number("MIN", 1), max(1, number("STEP", 1))
    index, off = divmod(place - first, step)
    if off or not 0 <= index < count:
        raise KLLensError(
            f"--shard {SLURM}: task {place} is none of {count} that begin at {first} in steps of {step}; "
            "give the array as one range (sbatch --array=1-16)"
        )
    return index + 1, count


def shard_name(index: int, count: int) -> str:
    """Folders in the order of their numbers."""
    return f"{index:0{len(str(count))}}-of-{count}"
