"""`kl-lens generate ARTIFACT --prompt TEXT`: text from an exported model, and how fast it came."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from kl_lens.cli import options
from kl_lens.errors import TargetError
from kl_lens.targets import open_session
from kl_lens.targets.session import Logits, Session
from kl_lens.targets.tokenizer import ArtifactTokenizer, find_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path, help="an exported folder, or a .gguf file")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument(
        "--max-new-tokens", type=options.positive, default=64, metavar="N", help="default: 64"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default: 0, the likeliest token"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="for a temperature above 0 (default: 0)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PLACE",
        help="folder, tokenizer.json or hub id (default: beside the artifact, or inside a .gguf file)",
    )
    parser.add_argument("--device", default="CPU", help="OpenVINO device (default: CPU)")
    parser.add_argument(
        "--threads", type=options.positive, metavar="N", help="default: the runtime's own choice"
    )
    parser.add_argument("--gpu-layers", type=int, default=0, metavar="N", help="llama.cpp: layers on a GPU")
    options.add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    if arguments.temperature < 0:
        raise TargetError("--temperature must not be negative")
    begin = time.perf_counter()
    session = open_session(
        arguments.artifact,
        device=arguments.device,
        threads=arguments.threads,
        gpu_layers=arguments.gpu_layers,
    )
    load_seconds = time.perf_counter() - begin
    try:
        tokenizer = find_tokenizer(session, arguments.artifact, arguments.tokenizer)
        ids = tokenizer.encode(arguments.prompt)
        if not ids:
            raise TargetError("the prompt holds no tokens")
        result = _generate(arguments, session, tokenizer, ids)
    finally:
        session.close()
    result["load_seconds"] = load_seconds
    result["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if arguments.json:
        options.print_json(result)
    else:
        print(
            f"\n[{result['prompt_tokens']} prompt tokens at {result['prompt_tokens_per_second']:.1f} tokens/s, "
            f"{result['new_tokens']} new at {result['tokens_per_second']:.1f} tokens/s "
            f"({result['ms_per_token']:.2f} ms each), loaded in {load_seconds:.2f} s, "
            f"peak memory {result['peak_memory_bytes'] / 1e6:.0f} MB]",
            file=sys.stderr,
        )
    return 0


def _generate(
    arguments: argparse.Namespace, session: Session, text: ArtifactTokenizer, ids: list[int]
) -> dict[str, Any]:
    random = np.random.default_rng(arguments.seed)
    session.reset()
    begin = time.perf_counter()
    logits = session.prefill(ids)
    prompt_seconds = time.perf_counter() - begin
    if not arguments.json:
        print(arguments.prompt, end="", flush=True)
    new: list[int] = []
    shown = ""
    begin = time.perf_counter()
    for _ in range(arguments.max_new_tokens):
        token = _choose(logits, arguments.temperature, random)
        if token in text.ends:
            break
        new.append(token)
        whole = text.decode(new)
        # A character can be spread over several tokens; wait until it is whole.
        if not arguments.json and not whole.endswith("\ufffd"):
            print(whole[len(shown) :], end="", flush=True)
            shown = whole
        logits = session.step(token)
    seconds = time.perf_counter() - begin
    return {
        "prompt": arguments.prompt,
        "text": text.decode(new),
        "prompt_tokens": len(ids),
        "new_tokens": len(new),
        "prompt_tokens_per_second": len(ids) / max(prompt_seconds, 1e-9),
        "tokens_per_second": len(new) / max(seconds, 1e-9),
        "ms_per_token": 1000 * seconds / max(1, len(new)),
        "runtime": session.description,
    }


def _choose(logits: Logits, temperature: float, random: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return int(random.choice(len(weights), p=weights / weights.sum()))
