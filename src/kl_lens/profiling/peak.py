"""The fresh process of `memory.fresh_process`: loads an artifact, generates a little, prints what memory that took.

python -m kl_lens.profiling.peak ARTIFACT [--device CPU] [--threads N] [--prompt 32] [--new-tokens 8]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from kl_lens.errors import KLLensError
from kl_lens.profiling.memory import MemoryUse, resident
from kl_lens.targets import open_session, read_artifact
from kl_lens.targets.registry import target_module
from kl_lens.targets.session import Session


def open_cold(path: Path, device: str, threads: int | None, gpu_layers: int) -> Session:
    """A session as on the first day: without a compiled graph from earlier, which would hide the compiler's memory."""
    if path.suffix != ".gguf" and read_artifact(path).target == "openvino":
        return target_module("openvino").open_session(path, device=device, threads=threads, cache=False)
    return open_session(path, device=device, threads=threads, gpu_layers=gpu_layers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gpu-layers", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=8)
    options = parser.parse_args()
    try:
        path: Path = options.artifact
        # The target's libraries belong to the base; loading the model begins after them.
        if path.suffix == ".gguf" or read_artifact(path).target == "gguf":
            target_module("gguf")
            from kl_lens.targets.gguf.library import find_library

            find_library()
        else:
            target_module("openvino")
        base = resident("VmRSS")
        started = time.perf_counter()
        session = open_cold(path, options.device, options.threads, options.gpu_layers)
        loaded = time.perf_counter() - started
        logits = session.prefill([index % session.vocabulary for index in range(options.prompt)])
        for _ in range(options.new_tokens):
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
