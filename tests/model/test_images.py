"""Images: read from folders, dealt into splits that never overlap, cut into windows that extend."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kl_lens.base.errors import CheckpointError, TextError
from kl_lens.model import ImageTask
from kl_lens.model.images import SPLITS, Entry, ImageSource, add_picture, open_images
from kl_lens.text.windows import refuse_overlap
from tests.classifiers import PROCESSOR, image_folder as image_folder_of

TASK = ImageTask(PROCESSOR, 5)
DIGITS = ImageTask(PROCESSOR, 10)
GREY = {"image_mean": [0.25], "image_std": [0.5]}
COLOUR = {"image_mean": [0.25, 0.5, 0.75], "image_std": [0.5, 1.0, 2.0]}
SIZE = {"size": {"height": 2, "width": 3}}


def image_folder(folder: Path, count: int, classes: int = 5, seed: int = 0) -> Path:
    return image_folder_of(folder, count, classes, seed=seed)


def _task(folder: Path, about: dict | None, config: dict | None = None) -> ImageTask:
    if about is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(about))
    return ImageTask.of(folder, config or {})


def _input(task: ImageTask, folder: Path, pixels: np.ndarray) -> np.ndarray:
    """What the model reads of an image file."""
    (folder / "train").mkdir()
    Image.fromarray(pixels).save(folder / "train" / "image.png")
    return task.inputs(task.drawn(str(folder), windows=1, length=1).ids[0].tolist())[0]


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
@pytest.mark.parametrize("colours", [GREY, COLOUR], ids=["grey", "colour"])
def test_an_image_has_the_models_channels_and_no_transparency(
    tmp_path: Path, mode: str, colours: dict
) -> None:
    shape = (2, 3) if mode == "L" else (2, 3, len(mode))
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    values = _input(_task(tmp_path, SIZE | colours), tmp_path, pixels)
    mean, std = (np.array(colours[name])[:, None, None] for name in GREY)
    planes = np.atleast_3d(pixels).transpose(2, 0, 1)[: 1 if len(mode) < 3 else 3]
    if colours is GREY and len(planes) == 3:
        planes = np.array([299, 587, 114]) / 1000 @ planes.reshape(3, -1)
        planes = planes.round().reshape(1, 2, 3)
    expected = np.broadcast_to((planes / 255 - mean) / std, values.shape)
    np.testing.assert_allclose(values, expected, atol=0.01 if colours is GREY else 1e-6)


_STEPS = np.arange(8, dtype=np.uint8).repeat(4).reshape(8, 4) * 30  # rows 0, 30, …, 210


@pytest.mark.parametrize(
    ("about", "config", "rows"),
    [
        ({"size": 4, "resample": 0}, {}, (1, 3, 5, 7)),
        (
            {"size": {"shortest_edge": 4}, "do_center_crop": True, "crop_size": 4},
            {},
            (2, 3, 4, 5),
        ),
        (None, {"input_resolution": [1, 2, 2], "crop_pct": 0.5}, (3, 4)),
        (None, {"image_size": 4}, (2, 3, 4, 5)),
    ],
)
def test_an_image_is_resized_and_cropped_as_the_checkpoint_says(
    about: dict | None, config: dict, rows: tuple[int, ...], tmp_path: Path
) -> None:
    about = None if about is None else about | GREY
    task = _task(tmp_path, about, {"mean": [0.25], "std": [0.5], **config})
    values = _input(task, tmp_path, _STEPS)
    assert values.shape == task.shape
    np.testing.assert_allclose(
        (values[0, :, 0] * 0.5 + 0.25) * 255, [30 * row for row in rows], atol=1e-3
    )


def test_settings_that_say_nothing_are_refused_and_written_ones_read_again(
    tmp_path: Path,
) -> None:
    with pytest.raises(CheckpointError, match="does not say how images are prepared"):
        _task(tmp_path, None, {"image_size": "large"})
    TASK.processor.save_pretrained(tmp_path)
    assert ImageTask.of(tmp_path, {"num_classes": 5}).key == TASK.key
    names = {"0": "cat", "1": "dog"}
    for config, classes, labels in (
        ({}, 1000, {}),
        ({"num_labels": 7}, 7, {}),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "num_classes": 3}, 2, {}),
        ({"id2label": names}, 2, {"cat": 0, "dog": 1}),
    ):
        task = ImageTask.of(tmp_path, config)
        assert (task.classes, task.label_names) == (classes, labels)


def test_a_damaged_file_is_one_line_with_its_name(tmp_path: Path) -> None:
    folder = image_folder(tmp_path, 40)
    whole = folder / "class 0" / "0.png"
    whole.write_bytes(whole.read_bytes()[:60])
    split = next(name for name in SPLITS if "0.png" in _names(folder, name))
    with pytest.raises(TextError, match=r"0\.png is not a readable image"):
        TASK.from_start(f"{folder}:{split}", length=1)


def test_an_id_is_the_image_and_its_label() -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(1, 8, 8)
    first, copy, second = (add_picture(pixels.copy(), label) for label in (1, 1, 2))
    assert first == copy != second
    ids = torch.tensor([[first, second]])
    assert TASK.targets(ids).tolist() == [[1, 2]]
    expected = (pixels / 255 - 0.3) / 0.4
    np.testing.assert_allclose(TASK.inputs([first, second]), [expected] * 2, rtol=1e-5)
    with pytest.raises(TextError, match="no image with the id 5"):
        TASK.targets(torch.tensor([5]))


def _names(folder: Path, split: str) -> list[str]:
    return [Path(entry.name).name for entry in open_images(str(folder), split).entries]


def test_a_folder_without_splits_is_dealt_out_by_content(tmp_path: Path) -> None:
    folder = image_folder(tmp_path, 120)
    copy = folder / "class 0" / "copy.png"
    copy.write_bytes((folder / "class 1" / "1.png").read_bytes())
    parts = {split: _names(folder, split) for split in SPLITS}
    assert sorted(chain(*parts.values())) == sorted([*_all_names(120), "copy.png"])
    assert 40 <= len(parts["train"]) <= 80
    assert all(("copy.png" in part) == ("1.png" in part) for part in parts.values())


def _all_names(count: int) -> list[str]:
    return [f"{number}.png" for number in range(count)]


def test_folders_called_train_and_val_are_the_splits(tmp_path: Path) -> None:
    image_folder(tmp_path / "train", 20, seed=1)
    image_folder(tmp_path / "val", 40, seed=2)
    assert len(_names(tmp_path, "train")) == 20
    judging = _names(tmp_path, "valid") + _names(tmp_path, "test")
    assert sorted(judging) == sorted(_all_names(40))
    image_folder(tmp_path / "test", 10, seed=3)
    image_folder(tmp_path / "valid", 5, seed=3)  # `val` counts
    assert [len(_names(tmp_path, split)) for split in SPLITS] == [20, 40, 10]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    folder = image_folder(tmp_path, 40, classes=1) / "class 0"
    drawn = TASK.drawn(str(folder), windows=2, length=4)
    assert set(TASK.targets(drawn.ids).flatten().tolist()) == {-1}
    with pytest.raises(TextError, match="evaluation needs labels"):
        TASK.from_start(str(folder), length=4)


@pytest.mark.parametrize(
    ("names", "labels", "numbers"),
    [
        ({"a": 3, "b": 1, "c": 0}, "ab", [3, 1]),
        ({}, "13", [1, 3]),
        ({}, "vwxyz", [0, 1, 2, 3, 4]),
        ({}, "05", None),
        ({}, "ab", None),
    ],
)
def test_a_label_is_the_models_name_a_number_or_a_place_among_all(
    names: dict, labels: str, numbers: list[int] | None
) -> None:
    entries = tuple(Entry("", Path(), label) for label in (*labels, None))
    source = ImageSource("made-up", "train", entries)
    if numbers is None:
        with pytest.raises(TextError, match=r"2 classes .* but the model has 5"):
            source.classes(names, 5)
    else:
        classes = source.classes(names, 5)
        assert [classes[label] for label in labels] == numbers


def test_more_windows_extend_fewer_and_another_seed_gives_others() -> None:
    two, five = (DIGITS.drawn("digits", windows=count, length=8) for count in (2, 5))
    assert two.fingerprint == five.first(2).fingerprint
    assert two.label == "digits:train"
    reseeded = DIGITS.drawn("digits", windows=2, length=8, seed=1)
    assert not np.array_equal(reseeded.ids, two.ids)
    with pytest.raises(TextError, match="ask for at most 68 windows"):
        DIGITS.drawn("digits", windows=69, length=16)


def test_calibration_and_evaluation_share_no_image(tmp_path: Path) -> None:
    drawn = DIGITS.drawn("digits", windows=68, length=16)
    for split in ("valid", "test"):
        refuse_overlap(drawn, DIGITS.from_start(f"digits:{split}", length=16))
    with pytest.raises(TextError, match="share a document"):
        refuse_overlap(drawn, DIGITS.from_start("digits:train", length=16))


def test_what_a_verb_calls_text_means_the_models_own_images() -> None:
    with pytest.raises(TextError, match="--images FOLDER"):
        TASK.drawn("wikitext2:train", windows=1, length=4)
    task = ImageTask(PROCESSOR, 10, images="digits")
    assert task.from_start("wikitext2:valid", length=4, limit=1).label == "digits:valid"
    assert task.from_start("wikitext2", length=4, limit=3).ids.shape == (3, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "nowhere: no such folder of images; give one, or digits"),
        ("wikitext2:dev", "images have no split 'dev'"),
        (".", "no images for test; expected"),
    ],
)
def test_images_that_are_not_there_are_named(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TextError, match=message):
        ImageTask(PROCESSOR, 5, images="digits").from_start(name, length=1)
