"""What a command writes replaces nothing that it did not make, is lost by no accident, and is named as it is."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kl_lens.base.errors import KLLensError
from kl_lens.base.files import require_own_folder
from kl_lens.measuring.sweep import Sweep
from kl_lens.run.folder import Run
from tests.cli.commands import done
from tests.hostile.saying import says_one_line


@pytest.fixture
def measured(measure_arguments: list[str], tmp_path: Path) -> Path:
    done(measure_arguments, "--formats int8")
    return tmp_path / "run"


# -- outputs that the user names -------------------------------------------------------------------------------

OUTPUTS = {
    "report --run RUN --out {}": ["RUN/run.sqlite", "PAGE", "MODEL/page.html", "MODEL"],
    "compare FILE FILE --model MODEL --chart {}": ["CHART", "MODEL/chart.svg"],
    "export MODEL --target gguf --format q8_0 --out {}": ["MODEL", "MODEL/new", "OTHERS"],
    "publish RUN gguf --to me/mine --out {}": ["MODEL/new"],
    "measure MODEL --run {}": ["MODEL", "MODEL/new"],
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_an_output_replaces_nothing_that_the_program_did_not_make(
    command: str, measured: Path, tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    model = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    foreign = tmp_path / "others"
    foreign.mkdir()
    paths = {
        "RUN": measured,
        "PAGE": foreign / "page.html",
        "CHART": foreign / "chart.svg",
        "OTHERS": foreign,
        "MODEL": model,
    }
    paths["PAGE"].write_text("<!doctype html><title>A page of mine</title>")
    paths["CHART"].write_text("<svg></svg>")

    def spelled(word: str) -> str:
        first, *parts = word.split("/", 1)
        return str(paths.get(first, Path(first)).joinpath(*parts))

    def files() -> dict[str, bytes]:
        every = [*model.rglob("*"), *foreign.rglob("*"), measured / "run.sqlite"]
        return {str(path): path.read_bytes() for path in every if path.is_file()}

    before = files()
    for output in OUTPUTS[command]:
        words = [
            spelled(output) if word == "{}" else word if "me/" in word else spelled(word)
            for word in command.split()
        ]
        message = says_one_line(words, capsys)
        assert re.search(r"holds a model|not made by|is a folder|did not export", message)
        assert files() == before, words


def test_an_output_of_its_own_is_replaced(measured: Path, tmp_path: Path) -> None:
    words = ["report", "--run", str(measured), "--out", str(tmp_path / "page.html")]
    for _ in range(2):
        done(words)
    (tmp_path / "artifact.json").write_text("{}")
    require_own_folder(tmp_path)
    (tmp_path / "artifact.json").unlink()
    with pytest.raises(KLLensError, match="so KL Lens did not export it"):
        require_own_folder(tmp_path)


# -- names -----------------------------------------------------------------------------------------------------

NAMES = {
    "stock.q8_0": "begin with stock., uniform_, recommended",
    "Uniform_int4": "begin with stock., uniform_, recommended",
    "recommended-gguf": "begin with stock., uniform_, recommended",
    "NUL": "not a valid plan name",
    "com1.big": "not a valid plan name",
    "small.": "not a valid plan name",
    "SMALL": "differs only by case",
}


def test_names_that_mean_something_else_are_refused(measured: Path, capsys) -> None:
    plan = ["plan", "--run", str(measured), "--max-bpw", "15", "--name"]
    done(plan, "small")
    before = (measured / "plans/small.json").read_bytes()
    for name, reason in NAMES.items():
        assert reason in says_one_line([*plan, name], capsys)
    assert [path.name for path in (measured / "plans").iterdir()] == ["small.json"]
    assert (measured / "plans/small.json").read_bytes() == before
    for name in ("console", "common", "small.8"):
        done(plan, f"{name}")


def test_names_and_paths_are_shown_as_they_are(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """What looks like markup is none, and no terminal is told anything by a name."""
    folder = tmp_path / "a[red]b[/x]"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    model = "m[bold]\x1b]0;mine\x07\x1b[31m\nm:smile:"
    shown = r"m[bold]\x1b]0;mine\x07\x1b[31m\nm:smile:"
    shutil.copytree(tiny_folder, model)
    run = str(folder / "run[/]")
    text = ["--text", f"{model}/text.txt", "--windows", "2", "--window-length", "32"]
    commands: dict[str, list[str]] = {
        shown: ["inspect", model],
        f"Next: kl-lens plan --run {shlex.quote(run)} --max-loss 0.01\n": [
            "measure",
            model,
            "--run",
            run,
            *text,
        ],
        f"written to {run}/plans.\n": ["plan", "--run", run, "--max-bpw", "9"],
        f"{run}/report.html\n": ["report", "--run", run],
    }
    for reason, words in commands.items():
        done(words)
        printed = capsys.readouterr()
        assert reason in printed.out, words
        assert "\x1b" not in printed.out + printed.err, words


# -- accidents -------------------------------------------------------------------------------------------------


def test_a_measure_that_fails_before_measuring_leaves_nothing(
    tiny_folder: Path, tmp_path: Path, capsys
) -> None:
    run = tmp_path / "runs" / "first"
    text = ["--text", str(tiny_folder / "text.txt"), "--windows", "2"]
    words = ["measure", str(tiny_folder), "--run", str(run), *text]
    wrong = {
        "--components nothing": "kl-lens inspect MODEL --json` lists their names",
        "--formats q4_k+gptq --window-length 32": "gather them with: kl-lens calibrate",
    }
    for more, message in wrong.items():
        assert message in says_one_line([*words, *more.split()], capsys)
        assert not run.parent.exists()
    run.mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    says_one_line([*words, "--components", "nothing"], capsys)
    assert [path.name for path in run.iterdir()] == ["notes.txt"]


def test_a_text_that_nothing_was_measured_on_binds_no_run(tmp_path: Path) -> None:
    with Run.create(tmp_path) as run:
        run.identify_text("calibration", {"length": 512}, ["a"])
        run.identify_text("calibration", {"length": 32}, ["b", "c"])
        assert run.text_identity("calibration") == {"length": 32, "windows": 2}


def test_a_run_that_is_deleted_meanwhile_is_an_error(
    measure_arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    measure: Callable[..., object] = Sweep.measure

    def measure_and_lose(*arguments: object, **named: object) -> object:
        result = measure(*arguments, **named)
        shutil.rmtree(tmp_path / "run")
        return result

    monkeypatch.setattr(Sweep, "measure", measure_and_lose)
    message = says_one_line(measure_arguments, capsys)
    assert "run.sqlite was deleted or moved while this command worked" in message
