"""The site builds without a warning, its reference is complete, and the documentation stays short."""

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from kl_lens.cli.main import VERBS
from kl_lens.study.settings import options_of
from kl_lens.study.study import settings_of
from tests.docs.markdown import PAGES, README, ROOT

pytest.importorskip("mkdocs", reason="needs kl-lens[docs]")
BY_PEOPLE = [
    *PAGES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: a link or an anchor that leads nowhere, and a page that is not in the navigation, are failures."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hook", ROOT / "scripts/site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def text_of(page: Path) -> str:
    parser = _Text()
    parser.feed(page.read_text(encoding="utf-8"))
    return "".join(parser.words)


def test_every_flag_of_every_verb_is_on_the_site(site: Path) -> None:
    shown = text_of(site / "reference/command-line/index.html")
    for verb in VERBS:
        _, _, section = shown.partition(f"kl-lens {verb}¶")
        section = section.partition("¶")[0]
        flags = [option.flag for option in options_of(settings_of(verb)) if option.flag]
        assert not [flag for flag in flags if flag not in section], verb


def test_every_public_name_is_on_the_site(site: Path, hook: ModuleType) -> None:
    shown = text_of(site / "reference/python/index.html")
    assert "kl_lens.planning" in hook.packages()
    for package in hook.packages():
        for name in hook.public_names(importlib.import_module(package)):
            assert re.search(rf"\b{name}\b", shown), f"{package}.{name}"
    assert "<" not in "".join(re.findall(r"^\w+\(.*$", shown, re.MULTILINE)).replace(
        "<=", ""
    )


def test_pages_from_the_root_are_on_the_site(site: Path) -> None:
    assert "least loss your bytes allow" in text_of(site / "index.html")
    assert (site / "contributing/index.html").exists()
    assert "q4_k: KL" in (site / "tour/index.html").read_text(encoding="utf-8")


def test_links_to_the_repository_lead_somewhere() -> None:
    """On the site mkdocs looks; these are read in the repository."""
    for page in (README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"):
        for target in re.findall(r"\]\(([^)#:]+)", page.read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


# What stands behind the pages that a user reads.
BEHIND = ("results.md", "method.md", "performance.md")


def test_the_documentation_is_short() -> None:
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in BY_PEOPLE}
    assert words[README] <= 850
    releases = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")
    assert max(len(release.split()) for release in releases) <= 420
    behind = sum(count for page, count in words.items() if page.name in BEHIND)
    assert behind <= 8_000
    assert sum(words.values()) - behind <= 20_000
