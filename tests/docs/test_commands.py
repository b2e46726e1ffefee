"""Every command in the documentation parses, and those that can run anywhere are run, in the order of their page.

To be quick, commands run with less text and fewer repeats than the page says; `SHORTER` says how much less. All pages
share one folder: the quick start makes the run that the others go on from.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kl_lens.cli.main import main, parse
from kl_lens.text import wikitext2
from tests.docs.markdown import PAGES, ROOT, Block, blocks, commands

RUN, NOT_RUN, PYTHON, OUTPUT = "bash", "console", "python", "text"
SHORTER = {
    "measure": {"--windows": "2", "--window-length": "32"},
    "rank": {"--evaluation-windows": "2"},
    "plan": {"--held-out-windows": "4", "--max-evaluations": "2"},
    "export": {"--held-out-windows": "2"},
    "evaluate": {"--window": "64", "--limit": "3"},
    "benchmark": {"--repeats": "1", "--prompt-lengths": "8", "--new-tokens": "2"},
    "generate": {"--max-new-tokens": "4"},
}
# What has to change with it, where a page names it: limits of time depend on the machine.
INSTEAD = {"--stride": "32", "--max-latency": "100s", "--task-limit": "2"}
# benchmark_app takes a minute for each file otherwise.
ADDED = {"--protocol": ["--quick"]}
# Exercised as a whole in tests/cli; here its words are only understood.
PARSED_ONLY = ("run",)


def kl_lens_commands(page: Path, tag: str) -> list[tuple[int, list[str]]]:
    """(line of the block, words behind `kl-lens`) of all blocks with this tag."""
    return [
        (block.line, words[1:])
        for block in blocks(page)
        if block.tag == tag
        for words in commands(block)
        if words[0] in ("kl-lens", "./run")
    ]


def shortened(words: Sequence[str]) -> list[str]:
    verb = words[0]
    kept = list(words)
    for flag, value in INSTEAD.items():
        if flag in kept:
            kept[kept.index(flag) + 1] = value
    added = [word for pair in SHORTER.get(verb, {}).items() for word in pair]
    return kept + added + [word for flag, words in ADDED.items() if flag in kept for word in words]


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse(words)  # as the page has it
    if words[0] in PARSED_ONLY and not any(word.startswith("--write-config") for word in words):
        return
    monkeypatch.setattr(sys, "argv", ["kl-lens", *shortened(words)])
    assert main(shortened(words)) == 0, f"kl-lens {' '.join(shortened(words))}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: a model, some text, some tasks, under the names that the pages use."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "reference/mamba2", folder / "my-model")
    articles = wikitext2("valid").documents
    (folder / "notes.txt").write_text("\n\n".join(d.text for d in articles[:6]), encoding="utf-8")
    (folder / "other-notes.txt").write_text("\n\n".join(d.text for d in articles[6:12]), encoding="utf-8")
    (folder / "tasks").mkdir()
    rows = [
        {"query": "The capital of France is", "choices": ["Paris", "green"], "gold": 0},
        {"query": "Water is made of hydrogen and", "choices": ["music", "oxygen"], "gold": 1},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "tasks/arc_easy_test.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def quickstart(folder: Path) -> Path:
    """The folder after every command of the quick start."""
    pytest.importorskip("openvino", reason="needs kl-lens[openvino]")
    pytest.importorskip("gguf", reason="needs kl-lens[gguf]")
    pytest.importorskip("lm_eval", reason="needs kl-lens[eval]")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for _, words in kl_lens_commands(PAGES[0], RUN):
            run(words, patch)
    return folder


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_commands_run(page: Path, quickstart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(quickstart)
    for _, words in kl_lens_commands(page, RUN):
        run(words, monkeypatch)


def test_quickstart_leaves_what_it_promises(quickstart: Path) -> None:
    run_folder = quickstart / "runs/mamba"
    assert (run_folder / "report.html").stat().st_size > 10_000
    assert list(run_folder.glob("artifacts/openvino/*/openvino_model.xml"))
    assert list(run_folder.glob("artifacts/gguf/*/*.gguf"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_are_not_run_parse(page: Path) -> None:
    for _, words in kl_lens_commands(page, NOT_RUN):
        parse(words if words and not words[0].startswith("-") else ["run", *words])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_say_what_they_are(page: Path) -> None:
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        assert block.tag in (RUN, NOT_RUN, PYTHON, OUTPUT, "", "yaml"), f"{where}: ```{block.tag}"
        if block.tag == RUN:
            assert all(words[0] == "kl-lens" for words in commands(block)), f"{where}: use ```{NOT_RUN}"
        if block.tag == NOT_RUN:
            assert block.reason, f"{where}: say why above it: <!-- not run: why -->"
        if block.tag in (OUTPUT, ""):
            assert not _typed(block), f"{where}: tag commands as ```{RUN}"


def _typed(block: Block) -> bool:
    return any(line.startswith(("kl-lens ", "$ ")) for line in block.body.splitlines())


def test_the_documentation_shows_every_verb() -> None:
    from kl_lens.cli.main import VERBS

    shown = {words[0] for page in PAGES for _, words in kl_lens_commands(page, RUN) if words}
    assert shown == set(VERBS)


def test_links_between_pages_lead_somewhere() -> None:
    import re

    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
