"""Peak memory of a fresh process that loads an artifact and generates a little.

The number is read inside that process, from VmHWM. `ru_maxrss`, which the parent could read, is wrong here: on Linux a
child inherits the peak of the process that started it, and a benchmark is large.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kl_lens.base.environment import for_child
from kl_lens.base.errors import TargetError
from kl_lens.profiling.memory import MemoryUse
from kl_lens.targets import TARGETS, SessionSettings

CHILD = "kl_lens.profiling.peak"


def fresh_process(place: Path, target: str, settings: SessionSettings) -> MemoryUse:
    """Loads the artifact in its own process, so that a crash of the runtime ends only that process."""
    arguments = [str(place), "--target", target, TARGETS[target], "--device", settings.device]
    arguments += ["--gpu-layers", str(settings.gpu_layers), "--load", settings.load]
    if settings.threads is not None:
        arguments += ["--threads", str(settings.threads)]
    command = [sys.executable, "-m", CHILD, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=for_child())
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reason = (
            lines[-1] if lines and done.returncode > 0 else f"the process ended with code {done.returncode}"
        )
        raise TargetError(reason if str(place) in reason else f"{place} cannot be loaded: {reason}")
    return MemoryUse.from_json(json.loads(done.stdout.splitlines()[-1]))
