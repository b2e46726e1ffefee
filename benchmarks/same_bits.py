"""Whether two builds of llama.cpp compute the same: logits of tiny models in every type, bit by bit.

    python benchmarks/same_bits.py LIBRARY OTHER

A prompt of 75 tokens and six steps, on one thread and on two. "tiles": every matrix has rows in multiples of 32, which
unpatched ggml puts on AMX; "sixteens": some do not, and sums in another order may differ in the last bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# A file in this folder has the name of a package that is needed.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

PROMPT, STEPS = 75, 6
_INSIDE = "--inside"  # in the process that has one of the libraries


def main() -> None:
    if sys.argv[1:] == [_INSIDE]:
        print(json.dumps(logits()))
        return
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    one, other = (_run(library) for library in sys.argv[1:])
    for name, values in one.items():
        largest = max(abs(a - b) for a, b in zip(values, other[name], strict=True))
        print(
            f"{name:28s} {'the same bits' if values == other[name] else f'differs by {largest:.1e} at most'}"
        )


def _run(library: str) -> dict[str, list[float]]:
    command = [sys.executable, __file__, _INSIDE]
    done = subprocess.run(
        command, env={**os.environ, "LLAMA_CPP_LIB": library}, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def logits() -> dict[str, list[float]]:
    import numpy as np

    from kl_lens.formats.ggml import gguf_module
    from kl_lens.targets.gguf import trial
    from kl_lens.targets.gguf.session import open_session

    types, found = gguf_module().GGMLQuantizationType, {}
    with tempfile.TemporaryDirectory() as folder:
        for rows, vocabulary, heads in (("tiles", 512, 32), ("sixteens", 528, 16)):
            trial._VOCABULARY, trial._RANK["mamba2"] = vocabulary, heads
            inputs = trial._INNER + trial._CHANNELS["mamba2"] + heads
            trial._PRODUCTS["mamba2"]["blk.0.ssm_in.weight"] = (inputs, trial._WIDTH)
            for model, products in trial._PRODUCTS.items():
                products["token_embd.weight"] = (vocabulary, trial._WIDTH)
                for kind in ("F16", *trial._FACTORS):
                    random, path = np.random.default_rng(0), Path(folder) / "tiny.gguf"
                    stored = {
                        name: trial.random_blocks(kind, shape, random) for name, shape in products.items()
                    }
                    trial.write_model(path, model, stored, types[kind])
                    for threads in (1, 2):
                        with open_session(path, threads=threads) as session:
                            prompt = session.logits([7 * index % vocabulary for index in range(PROMPT)])
                            steps = [session.step(3 + index) for index in range(STEPS)]
                        values = np.concatenate([prompt.ravel(), *steps]).astype(float)
                        found[f"{rows} {model} {kind} {threads}"] = values.tolist()
    return found


if __name__ == "__main__":
    main()
