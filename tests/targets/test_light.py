"""Running an exported model needs the runtime and numpy: what only measuring and exporting need stays unloaded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models

from kl_lens.base.errors import TargetError
from kl_lens.base.files import reference_path
from kl_lens.cli.main import main
from kl_lens.run.records import Plan
from kl_lens.targets import TARGETS, export, open_session
from kl_lens.targets.tokenizer import find_tokenizer
from tests.targets.gguf.support import small_mamba

pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("openvino", reason="needs the extra openvino")

HEAVY = ("torch", "transformers", "numba", "datasets", "pyarrow")
TOKENS = "tokenizer_config.json"
PROMPT = "The history of the city"
# The command as the console script runs it, then what it loaded, on a line of its own.
COMMAND = f"""
import sys
from kl_lens.cli.main import main
status = main(sys.argv[1:])
print("loaded", *(name for name in {HEAVY} if name in sys.modules))
sys.exit(status)
"""
PEAK = COMMAND.replace("kl_lens.cli.main", "kl_lens.profiling.memory").replace(
    "main(sys", "main(*sys"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(reference_path("mamba"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, Path]:
    """One tiny Mamba in both targets, with integers, for which a session asks what the formats are."""
    model = small_mamba(tokenizer)
    folder = tmp_path_factory.mktemp("light")
    for target, name in (("gguf", "q8_0"), ("openvino", "int8")):
        plan = Plan("p", {"backbone.layers.0.mixer.in_proj": name}, made_by="test")
        export(model, plan, target, folder / target)
    without = folder / "without_tokenizer"
    export(model, Plan("p", {}, made_by="test"), "gguf", without, include_tokenizer=False)
    return {path.name: path for path in folder.iterdir()}


def _run(program: str, *arguments: str) -> tuple[dict[str, Any], list[str]]:
    """The JSON that a fresh process prints, and the heavy libraries that it has loaded."""
    command = [sys.executable, "-c", program, *arguments]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    printed, _, loaded = process.stdout.rpartition("loaded")
    return json.loads(printed), loaded.split()


@pytest.mark.parametrize("target", ["gguf", "openvino"])
def test_generating_and_weighing_load_nothing_heavy(
    target: str, exported: dict[str, Path]
) -> None:
    words = f"generate {exported[target]} --prompt city --max-new-tokens 3 --threads 1"
    result, loaded = _run(COMMAND, *words.split(), "--json")
    assert loaded == []
    assert result["new_tokens"] == 3
    assert result["text"]
    use, loaded = _run(
        PEAK, str(exported[target]), target, TARGETS[target], '{"threads": 1}'
    )
    assert loaded == []
    assert 0 < use["base_bytes"] < use["peak_bytes"]


def test_the_tokenizer_beside_a_model_is_what_transformers_reads(
    exported: dict[str, Path], tokenizer: Any, tmp_path: Path
) -> None:
    tokenized = find_tokenizer(None, exported["openvino"])
    awkward = (
        "  two  spaces\n\nand lines\t",
        "naïve café 北京 🙂",
        "a<|endoftext|>b",
        "don't , stop .",
    )
    for text in ("", *awkward):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenized.encode(text) == ids
        assert tokenized.decode(ids) == tokenizer.decode(ids)
    assert tokenized.ends == {tokenizer.eos_token_id}
    limited = Tokenizer.from_file(str(exported["openvino"] / "tokenizer.json"))
    limited.enable_truncation(2)  # a limit from training does not cut a prompt
    limited.save(str(tmp_path / "tokenizer.json"))
    assert find_tokenizer(None, tmp_path).encode(PROMPT) == tokenized.encode(PROMPT)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        (
            {TOKENS: {"eos_token": "b"}, "generation_config.json": {"eos_token_id": 0}},
            {0, 1},
        ),
        ({TOKENS: {"eos_token": {"content": "b", "lstrip": False}}}, {1}),
        (
            {TOKENS: {"eos_token": None}, "special_tokens_map.json": {"eos_token": "c"}},
            {2},
        ),
        ({"generation_config.json": {"eos_token_id": [0, 2]}}, {0, 2}),
        ({TOKENS: {"eos_token": "not in the vocabulary"}}, set()),
        ({}, set()),
    ],
)
def test_where_the_end_token_is_found(
    files: dict[str, Any], ends: set[int], tmp_path: Path
) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    for name, data in files.items():
        (tmp_path / name).write_text(json.dumps(data))
    assert find_tokenizer(None, tmp_path).ends == ends


def test_a_file_without_a_vocabulary_is_refused_and_the_process_lives(
    exported: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp itself would abort."""
    folder = exported["without_tokenizer"]
    words = f"generate {folder} --prompt city --max-new-tokens 2 --threads 1"
    arguments = words.split()
    assert main(arguments) == 1
    assert "holds no tokenizer; pass one with --tokenizer" in capsys.readouterr().err
    assert main([*arguments, "--tokenizer", str(exported["openvino"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["new_tokens"] == 2
    session: Any = open_session(folder, threads=1)
    with pytest.raises(TargetError, match="holds no tokenizer"):
        session.detokenize([1, 2])
