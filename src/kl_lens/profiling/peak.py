"""The child process of `fresh.fresh_process`: loads an artifact, generates a little, prints its memory use.

python -m kl_lens.profiling.peak ARTIFACT [--device CPU] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from kl_lens.base.errors import KLLensError
from kl_lens.profiling.memory import MemoryUse, resident
from kl_lens.targets import SessionSettings, register, target_of

PROMPT_TOKENS, NEW_TOKENS = 32, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("artifact", type=Path)
    parser.add_argument(
        "--target", nargs=2, metavar=("NAME", "MODULE:CLASS"), help="target to register first"
    )
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gpu-layers", type=int, default=0)
    parser.add_argument("--load", default="auto")
    options = parser.parse_args()
    try:
        if options.target:
            register(*options.target)
        target = target_of(options.artifact)
        target.prepare()  # libraries count as base; loading the model starts after them
        base = resident("VmRSS")
        settings = SessionSettings(options.device, options.threads, options.gpu_layers, load=options.load)
        started = time.perf_counter()
        # Cold: a cached compiled graph would hide the compiler's memory.
        session = target.open(options.artifact, settings, cold=True)
        loaded = time.perf_counter() - started
        logits = session.prefill([index % session.vocabulary for index in range(PROMPT_TOKENS)])
        for _ in range(NEW_TOKENS):
            logits = session.step(int(logits.argmax()))
        use = MemoryUse(base, resident("VmHWM"), loaded)
        session.close()
    except KLLensError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(use.to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
