"""The model of speed: seconds per token from the bytes of each format."""

from __future__ import annotations

import pytest

from kl_lens.planning.speed import TimedFile, fitted

SIZES = {
    "fp16": {"fp16": 1600},
    "q8_0": {"q8_0": 850},
    "q4_k": {"q4_k": 450},
    "mixed": {"q4_k": 230, "q8_0": 420},
}


def timed(rates: dict[str, float], constant: float = 1.0) -> list[TimedFile]:
    """Files in MB of these formats, with a constant in milliseconds and rates in µs per kB."""
    return [
        TimedFile(
            {name: 10**6 * size for name, size in sizes.items()},
            1e-3 * constant + sum(1e-3 * rates[name] * size for name, size in sizes.items()),
        )
        for sizes in SIZES.values()
    ]


def test_equal_rates_are_found_as_they_are() -> None:
    model = fitted(timed({"fp16": 2.0, "q8_0": 2.0, "q4_k": 2.0}, constant=100))
    assert model is not None
    assert model.constant == pytest.approx(0.1, rel=1e-6)
    assert model.rates == pytest.approx(dict.fromkeys(("fp16", "q8_0", "q4_k"), 2e-9), rel=1e-6)
    assert model.rate("iq4_xs") == model.usual == pytest.approx(2e-9, rel=1e-6)


def test_a_format_that_is_slow_for_its_bytes_is_seen() -> None:
    """As on ARM without dot products: four bits take as long as eight."""
    files = timed({"fp16": 2.0, "q8_0": 2.0, "q4_k": 3.7})
    model = fitted(files)
    assert model is not None
    for file in files:
        predicted = model.constant + sum(model.rate(name) * size for name, size in file.bytes.items())
        assert predicted == pytest.approx(file.seconds, rel=0.05)
    assert model.rate("q4_k") > 1.4 * model.rate("q8_0")


def test_smaller_files_that_are_not_faster_have_no_model() -> None:
    assert (
        fitted([TimedFile({"fp16": 1600}, 1.0), TimedFile({"q8_0": 850}, 1.1), TimedFile({"q4_k": 450}, 1.2)])
        is None
    )
