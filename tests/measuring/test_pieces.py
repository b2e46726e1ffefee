"""A sweep in pieces, by candidates and by windows, done by any process and joined in any order, gives the same bits."""

import random
import sqlite3
from pathlib import Path

import pytest

from kl_lens.measuring.engines import FastEngine, PlainEngine
from kl_lens.measuring.perturbation import find_candidates
from kl_lens.measuring.pieces import Job, Piece, PieceRunner
from kl_lens.measuring.sweep import Sweep
from kl_lens.model.tasks import LanguageTask
from kl_lens.run.folder import Run
from kl_lens.run.merging import merge
from kl_lens.study.measure import shard_name
from kl_lens.weights.recipes import Recipe
from tests.measuring.conftest import loaded, some_windows

SHARDS = 6


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three windows of twenty tokens run together, so that seven are cut by windows too."""
    monkeypatch.setattr(LanguageTask, "rows_at_once", 60)


def contents(folder: Path) -> dict[str, list]:
    """All that was measured, to the last bit; not how long it took."""
    with Run.open(folder) as run:
        tables = {
            "samples": "SELECT * FROM samples ORDER BY role, component, format, window",
            "windows": "SELECT * FROM windows ORDER BY role, window",
            "order": "SELECT role, component, format FROM effort ORDER BY rowid",
            "identity": "SELECT * FROM identity ORDER BY key",
            "noise": "SELECT name, value FROM records WHERE kind = 'noise'",
        }
        return {
            name: run.journal.execute(query).fetchall() for name, query in tables.items()
        }


def effort(folder: Path) -> float:
    with Run.open(folder) as run:
        return sum(m.seconds for m in run.measurements())


def swept(
    folder: Path, model, windows, share=None, formats=("int4", "int8"), engine="fast"
) -> Path:
    with Run.create(folder) as run:
        candidates, _ = find_candidates(model.anatomy, [Recipe(name) for name in formats])
        Sweep(model, run, engine, share=share).measure(candidates, windows)
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """The sweep in one process, and in sixteen shares."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageTask, "rows_at_once", 60)
        folder = tmp_path_factory.mktemp("shards")
        model = loaded("mamba")
        windows = some_windows(7, 20)
        whole = swept(folder / "whole", model, windows)
        parts = [
            swept(folder / shard_name(index, SHARDS), model, windows, (index, SHARDS))
            for index in range(1, SHARDS + 1)
        ]
    return whole, parts


def test_shares_in_any_order_give_the_sweep_of_one_process_to_the_last_bit(
    shards, tmp_path
) -> None:
    whole, parts = shards
    run = tmp_path / "run"
    order = random.Random(3).sample(parts, len(parts))
    joined, refused = merge(run, order)
    assert not refused
    assert contents(run) == contents(whole)
    assert sum(j.added for j in joined) == len(contents(whole)["samples"])
    assert effort(run) == pytest.approx(sum(effort(part) for part in parts))
    again, _ = merge(run, parts)
    assert (sum(j.added for j in again), sum(j.differing for j in again)) == (0, 0)
    assert contents(run) == contents(whole)


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _other_bytes(path: Path) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("UPDATE samples SET token_kl = zeroblob(length(token_kl))")
    connection.close()


@pytest.mark.parametrize(
    "damage",
    [_cut_short, _other_bytes, lambda path: path.write_bytes(b"no journal" * 100)],
)
def test_a_damaged_share_is_refused_by_name_and_the_others_are_joined(
    shards, tmp_path, damage
) -> None:
    whole, parts = shards
    broken = tmp_path / "3-of-6"
    broken.mkdir()
    damaged = broken / "run.sqlite"
    with (
        sqlite3.connect(parts[2] / "run.sqlite") as source,
        sqlite3.connect(damaged) as copy,
    ):
        source.backup(copy)
    damage(damaged)
    run = tmp_path / "run"
    sound = [part for part in parts if part is not parts[2]]
    joined, refused = merge(run, [broken, *sound])
    assert list(refused) == [str(broken)]
    assert str(damaged) in refused[str(broken)]
    assert "\n" not in refused[str(broken)]
    assert [j.source for j in joined] == sound
    assert set(contents(run)["samples"]) < set(contents(whole)["samples"])
    merge(run, [parts[2]])
    assert contents(run) == contents(whole)


def test_shares_of_another_text_model_or_meaning_are_refused_by_name(
    shards, tmp_path, monkeypatch
) -> None:
    _, parts = shards
    other_text = swept(
        tmp_path / "00-text", loaded("mamba"), some_windows(7, 20, seed=2), (1, SHARDS)
    )
    other_model = swept(
        tmp_path / "00-model", loaded("mamba2"), some_windows(7, 20), (1, SHARDS)
    )
    empty = tmp_path / "empty"
    Run.create(empty).close()
    monkeypatch.setattr("kl_lens.run.folder.METRICS_VERSION", 0)
    other_meaning = swept(
        tmp_path / "00-meaning", loaded("mamba"), some_windows(7, 20), (1, SHARDS)
    )
    monkeypatch.undo()
    strangers = {
        other_text: "calibration text has seed 1, now it is 2",
        other_model: "another model",
        other_meaning: "metrics_version is 0 there and 1 now",
        empty: "holds no measurements",
        tmp_path / "nowhere": "has no run",
        tmp_path / "run": "is the run itself",
    }
    joined, refused = merge(tmp_path / "run", [*strangers, *parts])
    assert [j.source for j in joined] == parts
    assert set(refused) == {str(path) for path in strangers}
    for path, reason in strangers.items():
        assert reason in refused[str(path)]


def pairs_of(pieces: list[Piece]) -> list[tuple[int, int]]:
    """Windows with candidates."""
    return [(w, i) for p in pieces for w in p.windows for g in p.groups for i in g]


@pytest.mark.parametrize("engine", [FastEngine, PlainEngine])
@pytest.mark.parametrize("count", [5, 400])
def test_every_piece_is_in_one_share_and_shares_are_even(
    mamba, engine, count: int
) -> None:
    candidates, _ = find_candidates(mamba.anatomy, [Recipe("int4")])
    layout = PieceRunner(
        Job(some_windows(7, 20).ids.numpy(), candidates), engine(mamba)
    ).layout
    costs = [float(1 + index % 3) for index in range(len(candidates))]
    pairs: list[tuple[int, int]] = []
    work = []
    for index in range(1, count + 1):
        pieces = layout.share(costs, index, count)
        pairs += pairs_of(pieces)
        work.append(sum(piece.work for piece in pieces))
    assert sorted(pairs) == [(w, i) for w in range(7) for i in range(len(candidates))]
    largest = max(sum(costs[i] for i in group) for group in layout.groups) * layout.batch
    assert max(work) <= sum(costs) * 7 / count * 17 / 16 + largest
    spread = layout.spread(costs, count)
    assert sorted(pairs_of(spread)) == sorted(pairs)
    assert sum(piece.noise for piece in spread) == 1
