"""The fenced blocks of the documentation, and what each kind of block promises.

```bash      commands of ours, run by the tests in the order of the page
```python    examples, run by the tests in the order of the page
```console   commands that cannot run everywhere; above it stands `<!-- not run: why -->`
```text      what a program prints
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
QUICKSTART = ROOT / "docs/quickstart.md"
PAGES = [README, QUICKSTART, *sorted(set(ROOT.glob("docs/**/*.md")) - {QUICKSTART})]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<tag>\w*)\n(?P<body>.*?)^ *```$", re.MULTILINE | re.DOTALL
)
_REASON = re.compile(r"<!-- not run: .+ -->\n\s*\Z")


@dataclass(frozen=True)
class Block:
    tag: str
    body: str
    line: int
    reason: bool  # a comment above says why it is not run


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            tag=match["tag"],
            body=match["body"],
            line=text.count("\n", 0, match.start()) + 1,
            reason=bool(_REASON.search(text[: match.start()])),
        )
        for match in _FENCE.finditer(text)
    ]


def commands(block: Block) -> list[list[str]]:
    """The words of each command; continued lines are one, remarks behind # are none."""
    lines = block.body.replace("\\\n", " ").splitlines()
    return [
        words for words in (shlex.split(line, comments=True) for line in lines) if words
    ]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))
