"""What is said about files side by side."""

import math
from pathlib import Path

import numpy as np
import pytest

from kl_lens.judging.choosing import Contender, verdicts
from kl_lens.judging.duel import maker_of, short_names
from kl_lens.reporting.names import fixed_with_error, with_error
from kl_lens.run.records import Estimate

WINDOWS = np.array(
    [0.9, 1.0, 1.1, 1.0, 0.95, 1.05, 1.2, 0.8]
)  # some are harder than others, for all files


def entrant(name: str, size: float, kl: float, noise: float = 0.0) -> Contender:
    windows = kl * WINDOWS + noise * np.array([1, -1, 1, -1, -1, 1, -1, 1])
    return Contender.on(name, int(size * 1e6), windows)


@pytest.mark.parametrize(
    ("files", "beginnings"),
    [
        (
            [("a", 4.0, 0.02), ("b", 4.05, 0.03)],
            ["a is better than b, which has the same size"],
        ),
        (
            [("a", 4.0, 0.03), ("b", 4.05, 0.02)],
            ["b is better than a, which has the same size"],
        ),
        ([("a", 4.0, 0.02, 0.004), ("b", 4.0, 0.0201)], ["a and b have the same size"]),
        (
            [("a", 3.0, 0.02), ("b", 4.0, 0.03)],
            ["a is better than b, although it is smaller"],
        ),
        ([("a", 3.0, 0.03), ("b", 4.0, 0.02)], []),
        ([("b", 4.0, 0.02), ("a", 4.0, 0.02)], ["a and b have the same size"]),
        ([("a", 3.0, 0.02), ("b", 4.0, 0.0201, 0.004)], ["a is smaller than b (3.00 MB"]),
        (
            [("a", 4.0, 0.02), ("b", 4.0, 0.03), ("c", 4.0, 0.04)],
            ["a is better than b", "a is better than c"],
        ),
    ],
)
def test_a_sentence_for_each_file_that_is_beaten_or_level(
    files: list[tuple], beginnings: list[str]
) -> None:
    sentences = [*verdicts([entrant(*file) for file in files])]
    assert len(sentences) == len(beginnings)
    assert all(
        sentence.startswith(two)
        for sentence, two in zip(sentences, beginnings, strict=True)
    )


def test_the_difference_is_paired_by_window() -> None:
    (sentence,) = verdicts([entrant("a", 4.0, 0.02), entrant("b", 4.0, 0.03)])
    # Both vary by 12 % from window to window; unpaired, the error would be several times as large.
    assert "lower by 0.01 ± 0.0004 nats" in sentence


def test_names_are_as_long_as_needed() -> None:
    assert short_names(["/x/one.gguf", "/x/two/model.safetensors"]) == ["one.gguf", "two"]
    assert short_names(["/x/a/q4.gguf", "/x/b/q4.gguf"]) == ["a/q4.gguf", "b/q4.gguf"]


@pytest.mark.parametrize(
    ("path", "metadata", "maker"),
    [
        ("ours/artifact.json", {}, "KL Lens"),
        ("a.gguf", {"general.quantized_by": "Unsloth"}, "Unsloth"),
        (
            "a.gguf",
            {"general.repo_url": "https://huggingface.co/bartowski/x"},
            "bartowski",
        ),
        ("a.gguf", {"general.repo_url": "somewhere"}, ""),
        ("models--mlx-community--x/snapshots/1/model.gguf", {}, "mlx-community"),
        (".lmstudio/models/someone/x-GGUF/x.gguf", {}, "someone"),
        ("a.gguf", {"general.quantized_by": "\x1b[2J"}, "\\x1b[2J"),
    ],
)
def test_the_maker_of_a_file_is_named_as_far_as_it_is_known(
    path: str, metadata: dict[str, str], maker: str, tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".json":
        file.write_text("{}")
        file = file.parent
    else:
        writer = gguf.GGUFWriter(file, "mamba")
        for key, value in metadata.items():
            writer.add_string(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert maker_of(file) == maker


def test_one_window_has_no_error() -> None:
    files = [
        Contender.on(name, 10**6, np.array([kl]))
        for name, kl in (("a", 0.02), ("b", 0.03))
    ]
    [sentence] = verdicts(files)
    assert "±" not in sentence
    assert with_error(Estimate(0.02)) == with_error(Estimate(0.02, math.inf)) == "0.02"
    assert fixed_with_error(Estimate(20.0, math.inf)) == "20.00"
