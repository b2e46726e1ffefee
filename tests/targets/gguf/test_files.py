"""Damaged and foreign files, wrong options and wrong libraries: one line each, and the process lives."""

from __future__ import annotations

import ctypes
import mmap
import struct
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kl_lens.base.errors import TargetError
from kl_lens.cli.main import main
from kl_lens.run.records import Plan
from kl_lens.targets import LOAD_MODES
from kl_lens.targets.gguf import library, paging, session as session_module
from kl_lens.targets.gguf.export import export
from kl_lens.targets.gguf.header import TensorEntry, read_header
from kl_lens.targets.gguf.session import open_session
from tests.targets.gguf.support import tiny, uniform

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return folder / export(tiny("jamba"), Plan("p", {}, "test"), folder).files[0]


def test_header_says_what_the_gguf_package_says(whole: Path) -> None:
    info, reader = read_header(whole), gguf.GGUFReader(whole)
    assert [(t.name, t.type, t.bytes, t.offset, t.shape) for t in info.tensors] == [
        (t.name, t.tensor_type.name, int(t.n_bytes), int(t.data_offset), tuple(map(int, t.shape))[::-1])
        for t in reader.tensors
    ]
    assert info.architecture == "jamba"
    assert info.metadata["jamba.attention.head_count_kv"] == [0, 2, 0, 2]
    assert info.metadata["kl_lens.plan"] == "p"


def test_every_way_of_loading_gives_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read or mapped to the bit; without repacking by other kernels, to rounding."""
    model = tiny("mamba")
    artifact = export(model, uniform(model, "q4_0"), tmp_path)
    blocks = [tensor for tensor in artifact.tensors if tensor.realised == "q4_0"]
    tokens = list(range(40))
    monkeypatch.setattr(paging, "LEAST", 0)  # as for large files: pages are given back while it loads
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


@pytest.mark.skipif(not paging.can_give_back, reason="pages are given back on Linux only")
def test_large_tensors_of_a_mapped_file_lie_apart_from_what_is_still_used(tmp_path: Path) -> None:
    """So that a small tensor brings nothing back but itself; not a byte of the file changes."""
    path, size = tmp_path / "file", 4 << 20
    path.write_bytes(bytes(range(256)) * (size >> 8))
    matrix = TensorEntry("blk.0.ssm_in.weight", (1, 1), "Q8_0", 5000, 2 << 20, path)
    norm = TensorEntry("blk.0.attn_norm.weight", (1,), "F32", 5000 + matrix.bytes, 8000, path)
    embedding = TensorEntry("token_embd.weight", (1, 1), "Q8_0", size - (1 << 20), 1 << 20, path)
    # llama.cpp maps shared and read-only, from a page of the file on
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size - 4096, mmap.MAP_SHARED, mmap.PROT_READ, offset=4096) as view,
    ):
        paging.set_apart([matrix, norm, embedding])
        pieces = paging.mappings_of(path)
        assert (pieces[1][2], pieces[2][2]) == (8192, (5000 + matrix.bytes) // 4096 * 4096)
        assert len(pieces) == 3 + 16
        assert view[:] == path.read_bytes()[4096:]
        paging.give_back([path])
        assert view[:] == path.read_bytes()[4096:]


def test_other_ways_of_loading(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="--load quick: unknown; choose from auto, lean, read, mapped"):
        open_session(whole, load="quick")
    free = type("Memory", (), {"available": whole.stat().st_size})
    monkeypatch.setattr(session_module.psutil, "virtual_memory", lambda: free)  # less than the file
    with open_session(whole, threads=1) as session:
        assert session.description["load_mode"] == "mapped-plain"
    monkeypatch.setattr(library, "SWITCHES", (72, bytes((1, 0, 1, 0, 0))))  # as if its fields lay elsewhere
    with pytest.raises(TargetError, match="has no load modes that KL Lens knows"):
        open_session(whole, load="mapped")
    with open_session(whole, threads=1) as session:
        assert session.description["load_mode"] == "the library's default"


def test_foreign_files_are_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(TargetError, match="no such file"):
        open_session(path)
    for content, message in (
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), r"not a GGUF file: it begins with b'PK"),
        (b"GGUF" + struct.pack("<I", 99) + bytes(100), "GGUF version 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 2**62) + bytes(100), "is damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(TargetError, match=message) as caught:
            open_session(path)
        assert "\n" not in str(caught.value)


def test_damage_never_escapes_as_another_error(whole: Path, tmp_path: Path) -> None:
    data, random, path = whole.read_bytes(), np.random.default_rng(0), tmp_path / "x.gguf"
    for length in (len(data) - 1, *[6000] * 100):  # the header, and tensors that reach beyond the end
        damaged = bytearray(data[:length])
        for place in random.integers(0, 4000, 4 if length == 6000 else 0):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        with pytest.raises(TargetError):
            read_header(path)


def _write(path: Path, architecture: str, tensors: dict[str, np.ndarray], **numbers: int) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key.replace('__', '.')}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_llama_cpp_itself_refuses_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    _write(path, "gadget", {"output_norm.weight": np.zeros(4, np.float32)})
    with pytest.raises(
        TargetError, match=r"llama\.cpp cannot load it: .*unknown model architecture: 'gadget'"
    ):
        open_session(path)
    _write(path, "mamba", {"output_norm.weight": np.zeros(4, np.float32)}, block_count=1)
    with pytest.raises(TargetError, match=r"llama\.cpp cannot load it: .*key not found"):
        open_session(path)


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


def test_a_device_that_llama_cpp_lacks_is_refused(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would run on the processor and be labelled with the device."""
    assert main(["generate", "--prompt", "a", str(whole), "--device", "npu"]) == 1
    assert "--device NPU: llama.cpp runs on CPU; --gpu-layers N puts" in capsys.readouterr().err
    if not library.find_library().has_gpu:
        with pytest.raises(TargetError, match=r"--gpu-layers 4: .* has no GPU backend, or finds no GPU"):
            open_session(whole, gpu_layers=4)


