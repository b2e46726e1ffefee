"""`kl-lens generate`: the text is printed while it is made; then come the speeds."""

from __future__ import annotations

import sys

from kl_lens.study.generate import GenerateResult


def show(result: GenerateResult) -> None:
    print(
        f"[{result.prompt_tokens} prompt tokens at {result.prompt_tokens_per_second:.1f} tokens/s, "
        f"{result.new_tokens} new at {result.tokens_per_second:.1f} tokens/s "
        f"({result.ms_per_token:.2f} ms each), loaded in {result.load_seconds:.2f} s, "
        f"peak memory {result.peak_memory_bytes / 1e6:.0f} MB]",
        file=sys.stderr,
    )
