"""Many subjects on one text: agreement with PyTorch, damaged files, and going on after an interruption."""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kl_lens import planning
from kl_lens.base.errors import KLLensError
from kl_lens.base.progress import Progress
from kl_lens.cli.progress import Forecast
from kl_lens.judging import (
    EvaluationText,
    Evaluator,
    JudgedArtifact,
    JudgedModel,
    Outcome,
    ScoreJournal,
    ahead,
    given_subjects,
    prepare,
    read_scores,
    run_subjects,
)
from kl_lens.judging.ahead import Ahead, lanes_for, side_by_side
from kl_lens.judging.duel import entrants
from kl_lens.judging.scoring import (
    AGREES,
    AS_DEPLOYED,
    COMPARED_WINDOWS,
    DISAGREES,
    IN_FLOAT32,
    differences,
    within,
)
from kl_lens.judging.texts import text_window
from kl_lens.measuring.sweep import model_identity
from kl_lens.model import LoadedModel, load
from kl_lens.model.kernels import swap
from kl_lens.run.folder import Run
from kl_lens.run.readings import KL, NLL, Reading, packed
from kl_lens.run.records import Plan
from kl_lens.run.subjects import file_digest, plan_digest
from kl_lens.targets import SessionSettings, export, read_artifact
from kl_lens.targets.openvino.session import rounds_in_groups
from tests.planted import growing

GGUFReader = pytest.importorskip("gguf", reason="needs the extra gguf").GGUFReader
pytest.importorskip("openvino", reason="needs the extra openvino")

SETTINGS = SessionSettings(threads=1)
OTHER = "wikitext2:test"
ROOM = 1 << 62  # bytes: more memory than there is


def judged(
    model: LoadedModel,
    folder: Path,
    text: EvaluationText,
    run_folder: Path,
    *more_files: JudgedArtifact,
) -> Outcome:
    with Run.create(run_folder) as run:
        judge = Evaluator(ScoreJournal(run), text, JudgedModel(model))
        return judge.judge([JudgedArtifact(folder, SETTINGS)], more_files)


def plans_of(run: Run) -> dict[str, Plan | KLLensError]:
    return planning.stored_plans(run.folder / "plans", run.components)


def run_with(folder: Path, model: LoadedModel, **plans: dict[str, str]) -> Run:
    """A run about a model, with plans."""
    run = Run.create(folder)
    run.identify(model_identity(model))
    for name, assignment in plans.items():
        components = model.anatomy.components
        planning.write_plan(
            Plan(name, assignment, "test"),
            planning.plan_path(folder / "plans", name),
            components,
        )
    return run


def with_digests(folder: Path, weights: str = "") -> None:
    """Changes what an artifact's record says about every tensor."""
    record = json.loads((folder / "artifact.json").read_text())
    for tensor in record["tensors"]:
        tensor |= {"digest": "", "weights": weights}
    record["digests"] = {name: file_digest(folder / name) for name in record["files"]}
    (folder / "artifact.json").write_text(json.dumps(record))


def with_other_scales(folder: Path) -> None:
    """Makes the scales of one layer of a GGUF larger, as an exporter with a mistake might."""
    (file,) = folder.glob("*.gguf")
    reader = GGUFReader(file, "r+")
    tensor = next(t for t in reader.tensors if t.name == "blk.1.ssm_in.weight")
    scales = tensor.data.reshape(-1, 34)[:, :2].view(np.float16)
    scales *= np.float16(1.1)
    reader.data.flush()


@pytest.fixture(scope="module")
def reference() -> LoadedModel:
    """The embedded Mamba: trained, so that wrong weights cost it something."""
    return load("reference:mamba")


@pytest.fixture(scope="module")
def reference_text(reference: LoadedModel) -> EvaluationText:
    return prepare("wikitext2:valid", reference.task, window=64, limit=4)


