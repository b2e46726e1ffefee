"""Every command, killed by SIGKILL again and again: files are whole, and the same command run again finishes with the
same results as an undisturbed one."""

import hashlib
import json
import random
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kl_lens import planning
from kl_lens.base.files import RECORD_FILE
from kl_lens.profiling import benchmark, machine
from kl_lens.run.folder import Run
from kl_lens.run.journal import FILE
from kl_lens.run.subjects import artifact_digest
from kl_lens.targets import read_artifact
from kl_lens.text.sources import wikitext2
from tests.byte_level import save_tokenizer
from tests.families import tiny_model
from tests.forking import Ended, Forks
from tests.shipped import shipped_digests

pytestmark = pytest.mark.slow
pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("openvino", reason="needs the extra openvino")

COMMAND = "tests.test_kills:command"
WARM = (
    "tests.test_kills",
    "kl_lens.study.run",
    "kl_lens.reporting.page",
    "openvino",
    "kl_lens.targets.openvino.convert",
    "kl_lens.targets.gguf.export",
    "gguf",
    "kl_lens.measuring.sweep",
    "kl_lens.planning.budget",
    "transformers.models.mamba.modeling_mamba",
    "lzma",
)
IN_A_ROW = 8  # kills before the command is let through


def command(words: list[str]) -> int:
    """What a fork does: the command line, on a machine whose limits are quickly measured."""
    from kl_lens.cli.main import main

    machine.BUFFER_BYTES = 1 << 20
    benchmark.LOADS = 1
    return main(words)


# -- the world -----------------------------------------------------------------------------------------------

