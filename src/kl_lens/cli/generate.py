"""`kl-lens generate`: the text comes as it is made; then how fast it came."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from kl_lens.study.generate import GenerateResult


def as_json(result: GenerateResult) -> dict[str, Any]:
    return asdict(result)


def show(result: GenerateResult) -> None:
    print(
        f"[{result.prompt_tokens} prompt tokens at {result.prompt_tokens_per_second:.1f} tokens/s, "
        f"{result.new_tokens} new at {result.tokens_per_second:.1f} tokens/s "
        f"({result.ms_per_token:.2f} ms each), loaded in {result.load_seconds:.2f} s, "
        f"peak memory {result.peak_memory_bytes / 1e6:.0f} MB]",
        file=sys.stderr,
    )
