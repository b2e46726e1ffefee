"""Finds the files that ship with the project: reference checkpoints and texts.

In a checkout they are in `reference/`, in an installed wheel in `kl_lens/_reference/`.
"""

from __future__ import annotations

from pathlib import Path

from kl_lens.base.errors import KLLensError

_PACKAGE = Path(__file__).resolve().parent.parent


def reference_path(*parts: str) -> Path:
    """The path of a shipped file or folder, such as `reference_path("mamba")`. Raises KLLensError if it is missing."""
    return find_resource(_PACKAGE, *parts)


def find_resource(package: Path, *parts: str) -> Path:
    roots, checkout = [package / "_reference"], package.parent.parent
    # Without this test any folder `reference` two levels above site-packages would be accepted.
    if (checkout / "pyproject.toml").is_file() and package.parent.name == "src":
        roots.append(checkout / "reference")
    for path in (root.joinpath(*parts) for root in roots):
        if path.exists():
            return path
    raise KLLensError(
        f"{'/'.join(parts)}: not among the reference files of this installation ({package}): reinstall kl-lens, or "
        "run from a full checkout"
    )
