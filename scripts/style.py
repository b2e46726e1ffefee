"""What the formatter and the linter do not see: lines that the formatter may not touch, several values assigned in one
statement, and names that say nothing without their context.

    python scripts/style.py

Prints a line for each (file, line, what), and fails if there are more than `LIMITS` allows. `./test` runs it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Pronouns, participles and the like: of what? A name is a noun that says what it holds.
_WORDS = """
each found place places own known how what that those these this it its here there rest left given told asked said seen
kept one ones other others many much so such same thing things way ways now then still yet where when who whom whose
which mine theirs ours all any some none both held taken made gone done
"""
VAGUE = frozenset(_WORDS.split())
# Folder → packed statements, share of vague names.
LIMITS = {"src": (10, 0.01), "tests": (10, 0.02), "benchmarks": (5, 0.01)}
_SKIP = re.compile(r"#\s*fmt:\s*(skip|off)")


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Variables, arguments and attributes where they get their value, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def packed(tree: ast.AST) -> Iterator[int]:
    """Lines of `a, b = x, y`; a swap is none."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        values = {ast.unparse(value) for value in node.value.elts}
        for target in node.targets:
            targets = ast.unparse(target).strip("()").split(", ")
            several = isinstance(target, ast.Tuple) and len(target.elts) > 1
            if several and not values & set(targets):
                yield node.lineno


def main() -> int:
    failed = False
    for folder, (most_packed, most_vague) in LIMITS.items():
        lines: dict[str, list[str]] = {"skip": [], "packed": [], "vague": []}
        count = 0
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            file = path.relative_to(ROOT)
            for number, line in enumerate(text.splitlines(), 1):
                if _SKIP.search(line):
                    lines["skip"].append(f"{file}:{number}: {line.strip()}")
            for number in packed(tree):
                lines["packed"].append(
                    f"{file}:{number}: several values in one statement"
                )
            for number, name in names(tree):
                count += 1
                if name.strip("_") in VAGUE and name != "__all__":
                    lines["vague"].append(f"{file}:{number}: {name}")
        limits = {"skip": 0, "packed": most_packed, "vague": int(most_vague * count)}
        for kind, most in limits.items():
            if len(lines[kind]) > most:
                failed = True
                print(*lines[kind], sep="\n")
                print(f"{folder}: {len(lines[kind])} × {kind}, at most {most}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
