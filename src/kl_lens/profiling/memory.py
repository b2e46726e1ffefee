"""Peak memory of a fresh process that loads an artifact and generates a little.

The process reads the number itself, because on Linux a parent sees its own peak in that of its child, and a benchmark
is large.

python -m kl_lens.profiling.memory ARTIFACT TARGET MODULE:CLASS SETTINGS
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from kl_lens.base.environment import for_child
from kl_lens.base.errors import KLLensError, TargetError
from kl_lens.base.system import peak_memory, resident_memory
from kl_lens.run.records import Record
from kl_lens.targets import TARGETS, SessionSettings, get_target, register

PROMPT_TOKENS = 32
NEW_TOKENS = 8  # unless a context is asked for: that is filled, a chunk at a time
CHUNK = 512


@dataclass(frozen=True)
class MemoryUse(Record):
    """Resident memory of one fresh process, mapped pages of the model's file included."""

    base_bytes: int  # the interpreter and its libraries, before the model is loaded
    peak_bytes: int  # largest, from start to end

    @property
    def model_bytes(self) -> int:
        """Memory added by loading and running the model."""
        return self.peak_bytes - self.base_bytes


def fresh_process(path: Path, target: str, settings: SessionSettings) -> MemoryUse:
    """Loads the artifact in its own process, so that a crash of the runtime ends only that process."""
    arguments = [str(path), target, TARGETS[target], json.dumps(asdict(settings))]
    result = subprocess.run(
        [sys.executable, "-m", __name__, *arguments],
        capture_output=True,
        text=True,
        env=for_child(),
    )
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = f"the process ended with code {result.returncode}"
        if lines and result.returncode > 0:
            reason = lines[-1]
        if str(path) not in reason:
            reason = f"{path} cannot be loaded: {reason}"
        raise TargetError(reason)
    return MemoryUse.from_json(json.loads(result.stdout.splitlines()[-1]))


def main(path: str, name: str, module: str, settings: str) -> int:
    try:
        register(name, module)
        target = get_target(name)
        target.prepare()  # libraries count as base; loading the model starts after them
        base = resident_memory()
        runtime = SessionSettings(**json.loads(settings))
        session = target.open(Path(path), runtime)
        prompt = PROMPT_TOKENS
        if runtime.context:
            prompt = max(1, runtime.context - NEW_TOKENS)
        for first in range(0, prompt, CHUNK):
            ids = range(first, min(first + CHUNK, prompt))
            logits = session.prefill([index % session.vocabulary for index in ids])
        for _ in range(NEW_TOKENS):
            logits = session.step(int(logits.argmax()))
        use = MemoryUse(base, peak_memory())
        session.close()
    except KLLensError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(use.to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