@pytest.fixture(scope="module")
def shipped(
    request: pytest.FixtureRequest,
    reference: LoadedModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    fmt = {"gguf": "q8_0", "openvino": "int8"}[request.param]
    formats = {
        c.name: fmt
        for c in reference.anatomy.candidates
        if not c.name.endswith("dt_proj")
    }
    folder = tmp_path_factory.mktemp("shipped") / request.param
    export(reference, Plan("eight", formats, "test"), request.param, folder)
    return folder


@pytest.mark.parametrize(
    "shipped", ["gguf", pytest.param("openvino", marks=pytest.mark.slow)], indirect=True
)
def test_pytorch_agrees_with_a_file_and_stands_in_for_others_of_its_runtime(
    shipped: Path, reference: LoadedModel, reference_text: EvaluationText, tmp_path: Path
) -> None:
    copy = JudgedArtifact(
        Path(shutil.copytree(shipped, tmp_path / "other")), SETTINGS, "other"
    )
    outcome = judged(reference, shipped, reference_text, tmp_path / "run", copy)
    (agreement,) = outcome.agreements
    modelled = shipped.name == "gguf" or rounds_in_groups()
    assert agreement.verdict in (AGREES, AS_DEPLOYED if modelled else IN_FLOAT32)
    assert agreement.counterpart.label == f"torch/eight as {shipped.name}"
    values = {
        s.subject: s.values["kl_mean"].value
        for s in outcome.scores
        if s.kind == "divergence"
    }
    assert list(values) == [judged.subject for judged in outcome.judged]
    file, instead = values
    if modelled:
        assert instead.label == f"torch/other as {shipped.name} deployed"
        assert instead.file_key == copy.subject.key
    elif agreement.verdict == AGREES:  # on x86 without bfloat16
        assert instead.label == f"torch/other as {shipped.name}"
    else:
        assert instead == copy.subject
    assert values[instead] == pytest.approx(
        values[file], rel=0.02, abs=1e-4
    )  # what agreement means


@pytest.mark.parametrize("shipped", ["gguf"], indirect=True)
def test_a_file_with_other_weights_is_flagged_and_pytorch_does_not_stand_in(
    shipped: Path, reference: LoadedModel, reference_text: EvaluationText, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(
        shipped, folder
    )  # with the runtime's compiled copy, which must not hide the damage
    with_other_scales(folder)
    with_digests(
        folder
    )  # an exporter with a mistake would record what it wrote: the numbers must tell
    changed = JudgedArtifact(folder, SETTINGS, "other")
    outcome = judged(reference, folder, reference_text, tmp_path / "run", changed)
    assert [agreement.verdict for agreement in outcome.agreements] == [DISAGREES] * 2
    assert outcome.judged[1] is changed


@pytest.mark.parametrize(("windows", "length"), [(1, 255), (4, 255), (20, 100)])
def test_the_rule_looks_at_differences_by_token(windows: int, length: int) -> None:
    """Text that varies wildly hides nothing; a small common shift is seen, one that scatters around zero is noise."""
    noise = np.random.default_rng(0)
    hard = noise.gamma(2, 2, (windows, length))
    kl = noise.gamma(1, 1e-3, (windows, length))
    scatter, small = (
        noise.normal(0, size, hard.shape) for size in (0.04, 8e-4)
    )  # as in an 8-bit file

    def scores(losses: np.ndarray, kls: np.ndarray) -> list[Reading]:
        return [
            Reading(index, length, length, {}, {NLL: packed(nll), KL: packed(kl)})
            for index, (nll, kl) in enumerate(zip(losses, kls, strict=True))
        ]

    original = scores(hard, kl)
    assert within(differences(scores(hard + 0.0005, kl), original))
    assert not within(differences(scores(hard + 0.011, kl), original))
    assert within(
        differences(
            scores(hard + scatter - scatter.mean(), kl + small - small.mean()), original
        )
    )
    wrong = (
        kl + 1.4e-3 + 5 * (small - small.mean())
    )  # a Mamba scan whose state grows by 1.001 per step
    assert not within(
        differences(scores(hard + scatter - scatter.mean(), wrong), original)
    )
    # Where rounding alone costs 0.04 nats, two roundings of one model differ by that much in a token.
    costly = kl + 0.04 - kl.mean()
    large = noise.normal(0, 0.3, hard.shape)
    rounded = scores(hard, costly)
    for shift, agrees in ((0.02, True), (0.05, False)):
        other = scores(hard + large - large.mean() + shift, costly)
        assert within(differences(other, rounded)) == agrees


def test_of_very_few_tokens_only_a_large_difference_counts() -> None:
    """Fifteen tokens are one stretch, which has no error; of sixteen, two stretches agree about a small shift."""

    def readings(losses: np.ndarray) -> list[Reading]:
        arrays = {NLL: packed(losses)}
        return [Reading(0, len(losses), len(losses), {}, arrays)]

    for count, allowed in ((15, 0.0099), (16, 0.00099)):
        expected = np.linspace(1, 3, count)
        assert within(differences(readings(expected + allowed), readings(expected)))
        shifted = readings(expected + 1.03 * allowed)
        assert not within(differences(shifted, readings(expected)))
        change, _ = differences(shifted, readings(expected))["cross_entropy"]
        assert change.value == pytest.approx(1.03 * allowed, rel=1e-3)


@pytest.mark.parametrize("shipped", ["gguf"], indirect=True)
def test_if_pytorch_is_the_side_that_is_wrong_it_is_computed_again_and_said(
    shipped: Path, reference: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that was right on the short window of the check: the file is not blamed for it."""
    messages: list[str] = []
    model = load("reference:mamba")
    model.warn = messages.append
    assert model.chain.uses_kernels()
    monkeypatch.setattr(swap, "selective_scan", growing(swap.selective_scan, 1.005))
    text = prepare("wikitext2:test", reference.task, window=96, limit=1)
    outcome = judged(model, shipped, text, tmp_path / "run")
    (line,) = messages
    assert "our kernel for Mamba-1 scan is wrong here" in line
    assert outcome.agreements[0].verdict != DISAGREES
    runtimes = [
        score.runtime for score in outcome.scores if score.subject.what == "original"
    ]
    assert [runtime["kernels"] for runtime in runtimes] == [
        "our kernel for Mamba-1 scan is wrong here"
    ]


def test_a_longer_text_uses_the_windows_that_are_there_and_no_kinds_leave_no_scores(
    model: LoadedModel, text: EvaluationText, tiny_folder: Path, tmp_path: Path
) -> None:
    longer = prepare(str(tiny_folder / "text.txt"), model.task, window=48, limit=8)
    advanced: list[str] = []
    with Run.create(tmp_path / "run") as run:
        journal = ScoreJournal(run)
        Evaluator(journal, text, JudgedModel(model), ()).judge([])
        assert read_scores(run) == []
        progress = Progress(advanced=lambda _, label: advanced.append(label))
        kinds = ("perplexity",)
        Evaluator(journal, longer, JudgedModel(model), kinds, progress).judge([])
        assert len(read_scores(run)) == 1
    assert len(advanced) == 2


def test_identities_change_with_what_makes_the_numbers(
    model: LoadedModel, exported: Callable[[str], Path]
) -> None:
    folder = exported("gguf")
    whole = JudgedArtifact(folder)
    file = JudgedArtifact(next(folder.glob("*.gguf")))
    assert (whole.identity, whole.subject) == (file.identity, file.subject)
    assert JudgedArtifact(folder, SessionSettings(exact=True)).identity != whole.identity
    with_other_scales(folder)
    with_digests(folder, "of another quantizer")
    assert JudgedArtifact(folder).identity != whole.identity
    selection = given_subjects([folder], SETTINGS, model)
    (reason,) = selection.failures.values()
    assert "backbone.embeddings in q8_0 is not the exported weight" in reason
    assert selection.subjects == []
    a, b, other = (
        JudgedModel.of_plan(model, Plan(name, {"backbone.embeddings": fmt}, "test"))
        for name, fmt in (("a", "int8"), ("b", "int8"), ("a", "int4"))
    )
    assert a.identity == b.identity != other.identity  # the same weights are judged once
    assert a.subject != b.subject


def test_files_from_elsewhere_never_take_the_place_of_the_runs_own(
    model: LoadedModel,
    text: EvaluationText,
    exported: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Folders that are called like the original, and like the run's own artifact."""
    own = tmp_path / "run/artifacts/openvino/eight"
    for place in (own, tmp_path / "original", tmp_path / "openvino/eight"):
        shutil.copytree(exported("openvino"), place)
    monkeypatch.chdir(tmp_path)
    with run_with(tmp_path / "run", model) as run:
        run.store(
            "artifact",
            "openvino/eight",
            read_artifact(own).to_json() | {"folder": str(own)},
        )
        before = run_subjects(run, model, SETTINGS, plans_of(run))
        judge = Evaluator(ScoreJournal(run), text, JudgedModel(model), ("perplexity",))
        judge.judge(before.subjects)
        scores = {score.subject: score.values for score in read_scores(run)}
        others = given_subjects(
            [Path("original"), Path("openvino/eight")], SETTINGS, model, run
        )
        judge.judge(others.subjects)
        after = {score.subject: score.values for score in read_scores(run)}
        assert {subject: after[subject] for subject in scores} == scores
        new = {subject.label for subject in set(after) - set(scores)}
        assert new == {str(tmp_path / "original"), str(tmp_path / "openvino/eight")}


def test_a_file_of_an_earlier_plan_is_said_to_be_one(
    model: LoadedModel, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    own = tmp_path / "run/artifacts/openvino/eight"
    shutil.copytree(exported("openvino"), own)
    artifact = read_artifact(own)
    assignment = {t.component: t.planned for t in artifact.tensors if t.planned == "int8"}
    with run_with(tmp_path / "run", model, eight=assignment) as run:
        of_plan = plan_digest(assignment, model.fingerprint)
        run.store(
            "artifact",
            "openvino/eight",
            artifact.to_json() | {"folder": str(own), "of_plan": of_plan},
        )
        selection = run_subjects(run, model, SETTINGS, plans_of(run))
        assert selection.notes == []
        assert [judged.label for judged in selection.subjects] == [
            "torch/eight",
            "openvino/eight",
        ]
        path = planning.plan_path(run.folder / "plans", "eight")
        path.write_text(path.read_text().replace('"int8"', '"int4"', 1))
        (note,) = run_subjects(run, model, SETTINGS, plans_of(run)).notes
        assert (
            note
            == "openvino/eight was exported from an older version of its plan; export it again"
        )


# -- several files at once -----------------------------------------------------------------------------------


@pytest.fixture
def files(
    exported: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> list[JudgedArtifact]:
    """More than there are lanes, of two targets in turns."""
    monkeypatch.setattr(ahead, "processors", lambda: 2)
    return [
        JudgedArtifact(exported(target), SessionSettings())
        for target in ("gguf", "openvino", "gguf")
    ]


def test_files_judged_at_once_get_the_scores_of_one_after_the_other(
    files: list[JudgedArtifact], model: LoadedModel, text: EvaluationText, tmp_path: Path
) -> None:
    """Each on one thread there, each on two here."""
    assert lanes_for(files, 0, ROOM) == (2, files)
    found = {}
    for name, settings in (
        ("together", SessionSettings()),
        ("alone", SessionSettings(threads=2)),
    ):
        heard: list[tuple[float, str]] = []
        forecast = Forecast()

        def advanced(
            work: float, what: str, heard: list = heard, forecast: Forecast = forecast
        ) -> None:
            forecast.advance(work)
            heard.append((forecast.share, what))

        progress = Progress(forecast.start, advanced)
        with Run.create(tmp_path / name) as run:
            judge = Evaluator(
                ScoreJournal(run), text, JudgedModel(model), progress=progress
            )
            outcome = judge.judge([JudgedArtifact(f.path, settings) for f in files])
            # Smallest first, with the KL of their scores; nothing on a text that was not judged whole.
            side = entrants(ScoreJournal(run), outcome.judged, text)
            longer = replace(text, items=(*text.items, text_window((1, 2, 3))))
            assert entrants(ScoreJournal(run), outcome.judged, longer) == []
        assert not outcome.failures
        assert [entrant.bytes for entrant in side] == sorted(
            file.target.loaded_bytes(file.path) for file in files
        )
        means = [s.values["kl_mean"] for s in outcome.scores if s.kind == "divergence"]
        assert {entrant.values["kl_mean"] for entrant in side} == set(means)
        found[name] = [(s.subject.label, s.kind, s.values) for s in outcome.scores]
        shares, every, windows = *zip(*heard, strict=True), len(text.items)
        assert list(shares) == sorted(set(shares))
        assert all(what.startswith("original,") for what in every[:windows])
        # Two of the files are the same, and judged once; their weights in PyTorch on a few windows.
        assert len(every) == 3 * windows + 2 * COMPARED_WINDOWS
        assert forecast.share == 1  # one scale for all of it
    assert found["together"] == found["alone"]


def test_files_are_read_ahead_within_the_memory(
    model: LoadedModel,
    text: EvaluationText,
    exported: Callable[[str], Path],
    tiny_folder: Path,
) -> None:
    folder = exported("gguf")
    file = JudgedArtifact(folder, SETTINGS, folder.name)
    longer = prepare(str(tiny_folder / "text.txt"), model.task, window=48, limit=8)
    size = 6 * 48 * 97 * 4  # bytes of the logits of the text
    little = Ahead(1, size - 1)
    little.read(folder, SETTINGS, text, 97)
    assert little.take(file, text) == []
    enough = Ahead(1, size)
    enough.read(folder, SETTINGS, text, 97)
    arrived = enough.take(file, longer)
    assert [item.window for item in arrived] == [0, 1, 2, 3, 4, 5]
    assert enough.take(file, longer) == []  # once
    with file.open() as session:
        for item in arrived:
            expected = session.logits(longer.items[item.window].ids)
            np.testing.assert_array_equal(item.logits, expected)
    enough.read(folder, SETTINGS, longer, 97)
    assert enough.take(file, longer) == []  # too large
    enough.read(folder, SETTINGS, prepare(OTHER, model.task, window=48, limit=6), 97)
    assert enough.take(file, text) == []
    for reader in (little, enough):
        reader.stop()


def test_how_many_run_at_once(
    files: list[JudgedArtifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf, openvino, other = files
    alone = (1, [])
    on_two_threads = JudgedArtifact(other.path, SessionSettings(threads=2))
    on_gpu = JudgedArtifact(other.path)
    on_gpu.settings = SessionSettings(gpu_layers=1)
    for one_file in ([gguf, on_two_threads], [gguf, on_gpu], [gguf]):
        assert lanes_for(one_file, 0, ROOM) == alone
    assert lanes_for(files, 1 << 60, ROOM) == alone  # no free memory for logits
    # Two files at 2.5 times their size, two windows of logits each and one besides.
    largest = sorted(file.bytes for file in files)[-2:]
    need = int(2.5 * sum(largest)) + 5 * 1000
    assert lanes_for(files, 1000, need + 1) == (2, files)
    assert lanes_for(files, 1000, need) == alone
    for least, chosen in ((2, [gguf, other]), (None, [gguf, other]), (1, files)):
        monkeypatch.setattr(
            type(openvino.target), "fewest_threads", lambda target, place, n=least: n
        )
        assert lanes_for(files, 0, ROOM) == (2, chosen)
    monkeypatch.setattr(ahead, "processors", lambda: 8)
    assert lanes_for(files, 0, ROOM) == (3, files)


def test_a_file_that_vanishes_half_way_is_named_and_the_others_go_on(
    files: list[JudgedArtifact], model: LoadedModel, text: EvaluationText, tmp_path: Path
) -> None:
    sound, doomed, _ = files
    largest = max(doomed.files, key=lambda file: file.stat().st_size)

    def delete(_: float, what: str) -> None:
        if what == f"{doomed.label}, window 2":
            largest.unlink()

    with Run.create(tmp_path / "run") as run:
        judge = Evaluator(
            ScoreJournal(run),
            text,
            JudgedModel(model),
            progress=Progress(advanced=delete),
        )
        outcome = judge.judge([doomed, sound])
        assert list(outcome.failures) == [doomed.label]
        assert largest.name in outcome.failures[doomed.label]
        assert {score.subject.label for score in read_scores(run)} == {
            "original",
            sound.label,
        }


def test_threads_stop_when_iteration_stops_and_a_mistake_of_ours_is_not_swallowed(
    files: list[JudgedArtifact], text: EvaluationText, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    windows = dict(enumerate(text.items[:4]))
    arriving = side_by_side(dict.fromkeys(files, windows), 2)
    next(arriving)
    with pytest.raises(KeyboardInterrupt):
        arriving.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    monkeypatch.setattr(files[0], "open", lambda threads: {}["nothing"])
    with pytest.raises(KeyError, match="nothing"):
        list(side_by_side(dict.fromkeys(files, windows), 2))
    assert threading.active_count() == before
