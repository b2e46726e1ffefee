"""`kl-lens plan` on a measured run, as a user goes about it."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.commands import done, refused


@pytest.fixture(scope="module")
def measured(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One measured run of the tiny model; tests write their plans into it under names of their own."""
    folder = tmp_path_factory.mktemp("measured") / "run"
    arguments = (
        f"measure {tiny_folder} --run {folder} --text {tiny_folder / 'text.txt'} --windows 6 "
        "--window-length 32"
    ).split()
    done(arguments)
    return folder


@pytest.fixture
def held_out(tmp_path: Path) -> list[str]:
    from kl_lens.text.sources import wikitext2

    path = tmp_path / "held-out.txt"
    path.write_text(
        "\n\n".join(document.text for document in wikitext2("test").documents[:3])
    )
    return f"--held-out {path} --held-out-windows 8".split()


def _plan(folder: Path, name: str) -> dict:
    return json.loads((folder / "plans" / f"{name}.json").read_text())


def test_verify_measures_on_held_out_text(measured: Path, held_out: list[str]) -> None:
    arguments = [*f"plan --run {measured} --max-bpw 6 --name six".split(), *held_out]
    done(arguments, "--verify")
    verified = _plan(measured, "six")
    assert verified["measured"]["kl"]["value"] > 0
    assert "held-out.txt" in verified["measured"]["text"]
    assert verified["measured"]["windows"] == 4
    assert verified["bits_per_weight"] <= 6


def test_a_limit_on_the_loss_is_kept_where_it_is_judged(
    measured: Path, tmp_path: Path, capsys
) -> None:
    """Four easy windows decide, four hard ones confirm: the plan must keep its limit there too, with its error."""
    from kl_lens.reporting.answer import target_of
    from kl_lens.reporting.data import collect
    from kl_lens.run.folder import Run
    from kl_lens.text.sources import wikitext2

    hard = "\n\n".join(document.text for document in wikitext2("test").documents[:3])
    (tmp_path / "hard.txt").write_text(hard)
    (tmp_path / "text.txt").write_text(", . " * 64 + hard)
    words = f"plan --run {measured} --verify --held-out-windows 8 --held-out".split()
    limit = ["--max-loss", "0.03", "--name", "kept"]
    done(words, f"{tmp_path / 'text.txt'}", limit)
    kl = _plan(measured, "kept")["measured"]["kl"]
    assert 0.02 < kl["value"] + kl["standard_error"] <= 0.03
    assert "misses its limit" not in capsys.readouterr().err
    # Where it cannot be kept, on other text, the sentence says what was promised and what came.
    (tmp_path / "easy.txt").write_text(", . " * 400)
    done(words, f"{tmp_path / 'easy.txt'}", limit[:-1], "missed")
    done(words, f"{tmp_path / 'hard.txt'} --plan missed")
    message = " ".join(capsys.readouterr().err.split())
    assert re.search(
        r"missed misses its limit: the KL is 0\.\d+ ± 0\.\d+ on \S+hard\.txt, 4 windows, and at",
        message,
    )
    with Run.open(measured) as run:
        plan = collect(run).plan("missed")
    assert plan is not None
    assert re.match(
        r"Limit: KL ≤ 0\.03 .*\. Missed on held-out text: 0\.\d+ ± ", target_of(plan)
    )


def test_greedy_keeps_the_perplexity_within_gamma(
    measured: Path, held_out: list[str], capsys
) -> None:
    greedy = ["--gamma", "1.05", "--name", "g", "--verify"]
    done(f"plan --run {measured}", greedy, held_out)
    assert "evaluations of perplexity" in capsys.readouterr().err
    result = _plan(measured, "g")["measured"]
    assert result["perplexity"]["value"] <= 1.10 * result["original_perplexity"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            ["--min-speed", "30"],
            "--min-speed is about a target's files: name it with --target",
        ),
        (["--plan", "nowhere", "--verify"], "no such plan"),
        (["--max-bytes", "many"], "is not a size"),
        (
            ["--max-bytes", "1MB", "--target", "gguf"],
            "llama.cpp can store none of the measured formats (int4",
        ),
        (
            ["--frontier", "--target", "gguf"],
            "repeat kl-lens measure with --target gguf instead of --formats",
        ),
        (
            ["--max-loss", "0.1", "--dtype", "float16"],
            "made with --dtype float32, not float16; give --dtype",
        ),
    ],
)
def test_bad_requests_are_one_line(
    measured: Path, extra: list[str], message: str, capsys
) -> None:
    assert message in refused(capsys, f"plan --run {measured}", extra)
