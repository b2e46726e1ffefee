"""docs/command-line.md is what the program says of itself."""

from __future__ import annotations

import importlib.util

from tests.docs.markdown import ROOT


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("command_line", ROOT / "scripts/command_line.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    assert script.page() == written, "run: .venv/bin/python scripts/command_line.py > docs/command-line.md"
