"""Several files at once: the same numbers as one after the other, and nothing goes on when nobody wants it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kl_lens.checkpoints import LoadedModel
from kl_lens.errors import TargetError
from kl_lens.evaluation import (
    EvaluationText,
    Evaluator,
    Journal,
    JudgedArtifact,
    JudgedModel,
    RuntimeSettings,
    side_by_side as module,
)
from kl_lens.evaluation.side_by_side import lanes_for, side_by_side
from kl_lens.runs import Run
from kl_lens.sensitivity.sweep import Progress

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("openvino", reason="needs the extra openvino")

Exported = Callable[[str], Path]


@pytest.fixture
def files(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> list[JudgedArtifact]:
    monkeypatch.setattr(module, "processors", lambda: 2)
    return [JudgedArtifact(exported(target), RuntimeSettings()) for target in ("openvino", "gguf")]


def test_files_judged_at_once_get_the_scores_of_one_after_the_other(
    files: list[JudgedArtifact], model: LoadedModel, text: EvaluationText, tmp_path: Path
) -> None:
    assert lanes_for(files) == (2, files)
    found = {}
    for name, together in (("together", True), ("alone", False)):
        heard: list[str] = []
        with Run.create(tmp_path / name) as run:
            evaluator = Evaluator(
                Journal(run),
                JudgedModel(model),
                Progress(advanced=lambda work, what, heard=heard: heard.append(what)),
            )
            chosen = (
                files if together else [JudgedArtifact(f.path, RuntimeSettings(threads=1)) for f in files]
            )
            outcome = evaluator.judge_text(chosen, text)
        assert not outcome.failures
        found[name] = {(s.subject.target, s.kind): s.values for s in outcome.scores}
        every = [what.partition(",")[0] for what in heard]
        assert every[:6] == ["original"] * len(text.items)
        assert sorted(every[6:]) == sorted(file.label for file in files for _ in text.items)
    assert found["together"] == found["alone"]


def test_what_was_settled_by_hand_is_left_as_it_is(
    files: list[JudgedArtifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = files
    assert lanes_for([one, JudgedArtifact(other.path, RuntimeSettings(threads=2))])[1] == []
    assert lanes_for([one, JudgedArtifact(other.path, RuntimeSettings(gpu_layers=1))])[1] == []
    assert lanes_for([one])[1] == []
    monkeypatch.setattr(type(one.target), "fewest_threads", lambda target, place: 2)
    assert lanes_for(files)[1] == []  # one thread each would compute otherwise
    monkeypatch.setattr(module, "processors", lambda: 4)
    assert lanes_for(files) == (2, files)
    monkeypatch.setattr(module, "_FREE_SHARE", 0.0)
    assert lanes_for(files)[1] == []


def test_a_file_that_fails_is_left_to_whoever_judges_it_alone(
    files: list[JudgedArtifact], text: EvaluationText, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, sound = files

    def gone() -> None:
        raise TargetError("it is gone")

    monkeypatch.setattr(broken, "check", gone)
    missing = {judged: [0, 1] for judged in files}
    found = [(item.judged, item.window) for item in side_by_side(missing, text, 2)]
    assert found == [(sound, 0), (sound, 1)]


def test_nothing_goes_on_when_nobody_listens(files: list[JudgedArtifact], text: EvaluationText) -> None:
    before = threading.active_count()
    arriving = side_by_side({judged: [0, 1, 2, 3] for judged in files}, text, 2)
    next(arriving)
    arriving.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
