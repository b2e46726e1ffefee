"""`kl-lens measure --shard` and `merge` as a user types them."""

from kl_lens.cli.main import main
from tests.measuring.test_pieces import contents


def test_shares_become_the_run_of_one_command(
    measure_arguments, tmp_path, capsys
) -> None:
    whole = [*measure_arguments]
    whole[3] = str(tmp_path / "whole")
    assert main(whole) == 0
    run = tmp_path / "run"
    assert main([*measure_arguments, "--shard", "1/3"]) == 0
    assert (
        f"This is share 1/3. When all are done: kl-lens merge {run}"
        in capsys.readouterr().out
    )
    for share in ("2/3", "3/3"):
        assert main([*measure_arguments, "--shard", share]) == 0
    assert [path.name for path in sorted((run / "shards").iterdir())] == [
        "1-of-3",
        "2-of-3",
        "3-of-3",
    ]
    capsys.readouterr()
    assert main(["merge", str(run)]) == 0
    assert f"Next: kl-lens plan --run {run}" in capsys.readouterr().out
    assert contents(run) == contents(tmp_path / "whole")
    assert main(measure_arguments) == 0
    assert "0 candidate × window pairs measured" in capsys.readouterr().out
