"""The tables of docs/results.md and the README are what the data files in docs/results hold."""

import csv
import importlib.util
import json
import re
from pathlib import Path

import pytest
from benchmarks.result_files import read

from tests.docs.markdown import PAGES, ROOT

PAGE = (ROOT / "docs/results.md").read_text(encoding="utf-8")
FILES = sorted((ROOT / "docs/results").iterdir())


def _script():
    spec = importlib.util.spec_from_file_location(
        "results_page", ROOT / "scripts/results.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_agree_with_their_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert _script().main(["--check"]) == 0, capsys.readouterr().out


def test_every_table_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in _script().PAGES)
    assert set(re.findall(r"<!-- (\S+) -->", text)) >= set(_script().TABLES)
    assert all(f"<!-- /{name} -->" in text for name in _script().TABLES)


def test_sentences_count_the_rows_of_rivals() -> None:
    rows = read(ROOT / "docs/results/rivals.csv")
    worse = sum(
        float(row["our_perplexity"]) > float(row["rival_perplexity"]) for row in rows
    )
    assert f"rivals.csv), {len(rows)} rows" in PAGE
    assert f"in {worse} of the {len(rows)} rows" in PAGE
    assert {row["verdict"] for row in rows} == {"lower"}  # as the next sentence says
    assert len({row["model"] for row in rows}) == 12
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (
        f"lost less in all {len(rows)} comparisons with such recipes on twelve models"
        in front
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_data_files_are_whole_and_named_on_a_page(file: Path) -> None:
    assert any(
        f"](results/{file.name})" in page.read_text(encoding="utf-8") for page in PAGES
    )
    if file.suffix == ".json":
        for table in json.loads(file.read_text(encoding="utf-8")):
            assert table["name"]
            assert all(len(row) == len(table["columns"]) for row in table["rows"])
        return
    with file.open(encoding="utf-8", newline="") as opened:
        heading, *rows = csv.reader(opened)
    assert rows
    assert all(len(row) == len(heading) for row in rows)
    assert {"machine", "date", "commit"} <= set(heading)
    assert len({tuple(row) for row in rows}) == len(rows)
