"""`kl-lens doctor` and `kl-lens runtime`: with the wheel, with a library put in place, and with nothing installed."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kl_lens.cli.main import main
from kl_lens.errors import TargetError
from kl_lens.pipeline import doctoring
from kl_lens.targets.gguf import instructions, library, native, trial
from kl_lens.targets.gguf.session import GGUFSession

pytest.importorskip("gguf", reason="needs the extra gguf")


USERS = os.environ.get("XDG_DATA_HOME")
KERNELS = functools.cache(doctoring._kernels)  # takes seconds, and is not what these tests are about


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the user has put in place stays out of it, and what is found here is forgotten."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(doctoring, "_kernels", KERNELS)
    monkeypatch.delenv(library.ENVIRONMENT_VARIABLE, raising=False)
    yield
    library.forget_library()
    instructions.processor_instructions.cache_clear()


def processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *flags: str) -> None:
    """A processor that has these instructions."""
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: fpu {' '.join(flags)}\n")
    monkeypatch.setattr(instructions, "CPU_INFO", info)
    instructions.processor_instructions.cache_clear()
    library.forget_library()


def doctor(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, object]]]:
    capsys.readouterr()
    code = main(["doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)


def wheel() -> Path:
    """The library that the extra `gguf` brings along."""
    return next(path for origin, path in library.candidates() if origin == "xllamacpp")


def test_the_wheel_is_healthy_if_it_uses_all_instructions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processor(monkeypatch, tmp_path)
    code, parts = doctor(capsys)
    assert code == 0
    assert {parts[name]["problem"] for name in ("llama.cpp", "OpenVINO", "PyTorch", "Kernels")} == {""}


def test_unused_instructions_are_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processor(monkeypatch, tmp_path, "amx_int8", "i8mm")
    code, parts = doctor(capsys)
    assert code == 1
    assert "AMX_INT8, MATMUL_INT8, which this build does not use" in str(parts["llama.cpp"]["problem"])
    assert parts["llama.cpp"]["mend"] == "kl-lens runtime build"
    assert main(["doctor"]) == 1
    assert "To fix it: kl-lens runtime build" in capsys.readouterr().out


def test_libraries_of_a_folder_are_found_until_they_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However deep in a package, under whatever version's name."""
    processor(monkeypatch, tmp_path)
    package = tmp_path / "package/bins/linux"
    package.mkdir(parents=True)
    shutil.copy(wheel(), package / "libllama.v0.5.0.so")
    assert main(["runtime", "use", str(tmp_path / "package")]) == 0
    shutil.rmtree(tmp_path / "package")
    place = library.runtime_folder() / "libllama.v0.5.0.so"
    assert f"In place: {place}" in capsys.readouterr().out
    assert library.find_library().origin == "kl-lens runtime"
    assert str(place) in str(doctor(capsys)[1]["llama.cpp"]["facts"])
    assert main(["runtime", "remove"]) == 0
    assert library.find_library().origin != "kl-lens runtime"
    assert main(["runtime", "remove"]) == 1
    assert "there is nothing to remove" in capsys.readouterr().err


def test_a_library_that_fails_is_not_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "libllama.so").write_bytes(b"no library")
    assert main(["runtime", "use", str(tmp_path)]) == 1
    assert "libllama.so does not work here" in capsys.readouterr().err
    assert not library.runtime_folder().exists()
    assert main(["runtime", "use", str(tmp_path / "nowhere")]) == 1
    assert "no llama.cpp library in it" in capsys.readouterr().err
    for words in (["use"], ["build", str(tmp_path)]):
        assert main(["runtime", *words]) == 1
        assert "`use` needs a FOLDER; `build` and `remove` take none" in capsys.readouterr().err


def test_a_library_that_crashes_at_a_product_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one did whose compiler had dropped half of AMX's configuration: it opened, F16 ran, Q8_0 did not."""
    (tmp_path / "trial_of_q8.py").write_text(
        "import os, signal\nprint('F16\\nQ8_0', flush=True)\nos.kill(os.getpid(), signal.SIGILL)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(native, "TRIAL", "trial_of_q8")
    shutil.copy(wheel(), tmp_path / "libllama.so")
    assert main(["runtime", "use", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "it crashed with SIGILL (in a product with Q8_0 weights)" in error
    assert not library.runtime_folder().exists()


def test_the_trial_refuses_wrong_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the blocks of another matrix in the file, as if kernels had misread them."""
    path = tmp_path / "tiny.gguf"
    trial.try_model("mamba", "Q4_K", path)
    write = trial.write_model

    def misread(path: Path, model: str, products: dict[str, np.ndarray], kind: object) -> None:
        write(path, model, {n: d[::-1] if d.dtype == np.uint8 else d for n, d in products.items()}, kind)

    monkeypatch.setattr(trial, "write_model", misread)
    with pytest.raises(TargetError, match="its products are wrong"):
        trial.try_model("mamba", "Q4_K", path)


@pytest.mark.parametrize("model", ["mamba", "mamba2"])
def test_the_trial_refuses_states_that_are_lost(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trial.try_model(model, "Q8_0", tmp_path / "tiny.gguf")
    step = GGUFSession.step

    def forgetful(session: GGUFSession, token: int) -> np.ndarray:
        session.reset()
        return step(session, token)

    monkeypatch.setattr(GGUFSession, "step", forgetful)
    with pytest.raises(TargetError, match="its states are wrong"):
        trial.try_model(model, "Q8_0", tmp_path / "tiny.gguf")


def test_gpu_features_do_not_count_as_processor_instructions() -> None:
    said = "CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : AVX2 = 1 | F16C = 0 | "
    assert instructions.used_instructions(said) == {"AVX2"}


def test_a_native_build_uses_all_instructions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that the user has put in place, and nothing but this processor's own."""
    if USERS is None:
        monkeypatch.delenv("XDG_DATA_HOME")
    else:
        monkeypatch.setenv("XDG_DATA_HOME", USERS)
    if library.library_in(library.runtime_folder()) is None:
        pytest.skip("no library was put in place: kl-lens runtime build")
    library.forget_library()
    code, parts = doctor(capsys)
    assert "from kl-lens runtime" in str(parts["llama.cpp"]["facts"])
    assert parts["llama.cpp"]["problem"] == ""
    assert code == 0


def test_nothing_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processor(monkeypatch, tmp_path)
    monkeypatch.setattr(library, "candidates", lambda: iter(()))
    code, parts = doctor(capsys)
    assert code == 1
    assert parts["llama.cpp"]["mend"] == "pip install 'kl-lens[gguf]'"
    monkeypatch.setattr(native.shutil, "which", lambda tool: None)
    assert main(["runtime", "build"]) == 1
    assert "building llama.cpp needs cmake" in capsys.readouterr().err
    monkeypatch.setattr(native.shutil, "which", lambda tool: None if tool == "nvcc" else tool)
    assert main(["runtime", "build", "--gpu"]) == 1
    assert "building llama.cpp needs nvcc: install NVIDIA's CUDA toolkit" in capsys.readouterr().err
    assert main(["runtime", "use", str(tmp_path), "--gpu"]) == 1
    assert "--gpu works only with `build`" in capsys.readouterr().err
