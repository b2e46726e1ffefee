"""Settings from words, from YAML and from Python are the same, and become words again."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from kl_lens.cli.flags import as_yaml, file_values
from kl_lens.cli.main import VERBS, build_parser, parse, settings_from
from kl_lens.pipeline import MeasureSettings, PlanSettings, RunSettings, command_of
from kl_lens.pipeline.settings import options_of
from kl_lens.pipeline.verbs import HOMES, settings_of

COMMANDS = [
    "inspect",
    "inspect some/model --components --dtype bfloat16",
    "measure some/model --text notes.txt --windows 8 --formats int4,q4_k --memory-budget 1500MB",
    "measure --as-deployed gguf --anytime --settled-at 0.8 --legacy-json out.json",
    "rank --run runs/x --other-text a.txt --other-text b.txt",
    "plan --paper --gpu --metric sqnr --uniform fp16,int8 --max-drop 3% --max-latency 12ms",
    "plan --compare one two",
    "export --target gguf --plan a,b --map --held-out notes.txt",
    "export some/model --target openvino --format int8 --rewrites none",
    "evaluate one two --perplexity --divergence notes.txt --device GPU --torch-device cuda --max-drop 2.5%",
    "evaluate --tasks piqa,arc_easy --task-data tasks --few-shot 0",
    "benchmark --prompt-lengths 8,32 --layers --formats int8",
    "generate out/folder --prompt 'two words' --temperature 0.5",
    "report --compare a b",
    "import-legacy --model m --bits 4 a.json --bits 8 b.json",
    "run some/model --max-bytes 1234567 --targets '' --without rank,report",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_words_become_settings_and_words_again(command: str) -> None:
    settings = settings_from(parse(shlex.split(command)))
    again = settings_from(parse(command_of(settings)))
    assert again == settings
    assert set(command_of(settings)) <= {*shlex.split(command), "wikitext2:test"}


def test_what_is_not_typed_is_the_dataclass_default() -> None:
    assert settings_from(parse(["measure"])) == MeasureSettings()
    assert command_of(MeasureSettings()) == ["measure"]
    assert command_of(PlanSettings(max_bytes=4_000_000, max_drop=0.03)) == [
        "plan", "--max-bytes", "4MB", "--max-drop", "3%",
    ]  # fmt: skip


def test_every_verb_has_settings_and_says_what_each_means() -> None:
    assert list(HOMES) == list(VERBS)
    build_parser()  # no two flags of a verb are alike
    for verb in VERBS:
        for option in options_of(settings_of(verb)):
            named = option.meaning or option.choices or option.metavar
            assert named, f"kl-lens {verb} {option.flag}"


def test_yaml_holds_the_same_settings(tmp_path: Path) -> None:
    settings = RunSettings(
        model="some-model", formats=("int8",), budget=0.6, targets=(), max_bytes=None, seed=7, again=True
    )
    file = tmp_path / "run.yaml"
    file.write_text(as_yaml(settings))
    assert RunSettings(**file_values(RunSettings, str(file))) == settings
