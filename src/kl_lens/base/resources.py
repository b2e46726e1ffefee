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
    wanted = "/".join(parts) or "reference files"
    roots = [root for root in _candidate_roots(package) if root.is_dir()]
    if not roots:
        raise KLLensError(
            f"{wanted}: the reference files are missing from this installation ({package}): "
            "reinstall kl-lens, or run from a full checkout"
        )
    for root in roots:
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise KLLensError(f"{wanted}: not among the reference files in {roots[0]}: reinstall kl-lens")


def _candidate_roots(package: Path) -> list[Path]:
    roots = [package / "_reference"]
    checkout = package.parent.parent
    # Without this test any folder `reference` two levels above site-packages would be accepted.
    if (checkout / "pyproject.toml").is_file() and package.parent.name == "src":
        roots.append(checkout / "reference")
    return roots
