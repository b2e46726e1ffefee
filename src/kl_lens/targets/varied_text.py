"""Varied strings for comparing two implementations of a tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

_WORDS = (
    "the", "a", "of", "model", "state", "Mamba", "don't", "I'll", "we've", "they're", "naïve", "café", "Straße",
    "l'été", "mañana", "über", "İstanbul",
)  # fmt: skip
_CODE = (
    "def f(x: int) -> int:\n    return x ** 2\n", "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    '{"key": [1, 2.5e-3, null]}', "SELECT * FROM t WHERE x >= 10;", "#include <vector>\n", "x = y if z else w  # note",
    '<div class="a">&nbsp;</div>', "\tif err != nil {\n\t\treturn err\n\t}\n", "https://example.org/a?b=c&d=%20e",
    "C:\\path\\to\\file.txt", "-----", "===", "!!!???", "...",
)  # fmt: skip
_SCRIPTS = (
    "今天天气很好", "言語モデルは面白いです", "안녕하세요", "مرحبا بالعالم", "שלום עולם", "Привет, мир",
    "Γεια σου", "नमस्ते", "สวัสดีชาวโลก", "e\u0301a\u0308n\u0303",  # the last: combining accents
)  # fmt: skip
_EMOJI = ("😀", "🎉🎊", "👩\u200d💻", "🇩🇪", "👍🏽", "❤\ufe0f", "🫠")
_SPACES = (
    " ", "  ", "   ", " " * 7, " " * 17, "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", " \n ", "\u00a0", "\u3000",
    "\u2009",
)  # fmt: skip
_MARKS = ".,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+~`"


def varied_strings(count: int, *, special: Sequence[str] = (), seed: int = 0) -> list[str]:
    """Words, code, numbers, emoji, several scripts, runs of spaces and the given special tokens, mixed at random."""
    draw = random.Random(seed)
    kinds = [
        lambda: draw.choice(_WORDS),
        lambda: draw.choice(_WORDS).upper(),
        lambda: " ".join(draw.choices(_WORDS, k=draw.randint(2, 8))),
        lambda: draw.choice(_CODE),
        lambda: str(draw.randrange(10 ** draw.randint(1, 12))),
        lambda: f"{draw.uniform(-1e6, 1e6):.{draw.randint(0, 6)}f}",
        lambda: f"{draw.randrange(10**7):,}",
        lambda: draw.choice(_EMOJI),
        lambda: draw.choice(_SCRIPTS),
        lambda: draw.choice(_SPACES),
        lambda: draw.choice(_MARKS) * draw.randint(1, 4),
        lambda: "".join(draw.choices("abcdefghijklmnopqrstuvwxyzABCDEFXYZ0123456789", k=draw.randint(1, 12))),
        lambda: chr(draw.choice((draw.randrange(0x20, 0x250), draw.randrange(0x370, 0x3000)))),
    ]
    if special:
        kinds.append(lambda: draw.choice(special))
    return [
        "".join(draw.choice(kinds)() + draw.choice(("", " ")) for _ in range(draw.randint(1, 10)))
        for _ in range(count)
    ]


def other_ids(own: Sequence[int], expected: Sequence[int], tokenizer: Any) -> str:
    """Where two lists of ids for one text part, in words."""
    at = next(i for i, (one, two) in enumerate(zip_longest(own, expected)) if one != two)
    parts = list(own[at : at + 4]), list(expected[at : at + 4])
    return f"{tokenizer.decode(parts[1])!r} becomes {parts[0]}, not {parts[1]}"
