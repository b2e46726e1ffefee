"""Who results are about, how a run keeps them, and which of them are about what is there now."""

import json
from dataclasses import replace
from pathlib import Path

from tests.reporting.sample import about, make_run

from kl_lens.reporting.data import collect
from kl_lens.run.folder import Run
from kl_lens.run.records import ARTIFACT, Subject
from kl_lens.run.subjects import current_results, file_digest, is_current, outside_path


def test_a_plan_that_was_edited_takes_its_scores_with_it_and_back(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", stages=("plan", "evaluate"))
    path = folder / "plans/small.json"
    before = path.read_text()
    with Run.open(folder) as run:

        def scored() -> set[str]:
            return {result.subject.label for result in current_results(run, "score")}

        assert {"torch/small", "torch/recommended", "original"} <= scored()
        path.write_text(before.replace('"int4"', '"int8"', 1))
        assert scored() & {"torch/small", "torch/recommended"} == {"torch/recommended"}
        assert "torch/small" not in {score.subject.label for score in collect(run).scores}
        path.write_text(
            before.replace('"int4"', '"INT4"', 1)
        )  # only spelled in another way
        assert "torch/small" in scored()
        path.unlink()
        assert "torch/small" not in scored()
        path.write_text(before)
        assert "torch/small" in scored()


def test_an_artifact_that_was_exported_again_takes_its_results_with_it(
    tmp_path: Path,
) -> None:
    folder = make_run(
        tmp_path / "run", stages=("plan", "evaluate", "benchmark", "generate")
    )
    path = folder / "artifacts/openvino/recommended/artifact.json"
    record = json.loads(path.read_text())
    with Run.open(folder) as run:
        subject = about(run, "openvino", "recommended")
        run.store_result("agreement", subject, "t", {"what": "t", "verdict": "agrees"})

        def kinds() -> set[str]:
            view = collect(run)
            current = {
                "score": view.scores,
                "profile": view.profiles,
                "generation": view.generations,
            }
            shown = {
                k
                for k, records in current.items()
                if subject in {r.subject for r in records}
            }
            return shown | {
                "agreement" for (judged, _) in view.verdicts if judged == subject
            }

        assert kinds() == {"score", "profile", "generation", "agreement"}
        for change in (
            {"settings": {"static_tokens": 4}},
            {"tensors": [t | {"digest": "of other bytes"} for t in record["tensors"]]},
            {"model_fingerprint": "of another model"},
        ):
            path.write_text(json.dumps(record | change))
            assert kinds() == set(), change


def test_files_from_outside_are_current_as_long_as_their_content_is(
    tmp_path: Path,
) -> None:
    file = tmp_path / "gguf" / "small"
    file.parent.mkdir()
    file.write_bytes(b"one")
    with Run.create(tmp_path / "run") as run:
        in_run = Subject(ARTIFACT, "small", "gguf")
        outside = replace(in_run, settings={"path": outside_path(file)})
        assert outside.label != in_run.label
        assert outside.own_plan is None
        judged = replace(outside, digest=file_digest(file))
        assert is_current(run, judged)
        file.write_bytes(b"two")
        assert not is_current(run, judged)
        file.unlink()
        assert is_current(run, judged)  # nothing else has taken its name
