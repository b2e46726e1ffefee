"""The Python examples run, and the page of the API has every public name with its signature.

To be quick, examples run with less text than the page says; `SHORTER` says how much less.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from kl_lens.text import wikitext2
from tests.docs.markdown import ROOT, blocks, page_name

SHORTER = {
    "windows=8": "windows=2, window_length=32",
    "study.calibrate()": "study.calibrate(windows=2, window_length=32)",
    "study.measure(windows=4)": "study.measure(windows=2, window_length=32)",
    "window=512, limit=8": "window=64, limit=2",
    "repeats=3)": "repeats=1, prompt_lengths=(8,), new_tokens=2)",
    "limit=20": "window=64, limit=2",
}
PAGE = ROOT / "docs/python-api.md"
PACKAGES = re.findall(r"^## (kl_lens\S*)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(ROOT / "README.md", marks=pytest.mark.slow),
        pytest.param(ROOT / "docs/quickstart.md", marks=pytest.mark.slow),
        PAGE,
    ],
    ids=page_name,
)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino", reason="needs kl-lens[openvino]")
    pytest.importorskip("gguf", reason="needs kl-lens[gguf]")
    monkeypatch.chdir(tmp_path)
    articles = wikitext2("valid").documents[:6]
    (tmp_path / "notes.txt").write_text("\n\n".join(d.text for d in articles), encoding="utf-8")
    names: dict[str, object] = {"__name__": "example"}
    examples = [block for block in blocks(page) if block.tag == "python"]
    assert examples
    for block in examples:
        body = block.body
        for long, short in SHORTER.items():
            body = body.replace(long, short)
        exec(compile("\n" * block.line + body, str(page), "exec"), names)


def sections() -> dict[str, str]:
    """Package → what the page says of it."""
    parts = re.split(r"^## (kl_lens\S*)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package: str) -> None:
    spoken_of = set(re.findall(r"`(\w+)[`(]", sections()[package]))
    assert set(importlib.import_module(package).__all__) <= spoken_of


@pytest.mark.parametrize("package", PACKAGES)
def test_signatures_are_right(package: str) -> None:
    module = importlib.import_module(package)
    for name, shown in re.findall(r"`(\w+)(\([^`]*\))`", sections()[package]):
        if name not in module.__all__:
            continue
        real = inspect.signature(getattr(module, name))
        assert " ".join(shown.split()) in _written(real), f"{package}.{name}"


def _written(signature: inspect.Signature) -> tuple[str, str]:
    """A signature without types; and the same with defaults left out that are made anew for each object."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    plain = [
        p.replace(default=inspect.Parameter.empty, kind=inspect.Parameter.KEYWORD_ONLY)
        if p.default is not inspect.Parameter.empty and ("<" in repr(p.default))
        else p
        for p in bare
    ]
    shown = "(" + ", ".join(str(p) for p in plain) + ")"
    return str(inspect.Signature(bare)), shown
