"""`kl-lens inspect`: the table a person reads, and the records a program reads."""

import json

from kl_lens.base.version import __version__
from kl_lens.cli.main import main
from kl_lens.run.records import Component


def test_the_table_names_blocks_components_and_reasons(saved, capsys) -> None:
    assert main(["inspect", str(saved("falcon_h1"))]) == 0
    out = capsys.readouterr().out
    for expected in (
        "falcon_h1, 3 blocks",
        "in_proj 328×64",
        "short convolution",
        "left alone",
        "INT4",
    ):
        assert expected in out


def test_json_gives_the_records_and_exact_bytes(saved, capsys) -> None:
    assert main(["inspect", str(saved("mamba")), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    components = data["components"]
    in_proj = next(
        c for c in components if c["name"] == "backbone.layers.0.mixer.in_proj"
    )
    rows, columns = in_proj["shape"]
    scales = 2 * rows
    assert in_proj["bytes"] == {
        "fp16": 2 * rows * columns,
        "int8": rows * columns + scales,
        "int4": rows * columns // 2 + scales,
    }
    assert (
        data["bytes"]["fp16"]
        == 2 * data["parameters"]
        == sum(c["bytes"]["fp16"] for c in components)
    )
    assert (
        Component.from_json({k: v for k, v in in_proj.items() if k != "bytes"}).kind
        == "in_proj"
    )


def test_versions(capsys) -> None:
    assert main(["--version"]) == 0
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first == f"kl-lens {__version__}"
    assert {"torch", "transformers"} <= {line.split()[0] for line in lines}
