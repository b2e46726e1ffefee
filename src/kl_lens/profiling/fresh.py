"""Peak memory of a process that loads an artifact and generates a little: a fresh one, not the benchmark's own.

The number is read inside the fresh process, from VmHWM. What its parent could ask for (`ru_maxrss`) is wrong here:
Linux lets a child inherit the peak of the process that started it, and a benchmark is large.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kl_lens.environment import for_child
from kl_lens.errors import TargetError
from kl_lens.profiling.memory import MemoryUse
from kl_lens.targets import TARGETS, SessionSettings

CHILD = "kl_lens.profiling.peak"


def fresh_process(place: Path, target: str, settings: SessionSettings, new_tokens: int = 0) -> MemoryUse:
    """Loads the artifact in a process of its own; a file that makes the runtime crash ends only that process.

    `new_tokens` are timed after the few that it generates in any case.
    """
    arguments = [str(place), "--target", target, TARGETS[target], "--device", settings.device]
    arguments += ["--gpu-layers", str(settings.gpu_layers), "--load", settings.load]
    arguments += ["--new-tokens", str(new_tokens)]
    if settings.threads is not None:
        arguments += ["--threads", str(settings.threads)]
    command = [sys.executable, "-m", CHILD, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=for_child())
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reason = lines[-1] if lines and done.returncode > 0 else f"the process ended with {done.returncode}"
        raise TargetError(reason if str(place) in reason else f"{place} cannot be loaded: {reason}")
    return MemoryUse.from_json(json.loads(done.stdout.splitlines()[-1]))