def test_no_layers_on_a_gpu_means_no_gpu(monkeypatch: pytest.MonkeyPatch, whole: Path) -> None:
    """llama.cpp would still multiply long prompts there, in half precision."""
    own = library.find_library()
    with open_session(whole, threads=1) as session:
        expected = session.logits(range(40))
    monkeypatch.setattr(library.LlamaLibrary, "has_gpu", property(lambda self: True))
    devices = ctypes.c_void_p.from_buffer(own.model_parameters(0)).value
    assert devices is not None
    assert ctypes.c_void_p.from_address(devices).value is None  # the list is there, and empty
    assert ctypes.c_void_p.from_buffer(own.model_parameters(4)).value is None  # any that there is
    with open_session(whole, threads=1) as session:
        assert (session.logits(range(40)) == expected).all()


def test_state_space_models_have_no_length_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "LARGEST_CONTEXT", 32)
    artifact = export(tiny("mamba"), Plan("p", {}, "test"), tmp_path)
    with open_session(tmp_path / artifact.files[0], threads=1) as session:
        last = session.prefill([token % 97 for token in range(1500)])
        every = session.logits([token % 97 for token in range(1500)])
    assert np.abs(last - every[-1]).max() < 1e-3


def test_the_users_library_is_used_or_refused_never_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(tmp_path / "libllama.so"))
    with pytest.raises(
        TargetError, match=r"libllama\.so: no llama\.cpp library there; --llama-cpp and LLAMA"
    ):
        library.find_library()
    (tmp_path / "libllama.so").write_bytes(b"no library")
    with pytest.raises(TargetError, match="cannot be loaded"):
        library.find_library()
    import ctypes.util

    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, ctypes.util.find_library("m") or "libm.so.6")
    with pytest.raises(TargetError, match=r"is not a llama\.cpp library"):
        library.find_library()


def test_an_unknown_parameter_layout_is_refused() -> None:
    loaded = library.find_library()
    strange = library.Parameters()
    with pytest.raises(TargetError, match="unknown layout"):
        loaded.attention_offsets(strange)
    with pytest.raises(TargetError, match="n_batch is not where KL Lens knows it"):
        loaded.require_default(strange, "n_batch", 4, (2048,))
