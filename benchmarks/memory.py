"""Predicted and measured peak memory of files in a context that is full: `--memory` counts with the predictions.

    python benchmarks/memory.py reference:hybrid,hybrid-0.1b,FOLDER [--contexts 1024,2048] [--targets gguf,openvino]
                                [--write docs/results/memory.csv]

Each file runs in a fresh process with one thread (`kl_lens.profiling.memory`). `hybrid-0.1b` is random, with 113
million weights. Caches are the runtime's own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from common import machine, shown  # isort: skip  (first: it sets the environment that torch reads)
import torch
import transformers

from kl_lens.model import LoadedModel, load
from kl_lens.model.carried import carried_by
from kl_lens.profiling.memory import fresh_process
from kl_lens.run.records import Plan
from kl_lens.study.memory import held_by
from kl_lens.targets import SessionSettings, get_target
from kl_lens.targets.abilities import Usage
from kl_lens.weights.recipes import FP16, Recipe, fitting_recipe
from result_files import Row, options, write

FORMATS = {"gguf": (FP16, "q8_0", "q4_0"), "openvino": (FP16, "int8", "int4-g32")}
RANDOM = "hybrid-0.1b"


def opened(name: str) -> LoadedModel:
    if name != RANDOM:
        return load(name)
    torch.manual_seed(0)
    config = transformers.FalconH1Config(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=10,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        mamba_d_ssm=1536,
        mamba_n_heads=24,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_n_groups=1,
        tie_word_embeddings=True,
        max_position_embeddings=16384,
    )
    model = transformers.FalconH1ForCausalLM(config).eval().requires_grad_(False)
    return LoadedModel(
        name, Path(), model, load("reference:hybrid").tokenizer, source=name
    )


def rows(
    name: str, model: LoadedModel, target_name: str, contexts: list[int]
) -> list[Row]:
    table = []
    target = get_target(target_name)
    carried = carried_by(model.config, name)
    for fmt in FORMATS[target_name]:
        recipes = {
            c.name: fitting_recipe(Recipe(fmt), c.shape)[0]
            for c in model.anatomy.candidates
        }
        with tempfile.TemporaryDirectory() as folder:
            artifact = Path(folder) / "file"
            target.export(
                model,
                Plan("file", {k: str(r) for k, r in recipes.items()}, "memory.py"),
                artifact,
            )
            file = target.loaded_bytes(artifact)
            for context in contexts:
                usage = held_by(target, carried, Usage(context), quantized=fmt != FP16)
                copies = target.footprint(quantized=fmt != FP16).copies
                expected = usage.bytes({}) + copies * file
                peak = fresh_process(
                    artifact, target_name, SessionSettings(threads=1, context=context)
                ).peak_bytes
                table.append(
                    {
                        "model": name,
                        "runtime": target.title,
                        "weights": fmt,
                        "context": str(context),
                        "file": str(file),
                        "states": str(usage.states),
                        "caches": str(usage.bytes({}) - usage.fixed),
                        "predicted": f"{expected:.0f}",
                        "measured": str(peak),
                        "off": f"{expected / peak - 1:+.1%}",
                    }
                )
                print(*table[-1].values(), sep="; ", flush=True)
    return table


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("models")
    parser.add_argument("--contexts", default="1024,2048")
    parser.add_argument("--targets", default="gguf,openvino")
    arguments = parser.parse_args()
    print(machine())
    for name in arguments.models.split(","):
        model = opened(name)
        for target in arguments.targets.split(","):
            new = rows(
                shown(name),
                model,
                target,
                [int(context) for context in arguments.contexts.split(",")],
            )
            write(
                arguments.write,
                new,
                ("model", "runtime", "weights", "context", "machine"),
            )


if __name__ == "__main__":
    main()
