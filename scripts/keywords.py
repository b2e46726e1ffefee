"""Writes src/kl_lens/study/typed.pyi: the keywords of `Study` and of `kl_lens.evaluate`, … for type checkers.

`python scripts/keywords.py`. They come from the settings of the verbs; a test fails when they differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kl_lens.study import study
from kl_lens.study.keywords import _Verb, annotation

STUB = Path(__file__).resolve().parents[1] / "src/kl_lens/study/typed.pyi"


def keywords() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield '"""Made by scripts/keywords.py."""\n'
    yield "from collections.abc import Sequence"
    yield "from pathlib import Path"
    yield "from typing import Literal, TypedDict"
    for home, suffix in ((study.Study, ""), (study, "Alone")):
        for name, function in vars(home).items():
            if isinstance(function, _Verb):
                yield f"\nclass {name.capitalize()}{suffix}(TypedDict, total=False):"
                yield from (f"    {o.name}: {annotation(o)}" for o in function.options)


if __name__ == "__main__":
    STUB.write_text(keywords(), encoding="utf-8")
