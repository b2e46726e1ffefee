"""`kl-lens run`: all stages in one command, going on where it stopped, and the same from a YAML file."""

import json
import re
import shutil
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any

import pytest
import transformers
import yaml

from kl_lens import model, planning
from kl_lens.base.errors import TargetError
from kl_lens.cli.main import main, parse, settings_from
from kl_lens.judging import EvaluationText, JudgedArtifact
from kl_lens.judging.ahead import Ahead, Arrived
from kl_lens.model import beginning, load
from kl_lens.reporting.answer import recommended_names
from kl_lens.reporting.data import collect
from kl_lens.run.folder import Run
from kl_lens.run.records import ARTIFACT, Plan, Subject
from kl_lens.run.subjects import current_results
from kl_lens.study.run import RunSettings
from kl_lens.study.run.background import begin_apart, quantize_apart
from kl_lens.study.session import QUANTIZED, Session
from kl_lens.study.settings import Opening
from kl_lens.targets import get_target, read_artifact
from kl_lens.weights.recipes import Recipe
from tests.cli.commands import done
from tests.targets.gguf.support import tiny

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("openvino", reason="needs the extra openvino")

BEST = "recommended-openvino-kl0.05"
SMALL = "--windows 3 --window-length 32 --evaluation-windows 3 --held-out-windows 4 --repeats 1 --threads 1"


def words(folder: Path, tiny: Path, *more: str) -> list[str]:
    loss = [] if "--budget" in more else ["--max-loss", "0.05"]
    command = f"run {tiny} --run {folder} --text {tiny / 'text.txt'} --held-out wikitext2:test {SMALL}"
    return [*command.split(), *loss, *more, "--evaluation-text", "wikitext2:train"]


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    done(words(folder, tiny_folder))
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_every_stage_leaves_its_records(finished: Path) -> None:
    plans = {path.stem for path in (finished / "plans").glob("*.json")}
    rivals = {"stock.int8_sym", "stock.int4_sym-g128"}
    assert {"uniform_fp16", BEST, *rivals} <= plans
    with Run.open(finished) as run:
        artifacts = run.load_all("artifact")
        files = {f"openvino/{name}" for name in ("uniform_fp16", BEST, *rivals)}
        assert files <= set(artifacts)
        scored = [result.subject for result in current_results(run, "score")]
        keys = {
            Subject(ARTIFACT, name, "openvino").key
            for name in ("uniform_fp16", BEST, *rivals)
        }
        assert keys <= {subject.file_key for subject in scored}
        assert f"openvino/{BEST}" in {
            subject.label for subject in scored
        }  # PyTorch may stand in for others
        timed = {result.subject.label for result in current_results(run, "profile")}
        assert {"openvino/uniform_fp16", f"openvino/{BEST}"} <= timed <= set(artifacts)
        assert len(timed) >= 3  # or no speed could be predicted
        samples = {result.subject.label for result in current_results(run, "generation")}
        assert samples == {"original", f"openvino/{BEST}"}
    report = (finished / "report.html").read_text()
    assert BEST in report
    assert "INT4_SYM-G128" in report  # a rival, on the chart


def test_the_folder_holds_the_settings_that_repeat_the_run(
    finished: Path, tiny_folder: Path
) -> None:
    settings = settings_from(parse(words(finished, tiny_folder)))
    assert (
        settings_from(parse(f"run --config {finished / 'run.yaml'}".split())) == settings
    )


