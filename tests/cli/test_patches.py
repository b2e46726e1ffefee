"""The patches to llama.cpp: they fit the release that is built, and whatever a patched library computes says so."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kl_lens.checkpoints import LoadedModel
from kl_lens.cli.main import main
from kl_lens.errors import TargetError
from kl_lens.profiling import in_use
from kl_lens.records import Plan
from kl_lens.resources import patches_path
from kl_lens.targets import export
from kl_lens.targets.gguf import library, native
from tests.families import tiny_model

pytest.importorskip("gguf", reason="needs the extra gguf")

PATCHES = sorted(patches_path("llama.cpp").glob("*.patch"))
MARK = "(patched by KL Lens)"


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the user has put in place stays out of it, and what is found here is forgotten."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv(library.ENVIRONMENT_VARIABLE, raising=False)
    library.forget_library()
    yield
    library.forget_library()


@pytest.mark.parametrize("file", PATCHES, ids=lambda file: file.stem)
def test_a_patch_says_what_it_does_and_gains_and_for_which_release(file: Path) -> None:
    header, _, changes = file.read_text(encoding="utf-8").partition("\n--- a/")
    package, _, version = native.SOURCE.partition("==")
    assert changes
    assert len(header.splitlines()[0]) < 100  # one line that says it all
    assert re.search(r"(?m)^Gains: \S", header)
    assert re.search(r"(?m)^Sent upstream: (no\.|https://)", header)
    assert f"Release: the llama.cpp of {package} {version}." in header.splitlines()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return native.fetch_source(tmp_path_factory.mktemp("release"))
    except TargetError as error:
        pytest.skip(f"the release cannot be fetched: {error}")


@pytest.mark.slow
def test_every_patch_fits_the_release_that_is_built(source: Path) -> None:
    native.apply_patches(source)
    assert MARK in (source / "ggml/src/ggml.c").read_text(encoding="utf-8")
    # `patch` leaves one of these where a hunk did not fit to the letter.
    assert [path for path in source.rglob("*") if path.suffix in (".orig", ".rej")] == []
    with pytest.raises(TargetError, match=re.escape(PATCHES[0].name)):  # a second time it does not fit
        native.apply_patches(source)


@pytest.mark.slow
def test_a_release_with_another_hash_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "SHA256", "0" * 64)
    with pytest.raises(TargetError, match=r"(?i)hash"):
        native.fetch_source(tmp_path)
    assert not list(tmp_path.glob("*.tar.gz"))


def test_a_patch_that_does_not_fit_is_named_and_nothing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("patch") is None:
        pytest.skip("no `patch` here")
    other = tmp_path / "ggml/src/ggml-cpu/amx/mmq.cpp"
    other.parent.mkdir(parents=True)
    other.write_text("// another release\n")
    monkeypatch.setattr(native, "fetch_source", lambda folder: tmp_path)
    which = shutil.which
    monkeypatch.setattr(native.shutil, "which", lambda tool: which(tool) if tool == "patch" else tool)
    assert main(["runtime", "build", "--patched"]) == 1
    assert f"{PATCHES[0].name}: does not apply to {native.SOURCE}" in capsys.readouterr().err.replace(
        "\n", ""
    )
    assert not library.runtime_folder().exists()


def test_patched_needs_patch_and_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda tool: None if tool == "patch" else tool)
    assert main(["runtime", "build", "--patched"]) == 1
    assert "building llama.cpp needs patch: Debian: apt install patch" in capsys.readouterr().err
    assert main(["runtime", "use", str(tmp_path), "--patched"]) == 1
    assert "--patched works only with `build`" in capsys.readouterr().err


@pytest.fixture
def patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel's llama.cpp behind a library that says what the patch makes it say: building one takes minutes."""
    wheel = next((path for origin, path in library.candidates() if origin == "xllamacpp"), None)
    if wheel is None or shutil.which("cc") is None:
        pytest.skip("needs the wheel xllamacpp and a C compiler")
    (line,) = re.findall(r"(?m)^\+( +return GGML_COMMIT .*;)$", PATCHES[-1].read_text(encoding="utf-8"))
    source, built = tmp_path / "mark.c", tmp_path / "lib/libllama.so"
    source.write_text(f'#define GGML_COMMIT "0123abc"\nconst char * ggml_commit(void) {{\n{line}\n}}\n')
    built.parent.mkdir()
    linked = ["-Wl,--no-as-needed", f"-L{wheel.parent}", f"-l:{wheel.name}", f"-Wl,-rpath,{wheel.parent}"]
    made = ["cc", "-shared", "-fPIC", "-o", str(built), str(source), *linked]
    subprocess.run(made, check=True, capture_output=True)
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(built))
    library.forget_library()
    return built


def test_doctor_benchmarks_and_reports_say_patched(
    patched: Path,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    main(["doctor", "--json"])
    assert f"commit 0123abc {MARK}" in capsys.readouterr().out
    text = ["--text", str(tiny_folder / "text.txt"), "--windows", "2", "--window-length", "32"]
    assert main(["measure", str(tiny_folder), "--run", str(run), *text]) == 0
    # llama.cpp has no word-level tokenizers: this one goes without.
    model = LoadedModel("tiny", Path(), tiny_model("mamba"), None)
    export(model, Plan("uniform_fp16", {}, "test"), "gguf", run / "artifacts/gguf/uniform_fp16")
    monkeypatch.setattr(in_use, "LOADS", 1)
    capsys.readouterr()
    short = ["--threads", "1", "--prompt-lengths", "4", "--new-tokens", "4", "--repeats", "1"]
    assert main(["benchmark", "--run", str(run), "--targets", "gguf", *short]) == 0
    assert MARK in " ".join(capsys.readouterr().out.split())
    assert main(["report", "--run", str(run)]) == 0
    assert (run / "report.html").read_text(encoding="utf-8").count(
        MARK
    ) == 2  # beside the speeds; in the provenance
