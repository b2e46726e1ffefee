"""Several runs on one page."""

from __future__ import annotations

from pathlib import Path

import pytest

from kl_lens.errors import RunError
from kl_lens.reporting import write_comparison
from tests.reporting.document import read
from tests.reporting.sample import make_run


def test_runs_stand_side_by_side(sample_run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", model="other-mamba", blocks=6, kinds=("in_proj", "out_proj"), seed=9)
    path = write_comparison([sample_run, other], tmp_path / "page.html")
    tree = read(path.read_text(encoding="utf-8"))
    sections = {s.attributes["id"]: s for s in tree.all("section")}
    assert list(sections) == ["runs", "sizes", "kinds", "metrics", "speed"]
    for name in ("sample-mamba", "other-mamba"):
        assert all(name in s.words for s in sections.values()), name
    titles = [t.words for t in sections["sizes"].all("title")]
    assert [t for t in titles if t.startswith("other-mamba\nkl_point05")]
    assert "Predicted frontiers" in sections["sizes"].words
    assert "KL" in sections["metrics"].words


def test_two_runs_of_one_model_are_told_apart_by_their_folders(sample_run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "second", seed=3)
    words = read(
        write_comparison([sample_run, other], tmp_path / "page.html").read_text(encoding="utf-8")
    ).words
    assert "sample-mamba (run)" in words
    assert "sample-mamba (second)" in words


def test_a_run_without_plans_or_speeds_is_compared_by_what_it_has(sample_run: Path, tmp_path: Path) -> None:
    bare = make_run(tmp_path / "bare", model="bare", stages=())
    tree = read(write_comparison([bare, sample_run], tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "bare" in tree.words
    both_bare = write_comparison([bare, bare], tmp_path / "page.html").read_text(encoding="utf-8")
    assert {"metrics", "speed"}.isdisjoint(s.attributes["id"] for s in read(both_bare).all("section"))


def test_a_hostile_model_name_stays_text(sample_run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", model='"><script>alert(1)</script>')
    tree = read(write_comparison([sample_run, other], tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len(tree.all("script")) == 2  # our own, and its data
    assert '"><script>alert(1)</script>' in tree.words


def test_one_run_is_nothing_to_compare(sample_run: Path) -> None:
    with pytest.raises(RunError, match="at least two runs"):
        write_comparison([sample_run])
