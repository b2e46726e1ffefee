"""Images: read from folders, dealt into splits that never overlap, cut into windows that extend."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.classifiers import PREPARATION, image_folder as image_folder_of

from kl_lens.base.errors import TextError
from kl_lens.model import ImageTask
from kl_lens.text.images import Picture, add_picture, labels_of, open_images, pixels_of
from kl_lens.text.windows import refuse_overlap

TASK = ImageTask(PREPARATION, 5)
DIGITS = ImageTask(PREPARATION, 10)


def image_folder(folder: Path, count: int, classes: int = 5, seed: int = 0) -> Path:
    return image_folder_of(folder, count, classes, seed=seed)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_grey_stays_one_channel_and_transparency_goes(tmp_path: Path, mode: str) -> None:
    channels = len(mode)
    shape = (7, 5) if channels == 1 else (7, 5, channels)
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    (tmp_path / "train").mkdir()
    Image.fromarray(pixels).save(tmp_path / "train" / "image.png")
    (entry,) = open_images(tmp_path, "train").entries
    opaque = pixels.reshape(7, 5, channels)[..., : 1 if channels < 3 else 3]
    np.testing.assert_array_equal(entry.read(), opaque)


def _read_all(folder: Path) -> None:
    for split in ("train", "valid", "test"):
        TASK.from_start(f"{folder}:{split}", length=1)


def test_a_damaged_file_is_one_line_with_its_name(tmp_path: Path) -> None:
    folder = image_folder(tmp_path, 40)
    whole = folder / "class 0" / "0.png"
    whole.write_bytes(whole.read_bytes()[:60])
    with pytest.raises(TextError, match=r"0\.png is not a readable image"):
        _read_all(folder)


def test_an_id_is_the_image_and_its_label() -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(1, 8, 8)
    first, again, other = (
        add_picture(Picture(name, pixels, label))
        for name, label in (("a", 1), ("b", 1), ("a", 2))
    )
    assert first == again != other
    assert labels_of([first, other]) == [1, 2]
    np.testing.assert_array_equal(pixels_of([first])[0], pixels)
    with pytest.raises(TextError, match="no image with the id 5"):
        labels_of([5])


def test_a_folder_without_splits_is_dealt_out_by_content(tmp_path: Path) -> None:
    folder = image_folder(tmp_path, 120)
    copy = folder / "class 0" / "copy.png"
    copy.write_bytes((folder / "class 1" / "1.png").read_bytes())
    parts = {
        split: open_images(str(folder), split).entries
        for split in ("train", "valid", "test")
    }
    names = [entry.name for part in parts.values() for entry in part]
    assert len(names) == len(set(names)) == 121
    assert 40 <= len(parts["train"]) <= 80
    home = {Path(e.name).name: split for split, part in parts.items() for e in part}
    assert home["copy.png"] == home["1.png"]


def test_folders_called_train_and_val_are_the_splits(tmp_path: Path) -> None:
    image_folder(tmp_path / "train", 20, seed=1)
    image_folder(tmp_path / "val", 40, seed=2)
    train, valid, test = (
        open_images(f"{tmp_path}:{split}").entries for split in ("train", "valid", "test")
    )
    assert len(train) == 20
    assert len(valid) + len(test) == 40
    assert not {e.name for e in valid} & {e.name for e in test}
    image_folder(tmp_path / "test", 10, seed=3)
    assert [
        len(open_images(str(tmp_path), split).entries) for split in ("valid", "test")
    ] == [40, 10]


def test_a_flat_folder_has_labels_in_a_file_or_none(tmp_path: Path) -> None:
    folder = image_folder(tmp_path, 40, classes=1) / "class 0"
    assert set(
        TASK.targets(TASK.drawn(str(folder), windows=2, length=4).ids).flatten().tolist()
    ) == {-1}
    with pytest.raises(TextError, match="evaluation needs labels"):
        TASK.from_start(str(folder), length=4)
    (folder / "labels.csv").write_text("".join(f"{n}.png, {n % 5}\n" for n in range(40)))
    windows = TASK.from_start(str(folder), length=4)
    for ids, documents in zip(windows.ids, windows.documents, strict=True):
        assert labels_of(ids.tolist()) == [int(Path(d.name).stem) % 5 for d in documents]
    (folder / "labels.csv").write_text("0.png,1\n")
    with pytest.raises(TextError, match="has no label for"):
        TASK.from_start(str(folder), length=4)


def test_more_windows_extend_fewer_and_another_seed_gives_others() -> None:
    few, many = (DIGITS.drawn("digits", windows=count, length=8) for count in (2, 5))
    assert few.fingerprint == many.first(2).fingerprint
    assert not np.array_equal(
        DIGITS.drawn("digits", windows=2, length=8, seed=1).ids, few.ids
    )
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
    own = ImageTask(PREPARATION, 10, images="digits")
    assert own.from_start("wikitext2:valid", length=4, limit=1).label == "digits:valid"
