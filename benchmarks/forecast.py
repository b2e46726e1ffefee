"""What a command says is left, against what is left: a table of forecast and truth.

    python benchmarks/forecast.py run --run /tmp/both                # any command of kl-lens; both targets
    python benchmarks/forecast.py run MODEL --target gguf --run /tmp/130m
    python benchmarks/forecast.py autopsy FILE.gguf --model MODEL

The command runs in a terminal of its own; the times are those that its bar shows.
"""

from __future__ import annotations

import os
import pty
import re
import sys
import time

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)  # of the time from the first forecast to the end
FACTOR = 1.5  # most that it may be wrong from a quarter on
_LEFT = re.compile(rb"((?:\d+:)?\d+:\d\d) (?:left|in all)")


def seconds(clock: bytes) -> float:
    total = 0.0
    for part in clock.split(b":"):
        total = 60 * total + int(part)
    return total


def watched(words: list[str]) -> tuple[list[tuple[float, float]], float]:
    """When how much was said to be left, and when the command ended."""
    forecasts: list[tuple[float, float]] = []

    def read(terminal: int) -> bytes:
        data = os.read(terminal, 1 << 16)
        forecasts.extend(
            (time.monotonic(), seconds(clock)) for clock in _LEFT.findall(data)
        )
        return data

    os.environ |= {"COLUMNS": "120", "TERM": "xterm"}
    pty.spawn([sys.executable, "-m", "kl_lens.cli.main", *words], read)
    return forecasts, time.monotonic()


def main() -> None:
    forecasts, end = watched(sys.argv[1:] or ["--help"])
    if not forecasts:
        raise SystemExit(__doc__)
    begin = forecasts[0][0]
    whole = end - forecasts[0][0]
    print(
        f"\n{whole:.0f} s from the first forecast to the end\n\n| done | said, s | left, s | said / left |"
    )
    print("|---|---|---|---|")
    for share in SHARES:
        forecast = [
            remaining
            for moment, remaining in forecasts
            if moment <= begin + share * whole
        ][-1]
        true = (1 - share) * whole
        print(f"| {share:.0%} | {forecast:.0f} | {true:.0f} | {forecast / true:.2f} |")
    late = [
        remaining / (end - moment)
        for moment, remaining in forecasts
        if 0.25 <= (moment - begin) / whole <= 0.9
    ]
    inside = sum(1 / FACTOR < ratio < FACTOR for ratio in late) / len(late)
    print(
        f"\n25 % to 90 %: {min(late):.2f} to {max(late):.2f}; {inside:.0%} within {FACTOR}"
    )


if __name__ == "__main__":
    main()
