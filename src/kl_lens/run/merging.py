"""Merges the journals of several processes, each with its own run folder, into one run.

Each source is checked first. One that is damaged, or of another model, text or metrics version, is refused by name and
the others are merged. Each is merged in one transaction; what the run already holds is not changed.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kl_lens.base.errors import KLLensError, RunError
from kl_lens.run.folder import Run
from kl_lens.run.journal import FILE, checks_rows
from kl_lens.run.samples import METRICS_VERSION, WINDOW_FIELDS, WindowMetrics
from kl_lens.run.subjects import content_digest

SHARDS = "shards"  # folder in a run for `measure --shard`
SWEEP = "sweep"  # record of a shard: the whole list of candidates


@dataclass(frozen=True)
class Joined:
    """What a run took from one source, counted in candidate × window pairs."""

    source: Path
    taken: int
    known: int  # already in the run
    differing: int  # of those: the numbers differ, and the run kept its own


@dataclass(frozen=True)
class _Source:
    folder: Path
    identity: dict[str, Any]
    texts: dict[str, tuple[dict[str, Any], list[str]]]  # role → identity, and the hash of each window

    @property
    def about(self) -> str:
        texts = {role: identity for role, (identity, _) in self.texts.items()}
        return content_digest([self.identity.get("model_fingerprint"), texts])


def shards_of(run: Path) -> list[Path]:
    return sorted(path.parent for path in (run / SHARDS).glob(f"*/{FILE}"))


def merge(
    folder: Path, sources: Sequence[Path], command: Sequence[str] = ()
) -> tuple[list[Joined], dict[str, str]]:
    """What was merged, sorted by name, and source → why it was refused."""
    found: list[_Source] = []
    refused: dict[str, str] = {}
    for path in sorted({os.path.realpath(each): Path(each) for each in sources}.values()):
        try:
            if os.path.realpath(path) == os.path.realpath(folder):
                raise RunError(f"{path} is the run itself")
            with Run.open(path) as run:
                found.append(_checked(run))
        except KLLensError as error:
            refused[str(path)] = str(error)
    if not found:
        return [], refused
    # Start with what most sources are about, so that an odd one out is refused and not the rest.
    common = Counter(source.about for source in found)
    found.sort(key=lambda source: -common[source.about])
    joined = []
    with Run.create(folder) as run:
        if command:
            run.note_command(command)
        for source in found:
            try:
                joined.append(_joined(run, source))
            except KLLensError as error:
                refused[str(source.folder)] = str(error)
        for role in run.load_all(SWEEP):
            run.put_in_order(role, [tuple(key) for key in run.load(SWEEP, role) or []])
    return sorted(joined, key=lambda each: each.source), refused


def missing(run: Run) -> int:
    """Candidate × window pairs that no shard has measured yet."""
    total = 0
    for role, keys in run.load_all(SWEEP).items():
        count = (run.text_identity(role.partition("@")[0]) or {"windows": 0})["windows"]
        done = run.measured_windows(role)
        total += sum(count - len(done.get((component, name), ())) for component, name in keys)
    return total


@checks_rows
def _checked(run: Run) -> _Source:
    """Reads what a journal is about. Raises if it is damaged or of another metrics version."""
    (verdict,) = run.journal.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise ValueError(verdict)
    identity = run.identity
    if "model_fingerprint" not in identity or not run.roles():
        raise RunError(f"{run.folder} holds no measurements")
    if identity.get("metrics_version") != METRICS_VERSION:
        raise RunError(
            f"{run.folder} was made with another definition of the metrics: metrics_version is "
            f"{identity.get('metrics_version')!r} there and {METRICS_VERSION!r} now; measure it again"
        )
    for _, _, _, window in _samples(run):
        token_kl = np.frombuffer(window.token_kl, np.float32)
        total = float(token_kl.sum(dtype=np.float64))
        if len(token_kl) != window.tokens or not all(math.isfinite(v) for v in _numbers(window)):
            raise ValueError(f"window {window.window} holds no measurement")
        if not math.isclose(total, window.kl, rel_tol=1e-4, abs_tol=1e-9 * window.tokens):
            raise ValueError(f"window {window.window} does not add up")
    texts = {}
    for role in run.roles():
        rows = run.journal.execute(
            "SELECT window, hash FROM windows WHERE role = ? ORDER BY window", (role,)
        ).fetchall()
        if [window for window, _ in rows] != list(range(len(rows))):
            raise ValueError(f"windows of {role} are missing")
        texts[role] = _text(run, role), [value for _, value in rows]
    return _Source(run.folder, identity, texts)


def _text(run: Run, role: str) -> dict[str, Any]:
    identity = dict(run.text_identity(role) or {})
    identity.pop("windows", None)
    return identity


def _numbers(window: WindowMetrics) -> tuple[float, ...]:
    return window.window, window.tokens, window.targets, *window.sums.values()


def _samples(run: Run) -> Iterator[tuple[str, str, str, WindowMetrics]]:
    fields = ", ".join(WINDOW_FIELDS)
    query = f"SELECT role, component, format, {fields} FROM samples ORDER BY role, component, format, window"
    for role, component, name, *values in run.journal.execute(query):
        yield role, component, name, WindowMetrics.from_row(*values)


def _joined(run: Run, source: _Source) -> Joined:
    """Merges a source in one transaction. Its time is counted in proportion to the new windows."""
    with Run.open(source.folder) as other:
        run.identify({key: value for key, value in source.identity.items() if key != "metrics_version"})
        for role, (identity, hashes) in source.texts.items():
            run.identify_text(role, identity, hashes)
        effort = {
            tuple(row[:3]): row
            for row in other.journal.execute("SELECT * FROM effort ORDER BY rowid").fetchall()
        }
        there = {role: run.measured_windows(role) for role, _, _ in effort}
        taken: Counter[tuple[str, str, str]] = Counter()
        every: Counter[tuple[str, str, str]] = Counter()
        differing = 0
        marks = ", ".join("?" for _ in range(3 + len(WINDOW_FIELDS)))
        with run.journal.alone():
            for role, component, name, window in _samples(other):
                key = (role, component, name)
                every[key] += 1
                if window.window in there.get(role, {}).get((component, name), ()):
                    differing += not _same(run, key, window)
                    continue
                taken[key] += 1
                run.journal.execute(f"INSERT INTO samples VALUES ({marks})", (*key, *window.row))
            for key, count in taken.items():
                *_, seconds, dtype = effort[key]
                run.journal.execute(
                    "INSERT INTO effort VALUES (?, ?, ?, ?, ?) ON CONFLICT (role, component, format) "
                    "DO UPDATE SET seconds = seconds + excluded.seconds",
                    (*key, seconds * count / every[key], dtype),
                )
            _take_windows_and_records(run, other)
    return Joined(source.folder, taken.total(), every.total() - taken.total(), differing)


def _same(run: Run, key: tuple[str, str, str], window: WindowMetrics) -> bool:
    query = "SELECT token_kl FROM samples WHERE role = ? AND component = ? AND format = ? AND window = ?"
    return bool(run.journal.execute(query, (*key, window.window)).fetchone()[0] == window.token_kl)


def _take_windows_and_records(run: Run, other: Run) -> None:
    """Teacher values for windows where the run has none, noise, texts, and the lists of candidates."""
    query = "SELECT tokens, teacher_cross_entropy, role, window FROM windows WHERE tokens IS NOT NULL"
    run.journal.executemany(
        "UPDATE windows SET tokens = ?, teacher_cross_entropy = ? WHERE role = ? AND window = ? AND tokens IS NULL",
        other.journal.execute(query).fetchall(),
    )
    query = "SELECT kind, name, value, created FROM records WHERE kind IN ('noise', 'text')"
    run.journal.executemany(
        "INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?)", other.journal.execute(query).fetchall()
    )
    for role, keys in other.load_all(SWEEP).items():
        known = run.load(SWEEP, role) or []
        both = known + [key for key in keys if key not in known]
        row = (SWEEP, role, json.dumps(both), 0.0)
        run.journal.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", row)
