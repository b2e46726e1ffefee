"""`kl-lens measure --shard` and `merge` as a user types them."""

from tests.cli.commands import done
from tests.measuring.test_pieces import contents


def test_shares_become_the_run_of_one_command(
    measure_arguments, tmp_path, capsys
) -> None:
    whole = [*measure_arguments]
    whole[3] = str(tmp_path / "whole")
    done(whole)
    run = tmp_path / "run"
    done(measure_arguments, "--shard 1/3")
    assert (
        f"This is share 1/3. When all are done: kl-lens merge {run}"
        in capsys.readouterr().out
    )
    for share in ("2/3", "3/3"):
        done(measure_arguments, f"--shard {share}")
    assert [path.name for path in sorted((run / "shards").iterdir())] == [
        "1-of-3",
        "2-of-3",
        "3-of-3",
    ]
    capsys.readouterr()
    done(f"merge {run}")
    assert f"Next: kl-lens plan --run {run}" in capsys.readouterr().out
    assert contents(run) == contents(tmp_path / "whole")
    done(measure_arguments)
    assert "0 candidate × window pairs measured" in capsys.readouterr().out
