"""Installs a llama.cpp that uses all of this processor's instructions: built here, or from prebuilt libraries.

It goes to `runtime_folder()`, where sessions look before they use the portable wheel.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kl_lens.environment import for_child, processors
from kl_lens.errors import TargetError
from kl_lens.resources import patches_path
from kl_lens.targets.gguf.library import ENVIRONMENT_VARIABLE, forget_library, library_in, runtime_folder

TRIAL = "kl_lens.targets.gguf.trial"
# The only release that is built and that the patches fit. This package's sdist contains llama.cpp.
SOURCE = "llama-cpp-python==0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",  # libraries find each other in any folder
)  # fmt: skip
_FOR_GPU = ("-DGGML_CUDA=ON", "-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON")  # finds CUDA's libraries
Advanced = Callable[[int, str], None]  # percent, current step


def build_library(
    advanced: Advanced = lambda percent, what: None, *, gpu: bool = False, patched: bool = False
) -> Path:
    """Builds llama.cpp for this processor, with `gpu` also for CUDA, and installs it. Returns its path.

    `patched`: with the patches in patches/llama.cpp.
    """
    tools = {"cmake": "pip install cmake, or Debian: apt install cmake", "c++": "Debian: apt install g++"}
    if gpu:
        tools["nvcc"] = "install NVIDIA's CUDA toolkit and put its bin folder on PATH"
    if patched:
        tools["patch"] = "Debian: apt install patch; or leave --patched out"
    for tool, advice in tools.items():
        if shutil.which(tool) is None:
            raise TargetError(
                f"building llama.cpp needs {tool}: {advice}; or use prebuilt libraries: kl-lens runtime use FOLDER"
            )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        advanced(0, f"fetching {SOURCE}")
        source = fetch_source(folder)
        if patched:
            apply_patches(source)
        build = folder / "build"
        options = [*_OPTIONS, *(_FOR_GPU if gpu else ())]
        _call(["cmake", "-S", str(source), "-B", str(build), *options], "cmake cannot configure llama.cpp")
        _call(
            ["cmake", "--build", str(build), "--target", "llama", "--parallel", str(processors())],
            "llama.cpp cannot be built",
            lambda line: _percent(line, advanced),
        )
        try:
            return install_libraries(build, f"built from {SOURCE}{', patched' if patched else ''}")
        except TargetError as error:
            if patched:
                raise
            raise TargetError(f"{error}; --patched fixes known bugs of this release") from error


def fetch_source(folder: Path) -> Path:
    """Downloads the pinned release into a folder. Returns llama.cpp's folder in it."""
    wanted = folder / "source.txt"
    wanted.write_text(f"{SOURCE} --hash=sha256:{SHA256}\n", encoding="utf-8")
    words = ["pip", "download", "--no-deps", "--no-binary", ":all:", "--require-hashes"]
    command = [sys.executable, "-m", *words, "--requirement", str(wanted), "--dest", str(folder)]
    _call(command, f"pip cannot fetch {SOURCE}")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return next(path.parent for path in sorted(folder.glob("*/vendor/llama.cpp/CMakeLists.txt")))


def apply_patches(source: Path) -> None:
    """Applies all patches in the order of their names. Raises TargetError if one does not apply exactly."""
    for file in sorted(patches_path("llama.cpp").glob("*.patch")):
        # -f: no questions, no guessing that a patch is reversed; -F0: context lines must match exactly.
        command = ["patch", "-p1", "-f", "-F0", "-d", str(source), "-i", str(file)]
        _call(command, f"{file}: does not apply to {SOURCE}")


def install_libraries(folder: Path, origin: str = "") -> Path:
    """Tries the libraries of a folder, then copies them to where sessions find them. Earlier ones are replaced."""
    main = library_in(folder) if folder.is_dir() else None
    if main is None:
        raise TargetError(f"{folder}: no llama.cpp library in it; give a folder with libllama.so")
    place = runtime_folder()
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".llama.cpp-") as temporary:
        copy = Path(temporary) / "new"
        copy.mkdir()
        for library in _libraries(folder, main):
            shutil.copy2(library, copy / library.name, follow_symlinks=True)
        (copy / "ORIGIN").write_text(f"{origin or folder}\n", encoding="utf-8")
        _require_working(copy / main.name)
        if place.exists():
            place.rename(Path(temporary) / "old")
        copy.rename(place)
    forget_library()
    return place / main.name


def remove_libraries() -> bool:
    """Removes the installed libraries. Returns whether there were any."""
    place = runtime_folder()
    if place.exists():
        shutil.rmtree(place)
        forget_library()
        return True
    return False


def _libraries(folder: Path, main: Path) -> list[Path]:
    """All libraries that belong together: those beside the main one, or anywhere in a build folder."""
    beside = [path for path in main.parent.iterdir() if _is_library(path)]
    return (
        beside if any("ggml" in p.name for p in beside) else [p for p in folder.rglob("*") if _is_library(p)]
    )


def _is_library(path: Path) -> bool:
    return path.is_file() and re.search(r"\.(so|dylib|dll)(\.\d+)*$", path.name) is not None


def _require_working(library: Path) -> None:
    """Tries the library in another process (`trial.py`), because a broken one may crash it."""
    command = [sys.executable, "-m", TRIAL]
    environment = for_child() | {ENVIRONMENT_VARIABLE: str(library)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        said, tried = result.stderr.strip().splitlines(), result.stdout.split()
        reason = said[-1] if said and result.returncode > 0 else f"it crashed{_signal(result.returncode)}"
        where = f" (in a product with {tried[-1]} weights)" if tried else ""
        raise TargetError(f"{library.name} does not work here: {reason}{where}")


def _signal(code: int) -> str:
    known = {-each: each.name for each in signal.Signals}
    return f" with {known[code]}" if code in known else ""


def _call(command: Sequence[str], problem: str, heard: Callable[[str], None] = lambda line: None) -> None:
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            heard(line)
    if process.returncode:
        errors = [line for line in lines if "error" in line.lower()] or lines[-1:] or ["it gave no reason"]
        raise TargetError(f"{problem}: {errors[0]}")


def _percent(line: str, advanced: Advanced) -> None:
    if match := re.match(r"\[\s*(\d+)%\]", line):
        advanced(int(match.group(1)), "building")
