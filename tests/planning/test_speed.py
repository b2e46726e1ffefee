"""The model of speed: seconds per token from the bytes of each format."""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from kl_lens.base.errors import PlanError
from kl_lens.planning import build_problem, speed, speed_model
from kl_lens.planning.speed import WORST, SpeedModel, TimedFile, error_of, fitted
from kl_lens.run.records import ARTIFACT, Profile, Quartiles, Subject
from tests.planning.tables import component, table_of

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


TABLE = table_of(
    [component("head"), component("embedding"), component("in_proj")],
    {},
    embedding="embedding",
)
GGUF: Any = SimpleNamespace(name="gguf", title="GGUF", speed_options=("groups",))


def profile(plan: str, seconds: float, threads: int = 2, target: str = "gguf") -> Profile:
    timings = {"seconds_per_token": Quartiles(seconds, seconds, seconds, 1)}
    settings = (Subject(ARTIFACT, plan, target), "use", "CPU", threads, timings)
    return Profile(*settings, {}, None, 1, {}, {}, {}, {})


def modelled(monkeypatch: pytest.MonkeyPatch, *profiles: Profile) -> SpeedModel:
    """Of files called after the MB of their `in_proj`; the embedding, of 9 MB, takes no time. Those with a minus sign
    were written with an option."""

    def recorded(path: Path) -> Any:
        sizes = {"in_proj": abs(float(path.name)), "embedding": 9.0, "norm": 5.0}
        return SimpleNamespace(
            settings={"groups": "row" if path.name.startswith("-") else None},
            tensors=[
                SimpleNamespace(component=name, realised="q8_0+gptq", bytes=int(1e6 * mb))
                for name, mb in sizes.items()
            ],
        )

    run: Any = SimpleNamespace(folder="runs/m", artifact_folder=Path)
    monkeypatch.setattr(speed, "current_profiles", lambda run: profiles)
    monkeypatch.setattr(speed, "recorded_artifact", recorded)
    return speed_model(run, TABLE, GGUF)


def test_a_model_rests_on_the_files_timed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 ms, and 1 ms for every MB. A file timed with one thread, and another target's, do not count."""
    files = [profile(str(mb), 1e-3 * (2 + mb)) for mb in (1, 2, 4)]
    foreign = [profile("3", 9.0, threads=1), profile("8", 9.0, target="openvino")]
    model = modelled(monkeypatch, *foreign, *files)
    assert (model.files, model.conditions) == (3, "CPU, 2 threads")
    assert model.lookup == "embedding"
    assert model.constant == pytest.approx(2e-3, rel=0.05)
    assert model.rate("q8_0") == pytest.approx(1e-9, rel=0.05)
    assert model.basis.startswith("from 3 timed files (CPU, 2 threads); each predicted")
    fixed = build_problem(TABLE, speed=replace(model, rates={}), no_head=True).fixed
    assert fixed.seconds == pytest.approx(model.constant + model.usual * 2 * 64 * 64)
    assert model.options == {}


def test_files_written_otherwise_are_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1 ms less: the three files that round in whole rows, not the two that leave it to the runtime."""
    files = [profile(f"-{mb}", 1e-3 * (1 + mb)) for mb in (1, 2, 4)]
    usual = [profile(str(mb), 1e-3 * (2 + mb)) for mb in (1, 2)]
    model = modelled(monkeypatch, *usual, *files)
    assert (model.options, model.conditions) == (
        {"groups": "row"},
        "CPU, 2 threads, groups row",
    )
    assert model.constant == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ({"1": 0.003, "2": 0.004}, "the run has 2; export more plans"),
        ({"1": 0.003, "1.0": 0.003, "2": 0.004}, "the run has 2; export more plans"),
        ({"1": 0.004, "2": 0.003, "4": 0.002}, "were not reliably faster"),
        ({"1": 0.001, "2": 0.009, "4": 0.003}, "were not reliably faster"),
    ],
)
def test_timings_that_say_nothing_give_no_model(
    seconds: dict[str, float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match=message):
        modelled(monkeypatch, *(profile(plan, s) for plan, s in seconds.items()))
