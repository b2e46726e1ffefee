"""The latency table for llama.cpp: operations timed inside a running model, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import TargetError
from kl_lens.records import Artifact, Plan
from kl_lens.targets import export
from kl_lens.targets.latency import LatencyProfile, other_conditions
from tests.families import tiny_model

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("xllamacpp", reason="needs the extra gguf")

from kl_lens.targets.gguf.latency import Kernels
from kl_lens.targets.gguf.library import find_library
from kl_lens.targets.gguf.session import open_session
from kl_lens.targets.gguf.tracing import Tracer


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact]:
    """With experts and attention: products, chosen products, look-ups."""
    folder = tmp_path_factory.mktemp("latency")
    model = LoadedModel("tiny", Path(), tiny_model("jamba_experts"), None)
    artifact = export(model, Plan("uniform_fp16", {}, "test"), "gguf", folder)
    return folder / artifact.files[0], artifact


def matrices(artifact: Artifact) -> list[str]:
    return [t.runtime_name for t in artifact.tensors if t.realised == "fp16"]


def test_every_weight_is_timed_in_every_token(exported: tuple[Path, Artifact]) -> None:
    file, artifact = exported
    tracer = Tracer(find_library(), matrices(artifact))
    with open_session(file, threads=1) as session, session.watched(tracer.callback) as watched:
        assert np.array_equal(watched.logits([1, 2, 3]), session.logits([1, 2, 3]))
        assert not tracer.seconds
        tracer.recording = True
        for token in (4, 5):
            assert np.array_equal(watched.step(token), session.step(token)), "watching changes no number"
    tracer.require_all()
    assert {weight for weight, _ in tracer.seconds} == set(matrices(artifact))
    assert all(len(times) % 2 == 0 and min(times) > 0 for times in tracer.seconds.values())


def test_a_weight_that_nothing_reads_is_refused(exported: tuple[Path, Artifact]) -> None:
    file, artifact = exported
    tracer = Tracer(find_library(), [*matrices(artifact), "blk.0.nothing.weight"])
    with open_session(file, threads=1) as session, session.watched(tracer.callback) as watched:
        tracer.recording = True
        watched.prefill([1])
    with pytest.raises(TargetError, match=r"no operation reads blk\.0\.nothing\.weight itself"):
        tracer.require_all()


def test_a_library_with_another_layout_is_refused() -> None:
    class Overhead:
        restype = None

        def __call__(self) -> int:
            return 376

    functions = SimpleNamespace(ggml_get_name=lambda tensor: 0, ggml_tensor_overhead=Overhead())
    with pytest.raises(TargetError, match=r"libother\.so: ggml_tensor has another layout"):
        Tracer(SimpleNamespace(path=Path("libother.so"), functions=functions), [])  # type: ignore[arg-type]
    with pytest.raises(TargetError, match=r"libother\.so does not support timing its operations"):
        Tracer(SimpleNamespace(path=Path("libother.so"), functions=object()), [])  # type: ignore[arg-type]


def test_one_time_for_each_shape_and_format() -> None:
    """Two matrices of one shape, one that is used twice in a token; another shape; one tensor that stays FP16."""
    tensors = {"a": "A", "b": "B", "wide": "Wide"}
    kernels = Kernels(tensors, {"a": (2, 3), "b": (2, 3), "wide": (9, 3)})
    product = 29
    kernels.add(
        {"a": "q8_0", "b": "q8_0", "wide": "fp16"},
        {("a", product): [1.0, 9.0], ("b", product): [2.0, 2.0, 2.0, 2.0], ("wide", product): [5.0, 5.0]},
        tokens=2,
    )
    assert kernels.seconds("A", {"a": "q8_0"}) == 2.0, (
        "the median over both, which one long time does not change"
    )
    assert kernels.seconds("B", {"b": "q8_0"}) == 4.0
    assert kernels.seconds("Wide", {"wide": "fp16"}) == 5.0
    assert kernels.seconds("Wide", {"wide": "q8_0"}) is None, "no shape speaks for another"


def test_a_prediction_needs_every_time() -> None:
    profile = LatencyProfile("t", {"a": {"fp16": 2.0, "q8_0": 1.0}, "norm": {"fp16": 0.5}}, {})
    assert profile.predicted({"a": "q8_0", "norm": "f32"}) == 1.5
    assert profile.predicted({}) == 2.5
    assert profile.predicted({"a": "q6_k"}) is None


def test_other_conditions_are_one_line() -> None:
    here = {"runtime": "llama.cpp 2", "threads": 1}
    assert other_conditions({"runtime": "llama.cpp 2", "threads": 1, "load": "auto"}, here) is None
    assert other_conditions({"runtime": "llama.cpp 1", "threads": 1}, here) == (
        "runtime llama.cpp 1 (here: llama.cpp 2)"
    )
    assert "an earlier version" in (other_conditions(None, here) or "")
