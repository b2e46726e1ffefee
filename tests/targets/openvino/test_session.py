"""Sessions: state, errors that say what to do, the compile cache and its trap."""

from collections.abc import Callable

import numpy as np
import pytest

from kl_lens.base.errors import TargetError
from kl_lens.targets import open_session
from kl_lens.targets.openvino import session as session_module
from kl_lens.targets.openvino.folder import graph_file
from kl_lens.targets.openvino.rewrites import is_gated
from kl_lens.targets.openvino.session import read_graph
from tests.families import token_ids

IDS = token_ids(1, 20)[0].tolist()


def test_reset_forgets_and_two_sessions_do_not_mix(exported: Callable) -> None:
    session, second = (
        open_session(exported("mamba").folder, exact=True, threads=1) for _ in range(2)
    )
    first = session.prefill(IDS)
    assert not np.allclose(session.prefill(IDS), first)  # it goes on where it was
    session.reset()
    np.testing.assert_array_equal(session.prefill(IDS), first)
    session.reset()
    session.prefill(IDS[:10])
    second.prefill(IDS[10:])
    np.testing.assert_allclose(session.prefill(IDS[10:]), first, atol=1e-5)
    for ids in ([], [97], [-1]):
        with pytest.raises(TargetError, match="token"):
            session.prefill(ids)
    session.close()
    with pytest.raises(TargetError, match="closed"):
        session.step(1)


def test_a_session_leaves_nothing_in_the_folder(exported: Callable) -> None:
    folder = exported("mamba", "mixed").folder
    before = sorted(folder.rglob("*"))
    exact, usual = (
        open_session(folder, exact=exact, threads=1) for exact in (True, False)
    )
    exact.logits(IDS)
    usual.logits(IDS)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("family", "gated"), [("llama", True), ("mamba", False)])
def test_one_thread_and_a_gated_part_compute_in_float32(
    exported: Callable, monkeypatch: pytest.MonkeyPatch, family: str, gated: bool
) -> None:
    """In bfloat16 OpenVINO would divide by zero."""
    monkeypatch.setattr(session_module, "computes_in_bfloat16", lambda: True)
    folder = exported(family).folder
    assert is_gated(read_graph(graph_file(folder))) == gated
    if gated:
        precision = open_session(folder, threads=1).description[
            "inference_precision_hint"
        ]
        assert precision == "<Type: 'float32'>"


def test_a_device_that_is_not_there_and_a_time_limit(
    exported: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TargetError, match=r"no device 'TPU' here; it finds .*CPU"):
        open_session(exported("mamba").folder, device="TPU")
    monkeypatch.setenv("KL_LENS_COMPILE_TIMEOUT", "0.000001")
    with pytest.raises(
        TargetError,
        match=r"took more than 1e-06 s and was stopped.*KL_LENS_COMPILE_TIMEOUT",
    ):
        open_session(exported("mamba").folder)
    monkeypatch.setenv("KL_LENS_COMPILE_TIMEOUT", "soon")
    with pytest.raises(TargetError, match="expected a number of seconds"):
        open_session(exported("mamba").folder)


def test_a_static_file_is_for_other_tools(exported: Callable) -> None:
    case = exported("mamba", static_tokens=4, with_head=False)
    assert "lm_head" not in (case.folder / "openvino_model.xml").read_text()
    with pytest.raises(TargetError, match="exported with --static-tokens"):
        open_session(case.folder)
