"""`kl-lens measure` as a user runs it."""

import json

import pytest

from kl_lens.cli.main import main
from tests.cli.commands import done


def test_measure_prints_a_table_or_json(measure_arguments, capsys) -> None:
    done(measure_arguments)
    out = capsys.readouterr().out
    for part in (
        "layers.3.mixer.out_proj",
        "34 candidates × 4 windows (128 tokens each)",
        "Noise floor",
    ):
        assert part in out
    assert "Next: kl-lens plan --run" in out
    done(measure_arguments, "--json")
    data = json.loads(capsys.readouterr().out)
    assert len(data["measurements"]) == 34


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--components", "nothing_like_this"], "matches none of"),
        (["--formats", ","], "names no format"),
        (["--window-length", "1000000"], "text.txt"),
    ],
)
def test_bad_arguments_are_one_line_and_leave_nothing(
    measure_arguments, extra, message, capsys
) -> None:
    assert main([*measure_arguments, *extra]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.strip().count("\n") == 0
