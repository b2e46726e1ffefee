"""AutoRound's own GGUF files, for `rivals.py --files FOLDER`. Needs `pip install auto-round` beside KL Lens.

    python benchmarks/auto_round_files.py FOLDER [--models reference:mamba2,…] [--schemes q2_k_s,q3_k_s]
                                          [--iterations 200] [--windows 64] [--length 128]

AutoRound tunes each block on windows of WikiText-2 train and writes FOLDER/MODEL/auto-round-SCHEME.gguf itself. Its
compiler is off, because tracing Mamba's loop over time did not end within eight minutes. Its converter knows tokenizers
by their digest and refuses ours, so it is told their name (`gpt-2`); llama.cpp gets token ids here, so that has no
influence on the result.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kl_lens.checkpoints import load
from kl_lens.text import draw_windows
from rivals import REFERENCES, STRESSED_PREFIX, models, shown
from stress import plant


def name_tokenizers() -> None:
    exporting = importlib.import_module("auto_round.export.export_to_gguf.export")
    get_conversion = exporting.get_conversion

    def with_names(*words: Any, **more: Any) -> Any:
        found = get_conversion(*words, **more)
        base = importlib.import_module(f"{found.module.__name__}.base")
        base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
        return found

    exporting.get_conversion = with_names


def main() -> None:
    from auto_round import AutoRound

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=",".join(REFERENCES), help="names, or folders of models")
    parser.add_argument("--schemes", default="q2_k_s,q3_k_s")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=128)
    arguments = parser.parse_args()
    name_tokenizers()
    for name in models(arguments.models):
        for scheme in arguments.schemes.split(","):
            model = load(name.removeprefix(STRESSED_PREFIX))
            if name.startswith(STRESSED_PREFIX):
                plant(model, model.source)
            tokenizer = model.require_tokenizer()
            windows = draw_windows(
                "wikitext2:train", tokenizer, windows=arguments.windows, length=arguments.length, seed=43
            )
            with tempfile.TemporaryDirectory() as place:
                source = Path(place) / "model"  # a checkpoint of its own: stressed models have none
                model.model.save_pretrained(source)
                tokenizer.save_pretrained(source)
                rounding = AutoRound(
                    str(source), scheme=f"gguf:{scheme}", iters=arguments.iterations, nsamples=len(windows),
                    seqlen=arguments.length, batch_size=8, dataset=[ids[None] for ids in windows.ids],
                    enable_torch_compile=False, device_map="cpu",
                )  # fmt: skip
                rounding.quantize_and_save(str(Path(place) / "out"), format=f"gguf:{scheme}")
                (made,) = Path(place).glob("out/**/*.gguf")
                out = arguments.folder / shown(name).replace(":", "-") / f"auto-round-{scheme}.gguf"
                out.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(made, out)
            print(out, flush=True)


if __name__ == "__main__":
    main()
