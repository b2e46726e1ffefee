"""Invalid command lines, settings files and tokenizers."""

import argparse
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kl_lens.base.errors import KLLensError
from kl_lens.cli.main import VERBS, build_parser, settings_from
from kl_lens.study.settings import Option, Settings, options_of
from kl_lens.study.study import settings_of
from tests.hostile.saying import cases, says_one_line, within_time

SLIPS = [
    ("inspect reference:mamba --device meta:x", "--device"),
    ("inspect reference:mamba --device cuda:999", "--device cuda:999: torch has no"),
    ("plan --max-bytes " + 400 * "9", "--max-bytes"),
    (
        "export x --target openvino --format int8 --static-tokens 999999999",
        "expected a whole number from 1 to 65,536",
    ),
    ("generate x --prompt a --temperature -1", "--temperature -1"),
    ("run --held-out-windows 2", "at least 3"),
    ("plan --verify --uniform int8 --held-out-windows 1", "at least 2"),
    ("plan --max-loss 0.01 --max-drop 3%", "leave out --max-loss, or --max-drop"),
    ("plan --max-drop 1% --max-bpw 6", "leave out --max-bpw, or --max-drop"),
    ("plan --paper npu", "expected one of cpu, gpu"),
    ("run --budget 60% --max-loss 0.02", "--max-loss and --budget"),
    (
        "plan --plan small --verify --max-bytes 1MB",
        "--plan makes no new plan: leave out --max-bytes",
    ),
    ("plan --uniform int8 --name x", "--name x names a plan made by a limit"),
    ("plan --max-bpw 6 --name a/b", "'a/b' is not a valid plan name"),
    ("plan --max-byt 3", "there is no --max-byt; did you mean --max-bytes?"),
    ("--vers", "there is no --vers; did you mean --version?"),
    ("inspect --debug", "put it in front: kl-lens --debug"),
    ("plan --zzz", "there is no --zzz; see kl-lens plan --help-all"),
    ("plan --max-bpw 6 --rivals", "name it with --target"),
    ("run --without measure", "measure"),
    (
        "run --target openvino,gguf --formats int4,int4-g64+gptq",
        "llama.cpp supports none of them",
    ),
    ("run --weights disk --tune", "--weights disk does not work with --tune"),
    ("plan", "say what to plan"),
    (
        "generate x.gguf --prompt a --load all",
        "--load all: expected one of auto, lean, read, mapped, read-plain",
    ),
    (
        "evaluate x.gguf --gpu-layers 0,8",
        "--gpu-layers 0,8: give a number of layers, or all",
    ),
    ("export --target gguf --format q8_0", "name it"),
    ("export reference:mamba --target gguf", "say what to export"),
    ("generate nowhere --prompt x", "not an exported model"),
    ("generate nowhere.gguf --prompt x", "nowhere.gguf"),
    ("autopsy nowhere.gguf", "nowhere.gguf"),
    ("report --run docs", "has no run"),
    ("report --run pyproject.toml", "pyproject.toml is a file; --run needs a folder"),
    ("plan --max-bpw 1_0", "1_0"),
    ("measure x --formats ''", "--formats is empty"),
    ("evaluate --window-length 8 --stride 9", "--stride 9"),
    ("evaluate --positions --stride 8", "leave out --stride"),
    ("evaluate --task-drop 3%", "--tasks"),
    ("evaluate --max-drop 3%", "did you mean --task-drop?"),
    ("measure x --target gguf,onnx", "--target onnx: expected one of openvino, gguf"),
    ("run --task-data docs", "--task-data"),
    (
        "export x --target gguf --format q8_0 --static-tokens 8",
        "--static-tokens does not work with --target gguf",
    ),
    ("measure x --formats int4,int99", "int99"),
    ("measure x --components '('", "--components"),
    ("inspect '~nosuch/x'", "~nosuch/x"),
    ("report --run " + 300 * "z", "zzz"),
    ("inspect reference:mamba --tokenizer pyproject.toml", "pyproject.toml"),
    ("inspect \x1b[2Jx/y/z", r"\x1b[2J"),
]


