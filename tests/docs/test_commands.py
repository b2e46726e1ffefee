"""Every command and Python example of the documentation runs, in the order of its page, or says why it does not.

To be quick, they run with less text and fewer repeats than the page says; `SHORTER` says how much less. The pages share
one folder: the quick start makes the run that the others continue. The README's commands stand alone.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kl_lens.cli.main import VERBS, main, parse
from kl_lens.text.sources import wikitext2
from tests.docs.markdown import (
    PAGES,
    QUICKSTART,
    README,
    ROOT,
    Block,
    blocks,
    commands,
    page_name,
)

RUN = "bash"
NOT_RUN = "console"
PYTHON = "python"
OUTPUT = "text"
SHORTER = {
    "calibrate": {"--windows": "2", "--window-length": "32"},
    "measure": {"--windows": "2", "--window-length": "32"},
    "paper": {"--evaluation-windows": "2"},
    "plan": {"--held-out-windows": "4"},
    "evaluate": {"--window-length": "64", "--windows": "3"},
    "benchmark": {"--repeats": "1", "--prompt-lengths": "8", "--new-tokens": "2"},
    "generate": {"--max-new-tokens": "4"},
}
SHORTER_PYTHON = {
    "measure(windows=8": "measure(windows=2, window_length=32",
    "study.calibrate()": "study.calibrate(windows=2, window_length=32)",
    "study.measure(windows=4)": "study.measure(windows=2, window_length=32)",
    "window_length=512, windows=8": "window_length=64, windows=2",
    'evaluate(plan="small")': 'evaluate(plan="small", window_length=64, windows=2)',
    "repeats=3)": "repeats=1, prompt_lengths=(8,), new_tokens=2)",
}
# What has to change with it, where a page names it: limits of time depend on the machine.
INSTEAD = {"--stride": "32", "--min-speed": "0.001", "--task-limit": "2"}
# Exercised in tests/cli and tests/autopsy; here their words are only understood.
PARSED_ONLY = ("run", "doctor", "autopsy")


def kl_lens_commands(page: Path, *tags: str) -> list[list[str]]:
    """The words behind `kl-lens` of all commands in blocks with these tags; `./run` is `kl-lens run`."""
    lines = [
        words for block in blocks(page) if block.tag in tags for words in commands(block)
    ]
    return [
        ["run", *w[1:]] if w[0] == "./run" else w[1:]
        for w in lines
        if w[0] in ("./run", "kl-lens")
    ]


def examples(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.tag == PYTHON]


def shortened(words: Sequence[str]) -> list[str]:
    verb = words[0]
    shorter = list(words)
    for flag, value in INSTEAD.items():
        if flag in shorter:
            shorter[shorter.index(flag) + 1] = value
    added = [word for pair in SHORTER.get(verb, {}).items() for word in pair]
    return shorter + added


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse(words)  # as the page has it
    if words[0] in PARSED_ONLY:
        return
    monkeypatch.setattr(sys, "argv", ["kl-lens", *shortened(words)])
    assert main(shortened(words)) == 0, f"kl-lens {' '.join(shortened(words))}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: a model, some text, some tasks, under the names that the pages use."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "reference/mamba2", folder / "my-model")
    articles = wikitext2("valid").documents
    (folder / "notes.txt").write_text(
        "\n\n".join(d.text for d in articles[:6]), encoding="utf-8"
    )
    (folder / "other-notes.txt").write_text(
        "\n\n".join(d.text for d in articles[6:12]), encoding="utf-8"
    )
    (folder / "tasks").mkdir()
    rows = [
        {"query": "The capital of France is", "choices": ["Paris", "green"], "gold": 0},
        {
            "query": "Water is made of hydrogen and",
            "choices": ["music", "oxygen"],
            "gold": 1,
        },
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "tasks/arc_easy_test.jsonl").write_text(lines, encoding="utf-8")
    return folder


def run_page(page: Path, folder: Path) -> None:
    for package in ("openvino", "gguf", "lm_eval"):
        pytest.importorskip(package, reason="needs kl-lens[openvino,gguf,eval]")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in kl_lens_commands(page, RUN):
            run(words, patch)


@pytest.fixture(scope="module")
def quickstart(folder: Path) -> Path:
    """The folder after every command of the quick start."""
    run_page(QUICKSTART, folder)
    return folder


@pytest.mark.slow  # tests/test_study.py does the same job with less text
def test_commands_of_the_readme_run(tmp_path: Path) -> None:
    run_page(README, tmp_path)
    assert list(tmp_path.glob("runs/mamba/artifacts/gguf/small/*.gguf"))


@pytest.mark.slow
def test_commands_of_the_quick_start_run(quickstart: Path) -> None:
    run_folder = quickstart / "runs/mamba"
    assert (run_folder / "report.html").stat().st_size > 10_000
    assert list(run_folder.glob("artifacts/gguf/*/*.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in (README, QUICKSTART)], ids=page_name
)
def test_commands_of_the_other_pages_run(page: Path, quickstart: Path) -> None:
    run_page(page, quickstart)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if examples(page)], ids=page_name
)
def test_examples_in_python_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("openvino", "gguf", "pandas"):
        pytest.importorskip(package, reason="needs kl-lens[openvino,gguf]")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    for block in examples(page):
        body = block.body
        for long, short in SHORTER_PYTHON.items():
            body = body.replace(long, short)
        exec(compile("\n" * block.line + body, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_parse(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "windows: 8\n", encoding="utf-8"
    )  # --config reads it at once
    for words in kl_lens_commands(page, RUN, NOT_RUN):
        parse(words)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_blocks_say_what_they_are(page: Path) -> None:
    for block in blocks(page):
        position = f"{page.name}:{block.line}"
        assert block.tag in (RUN, NOT_RUN, PYTHON, OUTPUT, "", "yaml"), (
            f"{position}: ```{block.tag}"
        )
        if block.tag == RUN:
            assert all(words[0] == "kl-lens" for words in commands(block)), (
                f"{position}: use ```{NOT_RUN}"
            )
        if block.tag == NOT_RUN:
            assert block.reason, f"{position}: say why above it: <!-- not run: why -->"
        if block.tag in (OUTPUT, ""):
            assert not _typed(block), f"{position}: tag commands as ```{RUN}"


def _typed(block: Block) -> bool:
    lines = [line.split() for line in block.body.splitlines()]
    return any(
        words[:1] == ["kl-lens"] and words[1] in VERBS
        for words in lines
        if len(words) > 1
    )


def test_the_documentation_shows_every_verb() -> None:
    shown = {words[0] for page in PAGES for words in kl_lens_commands(page, RUN, NOT_RUN)}
    assert shown == set(VERBS)
