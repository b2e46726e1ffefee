"""Settings from words, from YAML and from Python are the same, and become words again."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

import kl_lens
from kl_lens.base.errors import PlanError
from kl_lens.cli.main import USUAL, VERBS, build_parser, main, parse, settings_from
from kl_lens.study.settings import command_of, options_of
from kl_lens.study.study import settings_of

COMMANDS = [
    "inspect",
    "inspect some/model --dtype bfloat16",
    "measure some/model --text notes.txt --windows 8 --formats int4,q4_k --working-memory 1.5GB",
    "measure --target gguf --exhaustive",
    "paper --run runs/x --other-text a.txt,b.txt",
    "plan --paper gpu --metric sqnr --uniform fp16,int8 --max-loss 0.3 --min-speed 30.5",
    "export --target gguf --plan a,b --without-tokenizer",
    "export some/model --target openvino --format int8 --static-tokens 8",
    "evaluate one two --target torch,gguf --divergence notes.txt --device GPU --torch-device cuda --task-drop 2.5%",
    "evaluate --tasks piqa,arc_easy --task-data tasks",
    "benchmark --prompt-lengths 8,32",
    "benchmark --threads 2 --gpu-layers all --load read-plain",
    "generate out/folder --prompt 'two words' --temperature 0.5",
    "autopsy a.gguf --model some/model --windows 4",
    "report --out a.html",
    "publish runs/x gguf --to org/name --base-model org/original --private --dry-run",
    "run some/model --max-bytes 1.234567MB --target gguf --without evaluate,report",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_words_become_settings_and_words_again(command: str) -> None:
    settings = settings_from(parse(shlex.split(command)))
    again = settings_from(parse(command_of(settings)))
    assert again == settings
    assert set(command_of(settings)) <= {
        *shlex.split(command),
        "wikitext2:test",
        "reference:mamba",
    }


def test_every_verb_has_settings_and_says_what_each_means() -> None:
    build_parser()  # no two flags of a verb are alike
    for verb in VERBS:
        for option in options_of(settings_of(verb)):
            named = option.meaning or option.choices or option.metavar
            assert named, f"kl-lens {verb} {option.flag}"


# Of git, llama.cpp, mlx-lm, the hub's client, Ray and Slurm, and colours of the report.
OTHERS = {
    "--head",
    "--tensor-type-file",
    "--imatrix",
    "--grid",
    "--array",
    "--local-dir",
    "--chat-template",
    "--vocab-only",
    "--flash-attn",
    "--cache-type-k",
    "--cache-type-v",
    "--hf-repo",
    "--hf-file",
    "--q-bits",
    "--q-group-size",
    "--quant-predicate",
    "--inference",
}


FORMER = [
    ("run x --targets gguf,mlx", "run x --target gguf,mlx"),
    (
        "evaluate x.gguf --window 8 --limit 2",
        "evaluate x.gguf --window-length 8 --windows 2",
    ),
    ("autopsy x.gguf --against m", "autopsy x.gguf --model m"),
    ("plan --max-kl 0.1 --max-bpw 5.5", "plan --max-loss 0.1 --max-bpw 5.5"),
    ("measure m --memory-budget 1GB", "measure m --working-memory 1GB"),
]


@pytest.mark.parametrize(("former", "command"), FORMER)
def test_former_names_of_flags_are_understood(former: str, command: str) -> None:
    assert command_of(settings_from(parse(former.split()))) == command.split()


def test_several_targets_are_served_one_after_another() -> None:
    settings = settings_from(
        parse(["measure", "m", "--target", "gguf,mlx", "--windows", "2"])
    )
    parts = settings.parts()
    assert [(name, part.target) for name, part in parts.items()] == [
        ("gguf", ("gguf",)),
        ("mlx", ("mlx",)),
    ]
    assert {part.calibration.windows for part in parts.values()} == {2}
    settings = settings_from(parse(["export", "--target", "gguf,mlx", "--out", "made"]))
    made = [str(part.out) for part in settings.parts().values()]
    assert made == ["made/gguf", "made/mlx"]
    settings = settings_from(
        parse(["plan", "--target", "gguf,mlx", "--max-bpw", "5", "--name", "x"])
    )
    with pytest.raises(PlanError, match="--name names one plan"):
        settings.parts()


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    flags = {
        flag
        for action in parser._actions
        for flag in action.option_strings
        if action.help is not argparse.SUPPRESS
    }
    verbs = [
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return flags.union(
        *(flags_of(inner) for action in verbs for inner in action.choices.values())
    )


def test_messages_name_flags_that_exist() -> None:
    flags = flags_of(build_parser()) | OTHERS
    for path in sorted(Path(kl_lens.__file__).parent.rglob("*.py")):
        named = set(
            re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", path.read_text(encoding="utf-8"))
        )
        assert named <= flags, path


def test_the_help_shows_the_flags_that_people_use(capsys) -> None:
    for verb, flags in USUAL.items():
        existing = {option.flag for option in options_of(settings_of(verb))}
        assert set(flags.split()) < existing, verb
        assert len(flags.split()) <= (15 if verb == "run" else 11), verb
    shown = {}
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as end:
            main(["plan", word])
        assert end.value.code == 0
        shown[word] = capsys.readouterr().out
    assert "--max-bytes" in shown["--help"]
    assert "--gamma" not in shown["--help"]
    assert "--gamma" in shown["--help-all"]
    assert "--help-all" in shown["--help"].splitlines()[-1]
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    named = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert named == {*USUAL["run"].split(), "--help-all"}


def test_without_a_verb_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"    {verb} " in printed for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_all_its_flags(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help-all"])
    printed = capsys.readouterr().out
    flags = [option.flag for option in options_of(settings_of(verb)) if option.flag]
    assert not [flag for flag in flags if flag not in printed]
