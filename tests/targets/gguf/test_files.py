"""Damaged and foreign files, wrong options and wrong libraries: one line each, and the process lives."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kl_lens.base.errors import TargetError
from kl_lens.cli.main import main
from kl_lens.run.records import Plan
from kl_lens.study.settings import Runtime
from kl_lens.targets import ALL_LAYERS, LOAD_MODES, SessionSettings, get_target
from kl_lens.targets.gguf import library, paging, session as session_module
from kl_lens.targets.gguf.export import export
from kl_lens.targets.gguf.header import read_header
from kl_lens.targets.gguf.session import open_session
from kl_lens.weights.formats.ggml_types import ggml_types
from tests.targets.gguf.support import tiny, uniform

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return folder / export(tiny("jamba"), Plan("p", {}, "test"), folder).files[0]


def test_header_says_what_the_gguf_package_says(whole: Path) -> None:
    info = read_header(whole)
    reader = gguf.GGUFReader(whole)
    assert [(t.name, t.type, t.bytes, t.offset, t.shape) for t in info.tensors] == [
        (
            t.name,
            t.tensor_type.name,
            int(t.n_bytes),
            int(t.data_offset),
            tuple(map(int, t.shape))[::-1],
        )
        for t in reader.tensors
    ]
    assert info.architecture == "jamba"
    assert info.metadata["jamba.attention.head_count_kv"] == [0, 2, 0, 2]
    assert info.metadata["kl_lens.plan"] == "p"


def test_every_way_of_loading_gives_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read or mapped to the bit; without repacking by other kernels, to rounding."""
    model = tiny("mamba")
    artifact = export(model, uniform(model, "q4_0"), tmp_path)
    blocks = [tensor for tensor in artifact.tensors if tensor.realised == "q4_0"]
    tokens = list(range(40))
    monkeypatch.setattr(
        paging, "LEAST", 0
    )  # as for large files: pages are given back while it loads
    given_back = Mock(side_effect=paging.give_back)
    monkeypatch.setattr(paging, "give_back", given_back)
    found = {}
    for load in ("auto", *LOAD_MODES):
        with open_session(tmp_path / artifact.files[0], threads=1, load=load) as session:
            found[load] = np.concatenate([session.logits(tokens), session.step(3)[None]])
            described = session.description
            assert described["load_mode"] == ("lean" if load == "auto" else load)
    assert (described["runtime"], described["threads"]) == ("llama.cpp", 1)
    assert "=" in described["build_flags"]
    assert given_back.call_count >= 2 * len(blocks) > 0
    size = np.abs(found["read"]).max()
    for load in ("auto", "lean", "mapped"):
        assert np.array_equal(found[load], found["read"]), load
    assert np.array_equal(found["mapped-plain"], found["read-plain"])
    assert np.abs(found["read-plain"] - found["read"]).max() < 0.02 * size


@pytest.mark.parametrize(
    ("own", "other", "reason"),
    [
        (b"jamba", b"jumbo", "unknown model architecture: 'jumbo'"),
        (b"jamba.block_count", b"jamba.block_mount", "key not found"),
    ],
)
def test_what_llama_cpp_itself_refuses_is_passed_on(
    own: bytes, other: bytes, reason: str, whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "x.gguf").write_bytes(whole.read_bytes().replace(own, other))
    with pytest.raises(TargetError, match=rf"llama\.cpp cannot load it: .*{reason}"):
        open_session(tmp_path / "x.gguf")


def test_a_llama_cpp_that_lacks_a_type_of_the_file_is_named(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is asked: a branch of it has Q2_0 in blocks of 128 under the same number."""
    kind = ggml_types()["q2_0"]
    assert library.find_library().knows(kind)
    assert not library.find_library().knows(replace(kind, block=128, bytes=34))
    other = {"fp32": replace(ggml_types()["fp32"], block=2)}
    monkeypatch.setattr(session_module, "ggml_types", lambda: other)
    with pytest.raises(
        TargetError, match=r"\) does not know F32, the type of \S+; take a"
    ):
        open_session(whole)


def test_sessions_say_what_is_wrong(whole: Path) -> None:
    with open_session(whole, threads=1) as session:
        with pytest.raises(TargetError, match="token 97 is outside the vocabulary of 97"):
            session.logits([1, 97])
        with pytest.raises(TargetError, match="no tokens"):
            session.prefill([])
        with pytest.raises(TargetError, match=r"do not fit into the context of \d+"):
            session.logits([1] * (session.context + 1))
    with pytest.raises(TargetError, match="this session is closed"):
        session.step(1)
    session.close()
    with pytest.raises(TargetError, match="threads must be at least 1"):
        open_session(whole, threads=0)


def test_a_device_that_llama_cpp_lacks_is_refused(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would run on the processor and be labelled with the device."""
    assert main(["generate", "--prompt", "a", str(whole), "--device", "npu"]) == 1
    assert (
        "--device NPU: llama.cpp runs on CPU; --gpu-layers N puts"
        in capsys.readouterr().err
    )
    if not library.find_library().has_gpu:
        with pytest.raises(
            TargetError, match=r"--gpu-layers 4: .* has no GPU backend, or finds no GPU"
        ):
            open_session(whole, gpu_layers=4)


@pytest.mark.parametrize(
    ("on_a_mac", "has_gpu", "layers"),
    [(True, True, ALL_LAYERS), (True, False, 0), (False, True, 0)],
)
def test_text_is_written_on_the_gpu_of_a_mac(
    on_a_mac: bool, has_gpu: bool, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are compared on the CPU: only what people read is computed in half precision."""
    target = get_target("gguf")
    monkeypatch.setattr("kl_lens.targets.gguf.target.MACOS", on_a_mac)
    monkeypatch.setattr(type(library.find_library()), "has_gpu", has_gpu)
    assert target.for_text(SessionSettings()).gpu_layers == layers
    assert target.for_text(SessionSettings(gpu_layers=3)).gpu_layers == 3
    assert Runtime().session().device == "CPU"


def test_state_space_models_have_no_length_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "LARGEST_CONTEXT", 32)
    artifact = export(tiny("mamba"), Plan("p", {}, "test"), tmp_path)
    with open_session(tmp_path / artifact.files[0], threads=1) as session:
        last = session.prefill([token % 97 for token in range(1500)])
        every = session.logits([token % 97 for token in range(1500)])
    assert np.abs(last - every[-1]).max() < 1e-3
