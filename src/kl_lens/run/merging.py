"""Merges the journals of several processes, each with its own run folder, into one run.

Each source is checked first. One that is damaged, or of another model, text or metrics version, is refused by name and
the others are merged. Each is merged in one transaction; what the run already holds is not changed.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kl_lens.base.errors import KLLensError, RunError
from kl_lens.run.folder import Run
from kl_lens.run.journal import FILE, checks_rows
from kl_lens.run.readings import METRICS_VERSION
from kl_lens.run.subjects import content_digest

SHARDS = "shards"  # folder in a run for `measure --shard`
# Every candidate of a sweep, in its order.
_EFFORT = "SELECT * FROM effort ORDER BY rowid"


@dataclass(frozen=True)
class Joined:
    """What a run took from one source, counted in candidate × window pairs."""

    source: Path
    added: int
    repeated: int  # already in the run
    differing: int  # of those: the numbers differ, and the run kept its own


def shards_of(run: Path) -> list[Path]:
    return sorted(path.parent for path in (run / SHARDS).glob(f"*/{FILE}"))


def merge(
    folder: Path, sources: Sequence[Path], command: Sequence[str] = ()
) -> tuple[list[Joined], dict[str, str]]:
    """What was merged, sorted by name, and source → why it was refused."""
    about: dict[Path, str] = {}
    refused: dict[str, str] = {}
    folders = {os.path.realpath(path): Path(path) for path in sources}
    for path in sorted(folders.values()):
        try:
            if os.path.realpath(path) == os.path.realpath(folder):
                raise RunError(f"{path} is the run itself")
            with Run.open(path) as source:
                about[path] = checked(source)
        except KLLensError as error:
            refused[str(path)] = str(error)
    if not about:
        return [], refused
    # Start with what most sources are about, so that an odd one out is refused and not the rest.
    common = Counter(about.values())
    results = []
    with Run.create(folder) as run:
        if command:
            run.note_command(command)
        for path in sorted(about, key=lambda path: -common[about[path]]):
            try:
                with Run.open(path) as source, run.journal.alone():
                    results.append(joined(source, run))
            except KLLensError as error:
                refused[str(path)] = str(error)
    return sorted(results, key=lambda entry: entry.source), refused


def missing(run: Run) -> int:
    """Candidate × window pairs that no shard has measured yet."""
    total = 0
    for role, component, name, *_ in run.journal.rows(_EFFORT):
        total += len(run.window_hashes(role.partition("@")[0])) - len(
            run.samples(role, component, name)
        )
    return total


@checks_rows
def checked(source: Run) -> str:
    """A digest of what a journal is about. Raises if it is damaged or of another metrics version."""
    ((verdict,),) = source.journal.rows("PRAGMA quick_check(1)")
    if verdict != "ok":
        raise ValueError(verdict)
    identity = source.identity
    if "model_fingerprint" not in identity or not source.roles():
        raise RunError(f"{source.folder} holds no measurements")
    if identity.get("metrics_version") != METRICS_VERSION:
        raise RunError(
            f"{source.folder} was made with another definition of the metrics: metrics_version is "
            f"{identity.get('metrics_version')!r} there and {METRICS_VERSION!r} now; measure it again"
        )
    for key in source.journal.rows(_EFFORT):
        for window in source.samples(*key[:3]):
            token_kl = window.by_token()
            total = float(token_kl.sum(dtype=np.float64))
            numbers = window.window, window.tokens, window.targets, *window.sums.values()
            if len(token_kl) != window.tokens or not all(
                math.isfinite(number) for number in numbers
            ):
                raise ValueError(f"window {window.window} holds no measurement")
            if not math.isclose(
                total, window.kl, rel_tol=1e-4, abs_tol=1e-9 * window.tokens
            ):
                raise ValueError(f"window {window.window} does not add up")
    for role in source.roles():
        hashes = source.window_hashes(role)
        if list(hashes) != list(range(len(hashes))):
            raise ValueError(f"windows of {role} are missing")
    texts = {role: source.text_identity(role) for role in source.roles()}
    return content_digest([identity["model_fingerprint"], texts])


@checks_rows
def joined(source: Run, run: Run, kinds: Sequence[str] = ()) -> Joined:
    """Adds what the run does not have: samples with their share of the time, the teacher's values, noise, texts, and
    records of further kinds."""
    run.identify(source.identity)
    for role in source.roles():
        identity = dict(source.text_identity(role) or {})
        identity.pop("windows")
        run.identify_text(role, identity, list(source.window_hashes(role).values()))
    added = present = differing = 0
    for role, component, name, seconds, dtype in source.journal.rows(_EFFORT):
        stored = {
            window.window: window.arrays for window in run.samples(role, component, name)
        }
        windows = source.samples(role, component, name)
        fresh = [window for window in windows if window.window not in stored]
        differing += sum(
            stored.get(window.window, window.arrays) != window.arrays
            for window in windows
        )
        added = added + len(fresh)
        present = present + len(windows) - len(fresh)
        share = len(fresh) / max(1, len(windows))
        run.store_samples(role, component, name, fresh, seconds * share, dtype)
    run.journal.write(
        "UPDATE windows SET tokens = ?, teacher_cross_entropy = ? WHERE role = ? AND window = ? AND tokens IS NULL",
        source.journal.rows(
            "SELECT tokens, teacher_cross_entropy, role, window FROM windows"
        ),
    )
    for kind in ("noise", "text", *kinds):
        records = source.journal.rows("SELECT * FROM records WHERE kind = ?", kind)
        run.journal.write("INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?)", records)
    return Joined(source.folder, added, present, differing)