VOCABULARY = 300  # enough for every byte


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(*WARM) as warm:
        yield warm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mamba with a byte-level tokenizer, which both runtimes take, and three texts beside it."""
    folder = tmp_path_factory.mktemp("kills") / "tiny"
    net = tiny_model("mamba")
    net.resize_token_embeddings(VOCABULARY)
    net.save_pretrained(folder)
    documents = [document.text for document in wikitext2("valid").documents]
    for name, part in {
        "calibration": documents[:8],
        "held": documents[8:12],
        "judged": documents[12:16],
    }.items():
        (folder / f"{name}.txt").write_text("\n\n".join(part))
    save_tokenizer(folder, documents, VOCABULARY)
    return folder


def commands(model: Path, run: Path) -> dict[str, list[str]]:
    """In an order in which each finds what it needs; the last one is all of them."""
    text = [
        "--text",
        f"{model}/calibration.txt",
        "--windows",
        "3",
        "--window-length",
        "32",
    ]
    held_out = ["--held-out", f"{model}/held.txt", "--held-out-windows", "4"]
    of_run = ["--run", str(run)]
    return {
        "calibrate": ["calibrate", str(model), *of_run, *text],
        "measure": ["measure", str(model), *of_run, *text, "--formats", "int4,int8"],
        "rank": [
            "paper",
            *of_run,
            "--evaluation-text",
            f"{model}/judged.txt",
            "--evaluation-windows",
            "3",
        ],
        "plan": [
            "plan",
            *of_run,
            "--name",
            "small",
            "--max-bpw",
            "7",
            "--verify",
            *held_out,
        ],
        "export openvino": [
            "export",
            *of_run,
            "--target",
            "openvino",
            "--plan",
            "small",
        ],
        "export gguf": [
            "export",
            str(model),
            *of_run,
            "--target",
            "gguf",
            "--format",
            "q8_0",
        ],
        "evaluate": [
            "evaluate",
            *of_run,
            "--perplexity",
            f"{model}/judged.txt",
            "--divergence",
            "--window-length",
            "32",
            "--windows",
            "3",
            "--target",
            "torch,openvino",
            "--threads",
            "1",
        ],
        "benchmark": [
            "benchmark",
            *of_run,
            "--target",
            "openvino",
            "--threads",
            "1",
            "--prompt-lengths",
            "4",
            "--new-tokens",
            "4",
            "--repeats",
            "2",
        ],
        "report": ["report", *of_run],
        "run": [
            "run",
            str(model),
            *of_run,
            *text,
            *held_out,
            "--evaluation-text",
            f"{model}/judged.txt",
            "--evaluation-windows",
            "3",
            "--formats",
            "int4,int8,q4_0,q8_0",
            "--rivals",
            "none",
            "--repeats",
            "1",
            "--threads",
            "1",
            "--max-loss",
            "0.05",
        ],
    }


KILLS = {
    "calibrate": 16,
    "measure": 44,
    "rank": 28,
    "plan": 28,
    "export openvino": 24,
    "export gguf": 24,
    "evaluate": 24,
    "benchmark": 12,
    "report": 12,
    "run": 50,
}


@pytest.fixture(scope="module")
def stations(
    model: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Any, Ended]]:
    """Verb → the folder as the verb finds it, what it makes of it undisturbed, and how that went."""
    world = tmp_path_factory.mktemp("stations")
    finished: dict[str, tuple[Path, Any, Ended]] = {}
    folder = world / "run"
    for verb, words in commands(model, folder).items():
        if verb == "run":
            shutil.rmtree(folder)
        before = world / verb
        if folder.exists():
            shutil.copytree(folder, before)
        ended = forks.call(COMMAND, [words])
        assert ended.code == 0, (verb, ended)
        require_whole(folder)
        finished[verb] = before, results(folder), ended
        if verb.startswith(
            "export"
        ):  # what is killed later is a second export, over the first
            shutil.copytree(
                folder / "artifacts", before / "artifacts", dirs_exist_ok=True
            )
    return finished


# -- what must hold ------------------------------------------------------------------------------------------


def require_whole(folder: Path) -> None:
    """Right after a kill: nothing under its own name is half a thing."""
    if (folder / FILE).exists():
        with sqlite3.connect(folder / FILE) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()
    plans = sorted((folder / "plans").glob("*.json"))
    if plans:
        with Run.open(folder) as run:
            components = run.table().components
        assert [planning.read_plan(path, components).name for path in plans] == [
            path.stem for path in plans
        ]
    for record in (folder / "artifacts").glob(f"*/*/{RECORD_FILE}"):
        held_by(record.parent)
    for path in folder.glob("*.json"):
        json.loads(path.read_text())
    if (folder / "report.html").exists():
        assert (folder / "report.html").read_text().rstrip().endswith("</html>")


def held_by(folder: Path) -> str:
    """The digest of an artifact, whose every tensor must be in its files as its record says."""
    artifact = read_artifact(folder)
    digests = shipped_digests(folder)
    assert len(digests) > 5
    assert {
        t.runtime_name: t.digest for t in artifact.tensors if t.runtime_name in digests
    } == digests
    return artifact_digest(artifact)


TIMES = {
    "seconds",
    "created",
    "started",
    "provenance",
    "runtime",
    "timings",
    "ratios",
    "bound",
    "peak_memory_bytes",
    "load_seconds",
    "loaded_from_cache",
}


def results(folder: Path) -> dict[str, Any]:
    """All that a run holds, without what a clock made."""
    with Run.open(folder) as run:
        db = run.journal
        state: dict[str, Any] = {
            table: sorted(map(repr, db.execute(f"SELECT * FROM {table}").fetchall()))
            for table in ("identity", "texts", "windows", "samples")
        }
        state["effort"] = sorted(
            db.execute(
                "SELECT role, component, format, compute_dtype FROM effort"
            ).fetchall()
        )
        named = {
            "records": "kind, name",
            "results": "kind, what, plan, target, settings, digest, name",
        }
        for table, keys in named.items():
            rows = db.execute(
                f"SELECT {keys}, value FROM {table} WHERE kind NOT IN ('stage', 'artifact')"
            ).fetchall()
            state[table] = sorted(
                repr(
                    (
                        *row[:-1],
                        None if row[0] == "profile" else timeless(json.loads(row[-1])),
                    )
                )
                for row in rows
            )
    state["plans"] = {
        path.name: path.read_text() for path in (folder / "plans").glob("*.json")
    }
    artifacts = [
        record.parent for record in (folder / "artifacts").glob(f"*/*/{RECORD_FILE}")
    ]
    state["artifacts"] = {
        str(artifact.relative_to(folder)): held_by(artifact) for artifact in artifacts
    }
    # Byte by byte, but for the record, which says when and how long; what it tells of tensors is in the digest.
    state["files"] = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (folder / "artifacts").rglob("*")
        if path.is_file() and path.name != RECORD_FILE and ".digests" not in path.parts
    }
    statistics = folder / "statistics/statistics.json"
    state["statistics"] = (
        json.loads(statistics.read_text())["digest"] if statistics.exists() else None
    )
    state["report"] = (folder / "report.html").exists()
    state["leftovers"] = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob(".*")
        if path.name not in (".lock", ".digests")
    )
    assert state["leftovers"] == []
    return state


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in TIMES}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


# -- the kills -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", KILLS)
def test_a_killed_command_run_again_gives_the_same_results(
    verb: str,
    model: Path,
    forks: Forks,
    stations: dict[str, tuple[Path, Any, Ended]],
    tmp_path: Path,
) -> None:
    before, expected, undisturbed = stations[verb]
    draw = random.Random(verb)
    # The folder keeps its name: what a run tells of its place is part of its results.
    folder = before.parent / "run"
    words = commands(model, folder)[verb]
    events = 64
    kills = 0
    while kills < KILLS[verb]:
        shutil.rmtree(folder, ignore_errors=True)
        if before.exists():
            shutil.copytree(before, folder)
        for _ in range(min(IN_A_ROW, KILLS[verb] - kills)):
            if draw.random() < 0.4:
                moment = draw.randrange(events)
                ended = forks.call(COMMAND, [words], kill_before=moment, folder=folder)
                events = events if ended.code < 0 else max(4, moment)
            else:
                ended = forks.call(
                    COMMAND, [words], kill_after=draw.uniform(0, undisturbed.seconds)
                )
            assert ended.code in (0, -signal.SIGKILL), (verb, ended)
            kills += ended.code < 0
            require_whole(folder)
        ended = forks.call(COMMAND, [words])
        assert ended.code == 0, (verb, ended)
        require_whole(folder)
        assert results(folder) == expected
