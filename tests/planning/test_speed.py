"""The model of speed: seconds per token from the bytes of each format."""

import csv
from pathlib import Path
from statistics import median

from kl_lens.planning.speed import WORST, TimedFile, error_of, fitted

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
            1e-3 * constant
            + sum(1e-3 * rates[name] * size for name, size in sizes.items()),
        )
        for sizes in SIZES.values()
    ]


def test_a_format_that_is_slow_for_its_bytes_is_seen() -> None:
    """As on ARM without dot products: four bits take as long as eight."""
    files = timed({"fp16": 2.0, "q8_0": 2.0, "q4_k": 3.7})
    model = fitted(files)
    assert model is not None
    assert max(error_of(file, model) for file in files) < 0.05
    assert model.rate("q4_k") > 1.4 * model.rate("q8_0")


def test_smaller_files_that_are_not_faster_have_no_model() -> None:
    files = [
        TimedFile({"fp16": 1600}, 1.0),
        TimedFile({"q8_0": 850}, 1.1),
        TimedFile({"q4_k": 450}, 1.2),
    ]
    assert fitted(files) is None


def published() -> list[list[TimedFile]]:
    """llama.cpp files of docs/results/speed.csv: one set for each shape, library and number of threads."""
    path = Path(__file__).resolve().parents[2] / "docs/results/speed.csv"
    rows = [
        row
        for row in csv.DictReader(path.open(encoding="utf-8"))
        if row["benchmark"] == "gguf"
    ]
    sizes = {
        (r["machine"], r["model"], *r["variant"].split(", ")[:1]): r
        for r in rows
        if r["quantity"] == "MiB"
    }
    sets: dict[tuple[str, ...], list[TimedFile]] = {}
    for row in rows:
        fmt, _, library = row["variant"].partition(", ")
        size = sizes.get((row["machine"], row["model"], fmt))
        if row["quantity"] == "decode tokens/s" and library and fmt != "mixed" and size:
            key = (row["machine"], row["model"], row["threads"], library)
            read = {fmt.lower(): round(float(size["value"]) * 2**20)}
            sets.setdefault(key, []).append(TimedFile(read, 1 / float(row["value"])))
    return [files for files in sets.values() if len(files) >= 3]


def test_published_timings_fit_as_docs_results_says() -> None:
    sets = published()
    models = [model for files in sets if (model := fitted(files))]
    assert len(models) == len(sets) == 18
    assert (
        max(error_of(f, m) for files, m in zip(sets, models, strict=True) for f in files)
        < 0.02
    )
    left_out = [
        median(
            error_of(file, fitted([timing for timing in files if timing is not file]))
            for file in files
        )
        for files in sets
    ]
    assert (round(min(left_out), 2), round(max(left_out), 2)) == (0.02, 0.22)
    assert max(left_out) < WORST
    factors = [rate / model.usual for model in models for rate in model.rates.values()]
    assert (round(min(factors), 2), round(max(factors), 2)) == (0.56, 1.36)