def test_only_what_was_deleted_is_done_again(
    folder: Path,
    finished: Path,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
) -> None:
    """After the plan and its file were deleted; the checkpoint is opened once for all stages."""
    shutil.rmtree(folder / "log")
    shutil.rmtree(folder / "artifacts/openvino" / BEST)
    (folder / f"plans/{BEST}.json").unlink()
    opened: list[str] = []
    opening = model.load
    monkeypatch.setattr(
        model,
        "load",
        lambda source, **options: opened.append(source) or opening(source, **options),
    )
    done(words(folder, tiny_folder, "--without", "evaluate,benchmark"))
    assert opened == [str(tiny_folder)]
    out, err = capsys.readouterr()
    assert err.count("already done") >= 3
    plans = [
        json.loads((run_folder / f"plans/{BEST}.json").read_text())
        for run_folder in (finished, folder)
    ]
    assert plans[0]["assignment"] == plans[1]["assignment"]
    assert (folder / "artifacts/openvino" / BEST / "openvino_model.bin").is_file()
    # It ends with a screenful: the answer in two lines, a table, the next command. The rest is in the log.
    lines = out.splitlines()
    assert len(lines) <= 24
    assert re.match(r"OpenVINO: [\d.]+ [kM]B, \d+ % of the size of FP16\.", lines[1])
    assert re.search(r"stays the same \d+ times in 100", lines[1])
    assert re.match(r"  Limit: KL ≤ 0\.05 nats per token \(--max-loss\)\. ", lines[2])
    assert lines[2].count("Perplexity") == 1
    assert lines[3] == f"  {folder / 'artifacts/openvino' / BEST}"
    rows = [line for line in lines if line.startswith("│ OpenVINO")]
    assert "recommended" in rows[0]  # first
    for words_ in ("│ INT8_SYM", "│ INT4_SYM-G128", "│ recommended"):
        assert words_ in out
    internal = re.compile(r"stock\.|uniform_|recommended-openvino(?!')|openvino/")
    assert not [
        line
        for line in lines
        if internal.search(line) and not line.startswith(("Next:", f"  {folder}"))
    ]
    assert f"kl-lens report --run {folder} --open" in out
    assert lines[-1].startswith("Next: kl-lens generate ")
    early = re.search(
        rf"{re.escape(str(folder / 'artifacts/openvino' / BEST))}: [\d.]+ [kM]B, KL about [\d.]+ on held",
        err,
    )
    assert early, "the recommended file is named as soon as it exists"
    assert re.search(r"^Measuring sensitivity, OpenVINO +\d+:\d\d", err, re.MULTILINE)
    assert len(err.splitlines()) <= 24
    (log,) = (folder / "log").glob("run-*.log")
    for message in (
        "== Planning, OpenVINO",
        "Quantizable components",
        "Sensitivity, from least",
    ):
        assert message in log.read_text(encoding="utf-8")


def read(folder: Path, name: str) -> Plan:
    with Run.open(folder) as run:
        return planning.read_plan(
            planning.plan_path(folder / "plans", name), run.table().components
        )


def on_disk(folder: Path, name: str) -> int:
    return read_artifact(folder / "artifacts/openvino" / name).realised_bytes


def test_the_recommendation_keeps_its_limit_and_no_smaller_rival_is_as_good(
    finished: Path,
) -> None:
    plan = read(finished, BEST)
    assert plan.target == "openvino"
    assert plan.limits == {"loss": 0.05}
    assert plan.measured is not None
    kl = plan.measured.kl  # on the half that judges, with its error
    assert kl.value + kl.standard_error <= 0.05
    assert plan.contest is not None
    for path in (finished / "plans").glob("stock.*.json"):
        rival = read(finished, path.stem)
        assert rival.measured is not None
        if (rival.file_bytes or 0) <= (
            plan.file_bytes or 0
        ) and rival.assignment != plan.assignment:
            assert kl.value < rival.measured.kl.value
            assert rival.name in plan.contest
    # What was foretold of the file is never less than it is.
    assert (
        on_disk(finished, BEST) <= (plan.file_bytes or 0) < 1.05 * on_disk(finished, BEST)
    )


def test_a_run_with_another_limit_gets_its_own_file_and_replaces_none(
    folder: Path, tiny_folder: Path, capsys
) -> None:
    name = "recommended-openvino-90pct"
    own_scores = [
        folder / f"plans/{BEST}.json",
        *(folder / "artifacts/openvino" / BEST).glob("*.[xbj]*"),
    ]
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in own_scores}
    quick = [
        "--without",
        "evaluate,benchmark,report",
        "--target",
        "openvino",
        "--rivals",
        "none",
    ]
    done(words(folder, tiny_folder, "--budget", "90%", *quick))
    assert on_disk(folder, name) <= 0.9 * on_disk(folder, "uniform_fp16")
    assert {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in own_scores
    } == before
    output = capsys.readouterr().out
    assert f"Next: kl-lens generate {folder}/artifacts/openvino/{name} " in output
    rows = [line for line in output.splitlines() if "│ recommended" in line]
    assert len(rows) == 1
    assert "│ recommended 90pct" in rows[0]
    assert "±" not in rows[0], "the file of the first run was evaluated, this one was not"
    with Run.open(folder) as run:
        view = collect(run)
    assert recommended_names(view) == {name}, "the last run's"
    # The first limit again: nothing is left to do, and its file is the recommended one again.
    done(words(folder, tiny_folder, *quick[:2]))
    assert not re.search(
        r"^(Planning|Writing files).* \d+:\d\d",
        capsys.readouterr().err,
        re.MULTILINE,
    )
    assert {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in own_scores
    } == before
    with Run.open(folder) as run:
        assert recommended_names(collect(run)) == {BEST}


