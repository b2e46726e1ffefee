"""One definition of a number, wherever it is shown: on the page, by `plan`, by `Study.frontier`; and numbers recomputed
by hand."""

import json
import math
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kl_lens as kl
from kl_lens.reporting import write_report
from kl_lens.reporting.page import asset
from kl_lens.run.folder import Run
from tests.cli.commands import done
from tests.reporting.document import read

pytest.importorskip("gguf", reason="needs the extra gguf")

MODEL = "reference:mamba"
# Chooses as the page does for a limit on its size, and prints positions of the slider.
_BY_NODE = """
const {space, limits} = JSON.parse(require("fs").readFileSync(0, "utf8"));
eval(process.argv[1]);
console.log(JSON.stringify(limits.map((limit) => chosen(space, limit, 0))));
"""


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which whole plans were seen to lose more or less than the sum of their parts."""
    folder = tmp_path_factory.mktemp("numbers") / "run"
    where = f"--run {folder} --target gguf".split()
    text = ["--windows", "1", "--window-length", "32", "--formats", "q4_0,q8_0"]
    done(f"measure {MODEL}", where, text)
    limit = ["--max-bpw", "7", "--name", "half"]
    held_out = ["--held-out", "wikitext2:test", "--held-out-windows", "2"]
    done("plan", where, limit, "--verify", held_out)
    return folder


def page_of(folder: Path) -> str:
    with Run.open(folder) as run:
        return write_report(run).read_text(encoding="utf-8")


def chosen_on_page(page: str, space: dict[str, Any], limits: list[str]) -> list[int]:
    """The slider's position after each limit was typed; by node, as the page's script does it without a browser."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on PATH to run the page's script")
    words = json.dumps({"space": space, "limits": limits})
    command = [node, "-e", _BY_NODE, asset("report.js")]
    shown = subprocess.run(command, input=words, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return [index for index, _ in json.loads(shown.stdout)]


def test_page_plan_and_frontier_agree_at_twenty_sizes(
    verified: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = page_of(verified)
    block = read(page).with_id("explorer-data")
    assert block is not None
    data = json.loads(block.words)
    space = data["spaces"][0]
    positions = [p for p in space["positions"] if not p[-1]]
    space["positions"] = positions
    low, high = positions[0][0], positions[-1][0]
    limits = [f"{low + index * (high - low) // 19}B" for index in range(20)]
    study = kl.Study(MODEL, target="gguf", folder=verified)
    frontier = {point.file_bytes: point.predicted_kl for point in study.frontier()}
    with Run.open(verified) as run:
        assert run.interaction("gguf") != 1.0
    for index in chosen_on_page(page, space, limits):
        file_bytes, predicted, _, _, recipes = positions[index][:5]
        assert frontier[file_bytes] == pytest.approx(predicted, rel=1e-9)
        plan = study.plan(max_bytes=file_bytes, name="fp17")  # a name is in the file
        assert plan.file_bytes == file_bytes
        assert plan.predicted_kl == pytest.approx(predicted, rel=1e-9)
        stored = dict(zip(data["components"], recipes, strict=True))
        assert plan.assignment == {c: space["recipes"][r] for c, r in stored.items()}
    capsys.readouterr()
    limit = f"--max-bytes {low} --name fp17 --json".split()
    done(f"plan --run {verified} --target gguf", *limit)
    [told] = json.loads(capsys.readouterr().out)
    assert told["file_bytes"] == low
    assert told["predicted_kl"] == pytest.approx(positions[0][1], rel=1e-9)


def test_the_page_step_by_step_has_the_answer_and_its_numbers_are_those_of_the_journal(
    verified: Path, tmp_path: Path
) -> None:
    """Of a run without `kl-lens run`: exported, and then evaluated in llama.cpp."""
    folder = Path(shutil.copytree(verified, tmp_path / "run"))
    files = f"--run {folder} --plan half".split()
    done("export", files, "--target gguf")
    page = read(page_of(folder))
    exported = page.with_id("files")
    assert exported is not None
    assert "Exported, not evaluated yet: half for llama.cpp" in exported.words
    text = ["--perplexity", "wikitext2:valid", "--divergence", "wikitext2:valid"]
    test = [*text, "--window-length", "64", "--windows", "2"]
    targets = ["--target", "gguf", "--threads", "1"]
    done("evaluate", files, test, targets)
    page = read(page_of(folder))
    answer = page.with_id("answer")
    layers = page.with_id("layers")
    assert answer is not None
    assert layers is not None
    assert "This is the plan that was exported last." in answer.words
    [file] = folder.glob("artifacts/gguf/half/*.gguf")
    journal = sqlite3.connect(folder / "run.sqlite")

    def records(kind: str) -> dict[str, Any]:
        query = "SELECT name, value FROM records WHERE kind = ?"
        return {
            name: json.loads(value) for name, value in journal.execute(query, (kind,))
        }

    runtimes = records("score_runtime")
    by_llama_cpp = {name for name, about in runtimes.items() if "runtime" in about}
    readings = records("reading")
    ours = [r for name, r in readings.items() if f"{name.split('|')[0]}|" in by_llama_cpp]
    original = [r for r in readings.values() if "kl_teacher_to_student" not in r["sums"]]
    assert (len(ours), len(original)) == (2, 2)

    def mean(of: list[Any], name: str) -> float:
        return math.fsum(r["sums"][name] for r in of) / sum(r["tokens"] for r in of)

    same = math.floor(100 * mean(ours, "same_top"))
    size = file.stat().st_size
    assert f"llama.cpp: {size / 1e6:.2f} MB" in answer.words
    assert f"stays the same {same} times in 100" in answer.words
    shown = re.search(
        r"KL ([\d.]+) ± ([\d.]+) nats .*perplexity ([\d.]+), original ([\d.]+)",
        answer.words,
    )
    assert shown is not None
    kl_, error, perplexity, before = map(float, shown.groups())
    assert kl_ == pytest.approx(mean(ours, "kl_teacher_to_student"), abs=0.6 * error)
    assert perplexity == pytest.approx(math.exp(mean(ours, "nll")), abs=0.0051)
    assert before == pytest.approx(math.exp(mean(original, "nll")), abs=0.0051)
    [sums] = journal.execute(
        "SELECT sums FROM samples WHERE component = 'backbone.embeddings' AND format = 'q4_0'"
    ).fetchone()
    row = next(r for r in layers.all("tr") if "backbone.embeddings" in r.words)
    column = [h.words for h in layers.all("th")].index("q4_0")
    alone = json.loads(sums)["kl_teacher_to_student"] / 32
    assert float(row.all("td")[column].attributes["data-v"]) == pytest.approx(alone)
    plan = json.loads((folder / "plans/half.json").read_text())
    assert plan["bytes"] + plan["fixed_bytes"] == size
    rest = set(plan["assignment"].values()) - {"fp16"}
    parts = {}
    for component, recipe, text in journal.execute(
        "SELECT component, format, sums FROM samples"
    ):
        parts[component, recipe] = json.loads(text)["kl_teacher_to_student"] / 32
    total = sum(parts[pair] for pair in plan["assignment"].items() if pair[1] != "fp16")
    assert rest <= {"q4_0", "q8_0"}
    assert plan["predicted_kl"] == pytest.approx(plan["interaction"] * total)
    assert records("interaction") == {"gguf": plan["interaction"]}
    weights = sum(c["parameters"] for c in _components(journal))
    plans = page.with_id("plans")
    assert plans is not None
    assert f"{8 * plan['bytes'] / weights:.2f}" in plans.words
    assert f"-KL-{8 * plan['bytes'] / weights:.1f}bpw.gguf" in file.name


def _components(journal: sqlite3.Connection) -> list[dict[str, Any]]:
    query = "SELECT value FROM identity WHERE key = 'components'"
    return list(json.loads(journal.execute(query).fetchone()[0]))