@pytest.mark.parametrize(("command", "named"), SLIPS)
def test_common_slips_are_one_line(
    command: str, named: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    line = says_one_line(shlex.split(command), capsys)
    assert named in line
    assert "unexpected" not in line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP", "0"),
        ("OMP", "-3"),
        ("OMP", "2,x"),
        ("OMP", "999999"),
        ("MKL", "2,1"),
        ("NUMBA", "many"),
    ],
)
def test_numbers_of_threads_that_libraries_cannot_use(
    name: str, value: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{name}_NUM_THREADS", value)
    line = says_one_line(["inspect", "reference:mamba"], capsys)
    assert f"{name}_NUM_THREADS={value}: expected a number of threads" in line


def test_closed_standard_output_is_said_before_anything_is_done() -> None:
    command = f"exec {sys.executable} -m kl_lens.cli.main run --write-config >&-"
    process = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    message = (
        "kl-lens run: standard output is closed; use >/dev/null to discard the result\n"
    )
    assert (process.returncode, process.stderr) == (1, message)


# Values for the fuzzers below.
VALUES = [
    "",
    " ",
    "0",
    "-1",
    "1",
    "2",
    "1.5",
    "1e308",
    "1e309",
    "-1e-320",
    "nan",
    "-inf",
    "99999999999",
    "9" * 400,
    "9" * 5000,
    "9" * 400 + "GB",
    "1e9s",
    "9" * 400 + "ms",
    "101%",
    "nan%",
    "²",
    "１２",
    "0x10",
    "1_000",
    "+1",
    "-0",
    "é",
    "日本語",
    "\ud800",
    "\udcff",
    "\x1b[2J",
    "a,b",
    ",,,",
    "a,,a",
    "all",
    "auto",
    "none",
    "x" * 5000,
    "../" * 50,
    "/dev/null",
    "\x00",
    "--",
    "-",
    "=",
    "{}",
    "[",
    "(" * 500,
    "a{99999999999}",
    "%s",
    "%(prog)s",
    "1/0",
    "3/16",
    "0/0",
    "cuda:999999",
    "meta",
    "int4+",
    "+gptq",
    "int4+gptq+gptq",
    "int4-g0",
    "int4-g99999999999",
    "int999999999",
    "q4_0",
    "~",
    "$HOME",
    "a\nb",
]
OBJECTS: list[object] = [
    *VALUES,
    None,
    True,
    -1,
    0,
    10**400,
    10**5000,
    float("nan"),
    float("inf"),
    -0.5,
    1e308,
    b"x",
    object(),
    [],
    ["a"],
    {},
    (),
    ("a",),
    (1,),
    (None,),
    ((),),
    (-1, 1e400),
    Path("\x00"),
    Path("x"),
    int,
    ("\x00", "1"),
    (("4", "x"), ("²", "x")),
]


def _needed(verb: str) -> list[str]:
    """Words for what a verb cannot do without."""
    needed: list[str] = []
    for option in options_of(settings_of(verb)):
        if option.required:
            word = next(iter(option.choices), "x")
            needed += [*([option.flag] if option.flag else []), word]
    return needed


def _flags() -> list[tuple[str, Option]]:
    return [(verb, option) for verb in VERBS for option in options_of(settings_of(verb))]


def _settings_of(parser: argparse.ArgumentParser, words: list[str]) -> Settings:
    return settings_from(parser.parse_args(words))


def _is_fine_or_says_why(make: Callable[[], Settings], about: object) -> None:
    """Invalid settings raise only a one-line KLLensError, or argparse's own exit."""
    message = None
    code = 2
    try:
        with within_time(60, about):
            make().check()
    except KLLensError as error:
        message = str(error)
    except SystemExit as end:
        message = "argparse"
        code = end.code
    assert code == 2, about
    assert message is None or 0 < len(message.strip()) < 8000, about


@cases(300, 6000)
def test_any_word_behind_every_flag(
    cases: int, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read and checked, without opening anything; flags once, twice and with one another."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(cases)
    flags = _flags()
    parsers = {verb: build_parser([verb]) for verb in VERBS}
    for case in range(cases):
        verb, option = flags[case % len(flags)]
        words = [verb, *_needed(verb)]
        for flag in (
            option,
            *draw.sample([o for v, o in flags if v == verb], draw.choice([0, 0, 1])),
        ):
            for _ in range(draw.choice([1, 1, 1, 2])):
                value = [] if flag.is_switch else [draw.choice(VALUES)]
                words += [flag.flag, *value] if flag.flag else value
        parse = partial(_settings_of, parsers[verb], words)
        _is_fine_or_says_why(parse, words)
    assert "Traceback" not in capsys.readouterr().err


@cases(300, 6000)
def test_any_object_in_every_setting(
    cases: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python may be given, where a command line has only words."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(cases)
    flags = _flags()
    for case in range(cases):
        verb, option = flags[case % len(flags)]
        settings = settings_of(verb)
        values: dict[str, object] = {
            o.name: "x" for o in options_of(settings) if o.required
        }
        values |= {option.name: draw.choice(OBJECTS)}
        about = (
            verb,
            option.name,
            repr(values)[:200] if 10**5000 not in values.values() else "10**5000",
        )
        _is_fine_or_says_why(lambda: settings.of(**values), about)  # noqa: B023


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)
)  # aliases that unfold without end


@pytest.mark.parametrize(
    "content",
    [
        BOMB,
        "[" * 5000,
        "\x00",
        "windows: [1, 2]",
        "windows: 1e400",
        "- x",
        "windows: -1",
        "windos: 5",
        "again: 3",
        "model: {a: b}",
        "seed: !!python/object/apply:os.system [ls]",
        "max-loss: .nan",
    ],
)
def test_settings_that_make_no_sense(content: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "odd.yaml").write_text(content)
    line = says_one_line(["run", "--config", str(tmp_path / "odd.yaml")], capsys)
    assert "odd.yaml" in line
    assert "unexpected" not in line
