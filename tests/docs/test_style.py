"""`scripts/style.py`, which `./test` runs, names what the formatter and the linter do not see."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import style

SKIP = "# fmt" + ": skip"  # in one piece it would be a fault of this file
SOURCE = f"""
width, height = 1, 2
height, width = width, height
first, rest = pair()
table = [1, 0,
         0, 1]  {SKIP}
def sized(found): return found
"""


@pytest.mark.parametrize(
    ("limits", "lines"),
    [
        ((0, 1.0), ["src/a.py:2: several values in one statement"]),
        ((1, 0.0), ["src/a.py:4: rest", "src/a.py:7: found"]),
        ((1, 0.25), []),
    ],
)
def test_it_names_file_line_and_what(
    limits: tuple[int, float], lines: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text(SOURCE)
    monkeypatch.setattr(style, "ROOT", tmp_path)
    monkeypatch.setattr(style, "LIMITS", {"src": limits})
    assert style.main() == 1
    output = capsys.readouterr().out.splitlines()
    named = [line for line in output if line.startswith("src/a.py")]
    assert sorted(named) == sorted(
        [*lines, f"src/a.py:6: 0, 1]  {SKIP}"]
    )  # none is allowed
    assert output[-1].startswith("src: ")
