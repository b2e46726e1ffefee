"""Finds the files that ship with the project: reference checkpoints, reference text, patches.

In a checkout they are in `reference/` and `patches/`; in an installed wheel in `kl_lens/_reference/` and
`kl_lens/_patches/`.
"""

from __future__ import annotations

from pathlib import Path

from kl_lens.errors import KLLensError

_PACKAGE = Path(__file__).resolve().parent


def reference_path(*parts: str) -> Path:
    """The path of a shipped file or folder, such as `reference_path("mamba")`. Raises KLLensError if it is missing."""
    return find_resource(_PACKAGE, *parts)


def patches_path(*parts: str) -> Path:
    """The path of a patch, such as `patches_path("llama.cpp")`."""
    return find_resource(_PACKAGE, *parts, kind="patches")


def find_resource(package: Path, *parts: str, kind: str = "reference") -> Path:
    wanted = "/".join(parts) or f"{kind} files"
    roots = [root for root in _candidate_roots(package, kind) if root.is_dir()]
    if not roots:
        raise KLLensError(
            f"{wanted}: the {kind} files are missing from this installation ({package}): "
            "reinstall kl-lens, or run from a full checkout"
        )
    for root in roots:
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise KLLensError(f"{wanted}: not among the {kind} files in {roots[0]}: reinstall kl-lens")


def _candidate_roots(package: Path, kind: str) -> list[Path]:
    roots = [package / f"_{kind}"]
    checkout = package.parent.parent
    # Without this test any folder of that name two levels above site-packages would be accepted.
    if (checkout / "pyproject.toml").is_file() and package.parent.name == "src":
        roots.append(checkout / kind)
    return roots
