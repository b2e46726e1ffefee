"""The shipped files are found in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from kl_lens.base.errors import KLLensError
from kl_lens.base.files import reference_path


def test_shipped_text_is_found() -> None:
    assert reference_path("text", "wikitext2").is_dir()


def test_checkout_and_wheel_layouts(tmp_path: Path) -> None:
    package = tmp_path / "src" / "kl_lens"
    (tmp_path / "reference" / "mamba").mkdir(parents=True)
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    assert reference_path("mamba", package=package) == tmp_path / "reference" / "mamba"

    installed = tmp_path / "site-packages" / "kl_lens"
    (installed / "_reference" / "mamba").mkdir(parents=True)
    assert reference_path("mamba", package=installed) == installed / "_reference" / "mamba"


def test_missing_files_are_reported(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "site-packages" / "kl_lens"
    (tmp_path / "lib" / "reference").mkdir(parents=True)  # somebody else's
    package.mkdir(parents=True)
    with pytest.raises(KLLensError, match="mamba: not among the reference files of this installation"):
        reference_path("mamba", package=package)
    with pytest.raises(KLLensError, match="mamba9: not among the reference files"):
        reference_path("mamba9")
