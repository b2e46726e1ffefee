"""`kl-lens` on an image classifier: every verb, with the words that are right for images."""

import json
from pathlib import Path

import pytest

from kl_lens.cli.main import main
from tests.classifiers import classifier, image_folder, save
from tests.cli.commands import done, refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        tmp_path_factory.mktemp("model") / "tiny-vision", classifier("mambavision")
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"), 200)


def _measure(folder: Path, images: Path, run: Path, *more: str) -> int:
    words = f"--images {images} --windows 4 --window-length 8 --run {run}".split()
    return main(["measure", str(folder), *words, *more])


def test_from_images_to_a_proven_file(
    folder: Path, images: Path, tmp_path: Path, capsys
) -> None:
    """Each verb as typed; only the first is told of images."""
    pytest.importorskip("openvino")
    run = tmp_path / "run"
    assert _measure(folder, images, run) == 0
    out = capsys.readouterr().out
    assert "(per image)" in out
    assert "(32 images each)" in out
    for words in (
        "plan --uniform int8,fp16 --verify --held-out-windows 2",
        "paper --evaluation-windows 2",
        "export --target openvino --plan uniform_int8",
    ):
        done(words, f"--run {run}")
    capsys.readouterr()
    arguments = f"evaluate --run {run} --plan uniform_int8 --window-length 8".split()
    done(arguments, "--json")
    result = json.loads(capsys.readouterr().out)
    [agreement] = result["agreements"]
    assert agreement["verdict"].startswith("agrees")
    scores = {(s["subject"], s["kind"]): s["values"] for s in result["scores"]}
    file = scores["openvino/uniform_int8", "perplexity"]
    assert 0 <= file["top1"]["value"] <= 1
    assert file["top1_change"]["value"] == pytest.approx(
        file["top1"]["value"] - scores["original", "perplexity"]["top1"]["value"]
    )
    assert scores["openvino/uniform_int8", "divergence"]["kl_mean"]["value"] > 0
    done(arguments)
    out = capsys.readouterr().out
    assert "top-1, %" in out
    assert "same top class" in out
    done(f"report --run {run}")
    page = (run / "report.html").read_text()
    assert "per image" in page
    assert "per token" not in page


def test_what_is_for_language_models_is_refused_in_one_line(
    folder: Path, images: Path, tmp_path: Path, capsys
) -> None:
    run = tmp_path / "run"
    assert "--images FOLDER" in refused(capsys, f"measure {folder} --run {run}")
    assert _measure(folder, images, run, "--components", "head") == 0
    done(f"plan --run {run} --uniform fp16")
    capsys.readouterr()
    assert "mambavision" in refused(capsys, f"export --run {run} --target gguf")
    assert main(f"measure reference:mamba --images {images} --run {run}".split()) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
