"""`kl-lens` on an image classifier: every verb, with the words that are right for images."""

import json
from pathlib import Path

import pytest

from kl_lens.cli.main import main
from tests.classifiers import classifier, image_folder, save


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
        assert main([*words.split(), "--run", str(run)]) == 0, words
    capsys.readouterr()
    arguments = ["evaluate", "--run", str(run), "--plan", "uniform_int8", "--window", "8"]
    assert main([*arguments, "--json"]) == 0
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
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "top-1, %" in out
    assert "same top class" in out
    assert main(["report", "--run", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "per image" in page
    assert "per token" not in page


def test_what_is_for_language_models_is_refused_in_one_line(
    folder: Path, images: Path, tmp_path: Path, capsys
) -> None:
    run = tmp_path / "run"
    assert main(["measure", str(folder), "--run", str(run)]) == 1
    assert "--images FOLDER" in capsys.readouterr().err
    assert _measure(folder, images, run, "--components", "head") == 0
    assert main(["plan", "--run", str(run), "--uniform", "fp16"]) == 0
    capsys.readouterr()
    assert main(["export", "--run", str(run), "--target", "gguf"]) == 1
    assert "mambavision" in capsys.readouterr().err
    assert (
        main(["measure", "reference:mamba", "--images", str(images), "--run", str(run)])
        == 1
    )
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