def test_a_plan_of_a_used_name_replaces_it_and_says_so(folder: Path, capsys) -> None:
    in_run = ["--run", str(folder)]
    plan = ["plan", *in_run, "--target", "openvino", "--name", "mine", "--max-bpw"]
    export = ["export", *in_run, "--target", "openvino", "--plan", "mine"]
    text = ["--perplexity", "wikitext2:train", "--window-length", "32", "--windows"]
    scored = ["evaluate", *in_run, "--plan", "mine", "--target", "openvino", *text, "1"]

    def labels() -> set[str]:
        with Run.open(folder) as run:
            return {result.subject.label for result in current_results(run, "score")}

    for words in ([*plan, "9"], export, scored):
        done(words)
    assert "openvino/mine" in labels()
    file = folder / "artifacts/openvino/mine/openvino_model.bin"
    before = file.read_bytes()
    capsys.readouterr()
    done(plan, "15")
    message = "mine replaces another plan of this name; until the next export, the earlier one stays in "
    assert f"{message}{file.parent}" in capsys.readouterr().err
    assert file.read_bytes() == before
    done(plan, "15")
    assert "replaces" not in capsys.readouterr().err, "it is the same plan"
    done(export)
    assert f"{file.parent}: the files of an earlier export" in capsys.readouterr().err
    assert "openvino/mine" not in labels()


def test_beside_a_gpu_files_are_read_ahead_with_the_same_results(
    finished: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[str, int]] = []

    def seen(ahead: Ahead, judged: JudgedArtifact, text: EvaluationText) -> list[Arrived]:
        logits = take(ahead, judged, text)
        reads.append((judged.path.name, len(logits)))
        return logits

    take = Ahead.take
    folder = tmp_path / "run"
    monkeypatch.setattr(Ahead, "take", seen)
    beside = "kl_lens.study.run.background"
    for name in ("kl_lens.study.run", "kl_lens.study.run.stages", beside):
        monkeypatch.setattr(f"{name}.leaves_time", lambda model: True)
    monkeypatch.setattr(f"{beside}.LARGE", 0)  # so that another process quantizes
    for _ in range(2):  # the second time nothing is left to read
        done(words(folder, tiny_folder, "--without", "benchmark"))
    assert {("uniform_fp16", 1), (BEST, 3)} < {*reads}
    assert len(reads) == len({*reads}), "each file once"
    contents = []
    for run_folder in (finished, folder):
        with Run.open(run_folder) as run:
            scores = [
                (r.subject, r.name, r.value["values"])
                for r in current_results(run, "score")
            ]
        contents.append(
            (
                sorted(scores, key=str),
                read_artifact(run_folder / "artifacts/openvino" / BEST).digests,
            )
        )
    assert contents[0] == contents[1]


def test_what_another_process_quantizes_is_found_by_this_one(tmp_path: Path) -> None:
    session = Session()
    recipe = Recipe("q4_k")
    name = "backbone.layers.0.mixer.in_proj"
    model = session.in_run(session.model("reference:mamba"), tmp_path)
    begin_apart("reference:mamba", Opening(), tmp_path)
    quantize_apart([(name, recipe), (name, Recipe("int8")), (name, Recipe("q4_k+gptq"))])
    quantized = [*(tmp_path / QUANTIZED).iterdir()]
    weight = model.tensor(f"{name}.weight")
    assert model.weights.digest(name, recipe) == recipe.grid.quantize(weight).digest
    assert [*(tmp_path / QUANTIZED).iterdir()] == quantized != []


