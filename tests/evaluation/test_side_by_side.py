"""Several files at once: the same numbers as one by one, and threads stop when their results are not wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kl_lens.base.errors import TargetError
from kl_lens.cli.progress import Forecast
from kl_lens.evaluation import (
    EvaluationText,
    Evaluator,
    JudgedArtifact,
    JudgedModel,
    ScoreJournal,
    SessionSettings,
    side_by_side as module,
)
from kl_lens.evaluation.agreement import WINDOWS
from kl_lens.evaluation.side_by_side import lanes_for, side_by_side
from kl_lens.measuring.sweep import Progress
from kl_lens.model import LoadedModel
from kl_lens.run.folder import Run

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("openvino", reason="needs the extra openvino")

Exported = Callable[[str], Path]


@pytest.fixture
def files(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> list[JudgedArtifact]:
    """More than there are lanes, of two targets in turns."""
    monkeypatch.setattr(module, "processors", lambda: 2)
    return [JudgedArtifact(exported(target), SessionSettings()) for target in ("gguf", "openvino", "gguf")]


def test_files_judged_at_once_get_the_scores_of_one_after_the_other(
    files: list[JudgedArtifact], model: LoadedModel, text: EvaluationText, tmp_path: Path
) -> None:
    """Each on one thread there, each on two here."""
    assert lanes_for(files, 0) == (2, files)
    found = {}
    for name, settings in (("together", SessionSettings()), ("alone", SessionSettings(threads=2))):
        heard: list[str] = []
        forecast = Forecast()

        def advanced(work: float, what: str, heard: list[str] = heard, forecast: Forecast = forecast) -> None:
            before = forecast.share
            forecast.advance(work)
            assert forecast.share > before
            heard.append(what)

        progress = Progress(forecast.start, advanced)
        with Run.create(tmp_path / name) as run:
            evaluator = Evaluator(ScoreJournal(run), JudgedModel(model), progress)
            outcome = evaluator.judge_text([JudgedArtifact(f.path, settings) for f in files], text)
        assert not outcome.failures
        found[name] = [(s.subject.label, s.kind, s.values) for s in outcome.scores]
        every, windows = [what.partition(",")[0] for what in heard], len(text.items)
        assert every[:windows] == ["original"] * windows
        # Two of the files are the same, and judged once; their weights in PyTorch on a few windows.
        assert len(every) == 3 * windows + 2 * WINDOWS
        assert forecast.share == 1  # one scale for all of it
    assert found["together"] == found["alone"]


def test_how_many_run_at_once(files: list[JudgedArtifact], monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, openvino, other = files
    alone = (1, [])
    assert lanes_for([gguf, JudgedArtifact(other.path, SessionSettings(threads=2))], 0) == alone
    on_gpu = JudgedArtifact(other.path)
    on_gpu.settings = SessionSettings(gpu_layers=1)
    assert lanes_for([gguf, on_gpu], 0) == alone
    assert lanes_for([gguf], 0) == alone
    assert lanes_for(files, 1 << 60) == alone  # no room for logits
    for least, chosen in ((2, [gguf, other]), (None, [gguf, other]), (1, files)):
        monkeypatch.setattr(type(openvino.target), "fewest_threads", lambda target, place, n=least: n)
        assert lanes_for(files, 0) == (2, chosen)
    monkeypatch.setattr(module, "processors", lambda: 8)
    assert lanes_for(files, 0) == (3, files)


def test_a_file_that_fails_does_not_hold_up_the_others(
    files: list[JudgedArtifact],
    model: LoadedModel,
    text: EvaluationText,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = JudgedArtifact.open

    def damaged(judged: JudgedArtifact, threads: int | None = None) -> object:
        session = opened(judged, threads)
        if judged.target.name == "openvino":
            logits = session.logits
            session.logits = lambda ids: logits(ids) * np.nan
        return session

    def gone() -> None:
        raise TargetError("it is gone")

    monkeypatch.setattr(JudgedArtifact, "open", damaged)
    broken = JudgedArtifact(files[0].path, SessionSettings(), "broken")
    broken._identity = "another"
    monkeypatch.setattr(broken, "check", gone)
    with Run.create(tmp_path / "run") as run:
        outcome = Evaluator(ScoreJournal(run), JudgedModel(model)).judge_text([broken, *files[:2]], text)
    assert outcome.failures.keys() == {broken.label, files[1].label}
    assert "not finite" in outcome.failures[files[1].label]
    assert files[0].subject in {score.subject for score in outcome.scores}


def test_threads_stop_when_iteration_stops_and_a_mistake_of_ours_is_not_swallowed(
    files: list[JudgedArtifact], text: EvaluationText, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    arriving = side_by_side({judged: [0, 1, 2, 3] for judged in files}, text, 2)
    next(arriving)
    with pytest.raises(KeyboardInterrupt):
        arriving.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    monkeypatch.setattr(files[0], "open", lambda threads: {}["nothing"])
    with pytest.raises(KeyError, match="nothing"):
        list(side_by_side({judged: [0] for judged in files}, text, 2))
    assert threading.active_count() == before
