"""What a native build changes in llama.cpp: every change whole or not at all, and all of them in its newest release."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from kl_lens.targets.gguf import source

PRODUCTS = "ggml/src/ggml-cpu/amx/mmq.cpp"


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_configuration_of_tiles_is_kept_whole(tmp_path: Path) -> None:
    assert not source.mend_tiles(tmp_path)  # a release without that file
    file = write(tmp_path, PRODUCTS, "    _tile_loadconfig(&tc);\n    done = true;\n")
    assert source.mend_tiles(tmp_path)
    assert '"m"(tc)); _tile_loadconfig(&tc);\n    done' in file.read_text()


def test_tiles_are_configured_for_every_product(tmp_path: Path) -> None:
    text = "inline void ggml_tile_config_init(void) {\n    if (done) {\n        return;\n    }\n"
    file = write(tmp_path, PRODUCTS, text)
    assert source.configure_tiles_anew(tmp_path)
    assert "if (done)" not in file.read_text()


def test_kernels_ask_for_weights_ahead(tmp_path: Path) -> None:
    """Every loop over the blocks of a row of weights, and no other."""
    assert not source.fetch_ahead(tmp_path)
    rows = "    for (; ib < nb; ++ib) {\n        sum += x[ib].d;\n    }\n"
    blocks = "   for (int i = 0; i < nb; ++i) {\n        sum += x[i].d;\n    }\n"
    other = "    for (int j = 0; j < nb; ++j) {\n        sum += y[j].d;\n    }\n"
    text = f"{rows}void ggml_vec_dot_a(void)\n{rows}{blocks}{other}"
    file = write(tmp_path, "ggml/src/ggml-cpu/arch/x86/quants.c", text)
    assert source.fetch_ahead(tmp_path)
    before, _, kernels = file.read_text().partition("void ggml_vec_dot_")
    assert before == rows
    assert kernels.count("__builtin_prefetch") == 2
    assert "(x + ib) + 4096 + at);\n        sum += x[ib].d;" in kernels
    assert "(x + i) + 4096 + at);\n        sum += x[i].d;" in kernels
    assert kernels.endswith(other)


def test_a_change_that_does_not_fit_leaves_every_file_as_it_was(tmp_path: Path) -> None:
    """Rows in sixteens are let in by one file and multiplied by another: half of that would be wrong products."""
    admits = write(tmp_path, "ggml/src/ggml-cpu/amx/amx.cpp", "if (op->ne[0] % (TILE_N * 2)) {")
    multiplies = write(tmp_path, PRODUCTS, "if (M == 1) { switch (nb_size) { case 32: } }")
    before = admits.read_text(), multiplies.read_text()
    assert not source.tile_sixteens(tmp_path)
    assert (admits.read_text(), multiplies.read_text()) == before
    multiplies.write_text(before[1] + " int nb_size = BLOCK_N;")
    assert source.tile_sixteens(tmp_path)
    assert "% TILE_N)" in admits.read_text()
    assert "case 16: LAUNCH_TINYGEMM_KERNEL_VNNI(16); break;" in multiplies.read_text()


def test_what_found_no_place_is_named(tmp_path: Path) -> None:
    write(tmp_path, PRODUCTS, "_tile_loadconfig(&tc);")
    without = source.improve(tmp_path)
    assert "states in place" in without
    assert "whole tile configurations" not in without


@pytest.mark.slow
def test_every_change_fits_the_newest_release(tmp_path: Path) -> None:
    command = f"{sys.executable} -m pip download --quiet --no-deps --no-binary :all: llama-cpp-python --dest {tmp_path}"
    if subprocess.run(command.split(), capture_output=True).returncode:
        pytest.skip("no package index, or no tools to read the package with")
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (project,) = tmp_path.glob("*/vendor/llama.cpp")
    assert source.improve(project) == []