def test_a_stage_that_others_do_not_need_may_fail(
    folder: Path, tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    tasks = f"--tasks arc_easy --task-data {tmp_path / 'nowhere'}".split()
    assert main(words(folder, tiny_folder, *tasks, "--without", "benchmark")) == 1
    captured = capsys.readouterr()
    assert "nowhere" in captured.err
    assert "Failed, see the log: evaluate." in captured.out
    assert "OpenVINO: " in captured.out
    assert (folder / "report.html").is_file()


def test_an_estimate_names_every_stage_and_does_nothing(
    tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    settings = f"run {tiny_folder} --run {tmp_path / 'run'} --window-length 32 --estimate".split()
    done(settings, "--without benchmark")
    output = capsys.readouterr().out
    assert "4 calibration windows" in output
    for part in (
        "Gathering statistics",
        "Measuring sensitivity, OpenVINO",
        "in all",
        "Memory: about",
    ):
        assert part in output
    assert "Timing" not in output
    assert not (tmp_path / "run").exists()


REFUSED = {
    # llama.cpp has no such tokenizer; OpenVINO's graph alone is larger.
    "gguf": (
        [],
        r"\(gguf: .*tokenizer.*\); --target (?=.*openvino)(?=.*mlx).* would do",
    ),
    "openvino": (
        ["--max-bytes", "200kB"],
        r"\(openvino: --max-bytes 200.00 kB cannot be met: the smallest possible is "
        r"[\d.]+ [kM]B\); --target .*mlx.* would do",
    ),
    "compressed-tensors": (
        ["--budget", "5%"],
        r"--budget [\d.]+ kB cannot be met: .*; no target would do",
    ),
}


@pytest.mark.parametrize("target", REFUSED)
def test_what_no_file_can_be_is_refused_before_anything_is_measured(
    target: str, tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    flags, message = REFUSED[target]
    pytest.importorskip(target.replace("-", "_"), reason=f"needs the runtime of {target}")
    command = words(tmp_path / "run", tiny_folder, "--target", target)
    limit = command.index("--max-loss")
    command[limit : limit + 2] = flags
    assert main(command) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "no file can be written, so nothing was measured" in line
    assert re.search(message, line), line
    with Run.open(tmp_path / "run") as run:
        assert run.text_identity("calibration") is None
        assert run.measurements() == []


@pytest.mark.parametrize("moment", ["exported", "judged"])
def test_a_file_that_fails_in_its_runtime_is_named_first_and_never_suggested(
    moment: str,
    folder: Path,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
) -> None:
    def fail(*arguments: object, **options: object) -> object:
        if BEST in str(arguments[1]):
            raise TargetError("the kernel wants 64 columns")
        return working(*arguments, **options)

    method = {"exported": "try_out", "judged": "open"}[moment]
    openvino = type(get_target("openvino"))
    working = getattr(openvino, method)
    monkeypatch.setattr(openvino, method, fail)
    if moment == "exported":
        shutil.rmtree(folder / "artifacts/openvino" / BEST)
    flags = ["--target", "openvino", "--evaluation-windows", "5"]
    assert main([*words(folder, tiny_folder), *flags]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("itself is lost on wikitext2:train") == 1
    lines = captured.out.splitlines()
    problem = {"exported": "no file", "judged": "the file does not work"}[moment]
    assert re.match(f"OpenVINO: {problem}: .*the kernel wants 64 columns", lines[1])
    assert not [line for line in lines if "kl-lens generate" in line]
    assert not [line for line in lines if "kl-lens evaluate" in line]
    failed = {"exported": "export --target openvino", "judged": "evaluate"}[moment]
    assert f"Failed, see the log: {failed}." in lines
    assert f"Report: kl-lens report --run {folder} --open" in lines


def test_bos_is_decided_before_a_file_is_written_and_in_no_other_thread(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = Path(shutil.copytree(tiny_folder, tmp_path / "silent"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(silent)
    tokenizer.bos_token = "the"
    tokenizer.save_pretrained(silent)
    threads: list[Thread] = []

    def perplexities(*_: object) -> tuple[float, float]:
        threads.append(current_thread())
        return 10.0, 7.0

    monkeypatch.setattr(beginning, "_perplexities", perplexities)
    too_small = ["--budget", "1%", "--target", "openvino"]
    main(words(tmp_path / "run", silent, *too_small))
    assert threads == [main_thread()]
    written = tmp_path / "run/artifacts/openvino/uniform_fp16/tokenizer_config.json"
    assert json.loads(written.read_text())["add_bos_token"] is True


def test_a_yaml_file_equals_the_flags_and_flags_win(tmp_path: Path, capsys) -> None:
    flags = "--windows 5 --budget 60% --formats int8,q8_0 --trust-remote-code --seed 7"
    done("run some-model", flags, "--write-config")
    text = capsys.readouterr().out
    settings = yaml.safe_load(text)
    assert settings["model"] == "some-model"
    assert (settings["windows"], settings["budget"], settings["trust-remote-code"]) == (
        5,
        "60%",
        True,
    )
    file = tmp_path / "run.yaml"
    file.write_text(text + "max-drop:\n")  # left empty: as if it were not there
    done(f"run --config {file} --write-config")
    assert yaml.safe_load(capsys.readouterr().out) == settings
    for number in (9, 4):  # 4 is the flag's own default, and typed all the same
        for words in (
            f"--windows {number} --config {file}",
            f"--config {file} --windows {number}",
        ):
            done("run", words, "--write-config")
            again = yaml.safe_load(capsys.readouterr().out)
            assert (again["windows"], again["formats"]) == (number, "int8,q8_0")


def test_a_small_size_offers_formats_below_four_bits() -> None:
    # 5.35 million weights that can be quantized: 2.84 MB in IQ4_XS
    anatomy = load("reference:mamba2").anatomy
    settings: dict[str, Any]
    for settings, smallest in (
        ({"budget": 0.3}, "iq4_xs+gptq"),
        ({"budget": 0.25}, "iq2_xxs+gptq"),
        ({"max_bytes": 3_200_000}, "iq4_xs+gptq"),
        ({"max_bytes": 2_700_000}, "iq2_xxs+gptq"),
        ({"max_bytes": 2_700_000, "menu": "short"}, "iq4_xs+gptq"),
        ({"menu": "small"}, "iq2_xxs+gptq"),
        ({"max_loss": 1.0}, "iq4_xs+gptq"),
    ):
        assert (
            RunSettings.of(model="m", **settings).menu_of("gguf", anatomy)[0] == smallest
        )
        fewest = (
            "affine2-g128+gptq"
            if settings.get("menu") == "small"
            else "affine3-g128+gptq"
        )  # 2.17 MB
        assert RunSettings.of(model="m", **settings).menu_of("mlx", anatomy)[0] == fewest


def test_rows_that_256_does_not_divide_get_two_bits_too() -> None:
    """In the small menu only where they are, in the full one always."""
    narrow = {"q2_0+gptq", "mxfp4+gptq"}
    for anatomy, menu, offered in (
        (load("reference:mamba2").anatomy, "small", False),
        (load("reference:mamba2").anatomy, "full", True),
        (tiny("mamba2").anatomy, "small", True),
        (tiny("mamba2").anatomy, "short", False),
    ):
        chosen = RunSettings.of(model="m", menu=menu).menu_of("gguf", anatomy)
        assert narrow.issubset(chosen) == offered


def test_a_limit_that_is_too_small_for_one_runtime_leaves_the_others_their_files(
    tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    quick = "--target gguf,openvino,mlx --rivals none --without evaluate,benchmark,report"
    command = words(tmp_path / "run", tiny_folder, *quick.split())
    limit = command.index("--max-loss")
    command[limit : limit + 2] = ["--max-bytes", "200kB"]
    assert main(command) == 1
    output = capsys.readouterr()
    assert "OpenVINO: --max-bytes 200.00 kB cannot be met" in output.err
    run_folder = tmp_path / "run/artifacts/mlx/recommended-mlx-200kB"
    assert read_artifact(run_folder).realised_bytes <= 200_000
    lines = output.out.splitlines()
    assert re.match(r"llama.cpp: no file: .*tokenizer", lines[1])
    assert lines[2].startswith("OpenVINO: no file: --max-bytes 200.00 kB cannot be met")
    assert lines[-1].startswith(f"Next: kl-lens generate {run_folder} ")
    assert "Failed, see the log: export --target gguf, plan --target openvino." in lines
