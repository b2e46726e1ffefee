"""`kl-lens inspect`: the table a person reads, and the records a program reads."""

import json
import math

from kl_lens.base.version import __version__
from kl_lens.model.carried import carried_by
from kl_lens.run.records import Component
from tests.cli.commands import done, refused
from tests.families import CONFIGS


def test_the_table_names_blocks_components_and_reasons(saved, capsys) -> None:
    done(f"inspect {saved('falcon_h1')}")
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
    done(f"inspect {saved('mamba')} --json")
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
    done("--version")
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"kl-lens {__version__}"
    assert {"python", "torch", "transformers"} <= {line.split()[0] for line in lines}


def test_max_bytes_says_from_the_configuration_how_small_files_can_be(
    tmp_path, capsys
) -> None:
    """Rows of 192 and 384 columns: 4.5 bits are the least of the usual menu, 2.25 those of the small one."""
    config = CONFIGS["mamba2"](hidden_size=192, num_heads=12, head_dim=32)
    config.save_pretrained(tmp_path)
    words = f"inspect {tmp_path} --max-bytes".split()
    done(words, "1GB --json")
    rows = json.loads(capsys.readouterr().out)["rows"]
    usual, small = (row for row in rows if row["target"] == "gguf")
    carried = carried_by(config)
    matrices = sum(map(math.prod, carried.matrices))
    for row, bits in ((usual, 4.5), (small, 2.25)):
        assert row["bytes"] == matrices * bits / 8 + 4 * carried.vectors
    assert {"q2_0", "mxfp4"} <= set(small["formats"]) - set(usual["formats"])
    done(words, f"{small['bytes']}")
    said = capsys.readouterr().out
    assert said.count("yes") == 1
    assert f"Next: kl-lens run {tmp_path} --max-bytes" in said
    assert "give --memory or --max-bytes, not both" in refused(
        capsys, words, "1GB --memory 1GB"
    )
