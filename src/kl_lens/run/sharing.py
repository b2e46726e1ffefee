"""A run's sensitivities as one file, from which others plan without measuring.

The file is the run's journal with what measuring stored and nothing else, compressed: model, digests of the text,
every reading. The KL of single tokens is kept to three digits; sums are kept as they are, so plans are the same.
"""

from __future__ import annotations

import json
import lzma
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path, PurePath

import numpy as np

from kl_lens.base.errors import RunError, one_line
from kl_lens.base.files import whole
from kl_lens.run.folder import CALIBRATION, SCREENED, Run
from kl_lens.run.journal import FILE
from kl_lens.run.merging import checked, joined

SHARED = "sensitivities.kltable"
_LARGEST = 1 << 31  # bytes of a journal that is unpacked
_PIECE = 1 << 20
_OURS_ALONE = (
    "source",
    "tokenizer",
    "statistics",
)  # paths of this machine; of its inputs
# What measuring stored on the calibration text, with the activations of any target.
_FORGOTTEN = f"""
DELETE FROM results; DELETE FROM commands;
DELETE FROM identity WHERE key IN {_OURS_ALONE};
DELETE FROM records WHERE kind NOT IN ('noise', 'text', '{SCREENED}')
    OR (name <> '{CALIBRATION}' AND name NOT GLOB '{CALIBRATION}@*');
DELETE FROM texts WHERE role <> '{CALIBRATION}';
DELETE FROM windows WHERE role <> '{CALIBRATION}';
DELETE FROM samples WHERE role <> '{CALIBRATION}' AND role NOT GLOB '{CALIBRATION}@*';
DELETE FROM effort WHERE role <> '{CALIBRATION}' AND role NOT GLOB '{CALIBRATION}@*';
"""


def write_shared(run: Run, path: Path) -> Path:
    """Writes the file. No path and no word of a text gets into it; the name of its file does."""
    if not run.measured_windows(run.measured_role()):
        raise RunError(
            f"{run.folder} has no sensitivities; measure some with: kl-lens measure MODEL --run {run.folder}"
        )
    with tempfile.TemporaryDirectory() as folder, whole(path) as draft:
        slim = Path(folder) / FILE
        run.journal.rows("VACUUM INTO ?", str(slim))
        with closing(sqlite3.connect(slim)) as database:
            database.create_function("shorter", 1, _shorter, deterministic=True)
            database.create_function("without_paths", 1, _without_paths)
            database.executescript(_FORGOTTEN)
            database.execute("UPDATE texts SET identity = without_paths(identity)")
            database.execute(
                "UPDATE records SET value = without_paths(value) WHERE kind = 'text'"
            )
            database.execute("UPDATE samples SET token_kl = shorter(token_kl)")
            database.commit()
            database.execute("VACUUM")
        draft.write_bytes(lzma.compress(slim.read_bytes()))
    return path


def _without_paths(about: str) -> str:
    """A text's description with the name of its file alone; what else names the file, as its documents do, is left
    out."""
    stored = json.loads(about)
    source = stored["source"]
    name = PurePath(source).name
    harmless = {key: value for key, value in stored.items() if source not in str(value)}
    return json.dumps({**harmless, "source": name} if name != source else stored)


def _shorter(values: bytes) -> bytes:
    """Float32 with thirteen bits behind the point: the rest is zeros, which take no room."""
    bits = np.frombuffer(values, np.uint32)
    return ((bits + 0x200) & 0xFFFFFC00).astype(np.uint32).tobytes()


def take_shared(path: Path, run: Run) -> None:
    """Adds the file's readings to a run of the same model; raises for another model, and for what is no such file."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _unpack(path, Path(folder) / FILE)
            with Run.open(Path(folder)) as source:
                _take(source, run)
        except (lzma.LZMAError, EOFError) as error:
            raise RunError(
                f"{path} is not a table of sensitivities, or is cut off ({one_line(error)}); download it again"
            ) from None
        except RunError as error:
            raise RunError(str(error).replace(folder, str(path))) from None


def _take(source: Run, run: Run) -> None:
    kinds = source.journal.rows("SELECT DISTINCT type FROM sqlite_master")
    if set(kinds) - {("table",), ("index",)}:
        raise RunError(f"{source.folder} holds more than a table of sensitivities")
    checked(source)
    measured = source.identity
    if measured["model_fingerprint"] != run.identity["model_fingerprint"]:
        raise RunError(
            f"{source.folder} was measured on other weights ({measured['model']}): another model, another revision of "
            "it, or another beginning of texts (--bos); leave out --table, or open that model"
        )
    with run.journal.alone():
        joined(source, run, (SCREENED,))


def _unpack(path: Path, place: Path) -> None:
    room = _LARGEST
    with lzma.open(path) as packed, place.open("wb") as file:
        while piece := packed.read(_PIECE):
            room -= len(piece)
            if room < 0:
                raise RunError(f"{path} unpacks to more than {_LARGEST >> 30} GiB")
            file.write(piece)
