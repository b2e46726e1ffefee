"""The journal `run.sqlite` (its tables, and SQLite with one-line errors), and the lock of a run folder."""

from __future__ import annotations

import functools
import os
import shlex
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kl_lens.base.errors import RunError, one_line
from kl_lens.base.system import lock

FILE = "run.sqlite"
LOCK = ".lock"
LOCK_SECONDS = 30.0  # how long to wait for another process
SCHEMA_VERSION = 4  # of the journal's tables

_SCHEMA = """
CREATE TABLE identity (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE texts (role TEXT PRIMARY KEY, identity TEXT NOT NULL);
CREATE TABLE windows (
    role TEXT, window INTEGER, hash TEXT NOT NULL, tokens INTEGER, teacher_cross_entropy REAL,
    PRIMARY KEY (role, window));
CREATE TABLE samples (
    role TEXT, component TEXT, format TEXT, window INTEGER, tokens INTEGER, targets INTEGER,
    sums TEXT, token_kl BLOB,
    PRIMARY KEY (role, component, format, window)) WITHOUT ROWID;
CREATE TABLE effort (
    role TEXT, component TEXT, format TEXT, seconds REAL, compute_dtype TEXT,
    PRIMARY KEY (role, component, format));
CREATE TABLE records (
    kind TEXT, name TEXT, value TEXT NOT NULL, created REAL, PRIMARY KEY (kind, name));
CREATE TABLE results (
    kind TEXT, what TEXT, plan TEXT, target TEXT, settings TEXT, digest TEXT, name TEXT, value TEXT NOT NULL,
    created REAL, PRIMARY KEY (kind, what, plan, target, settings, digest, name));
CREATE TABLE commands (started REAL, command TEXT, provenance TEXT);
"""

_BUSY = "is in use by another process; wait for that one, or use another --run"
_CLOSED = "cannot be opened ({}); the folder must be writable, even to read a run"
_REASONS = {
    sqlite3.SQLITE_BUSY: _BUSY,
    sqlite3.SQLITE_LOCKED: _BUSY,
    sqlite3.SQLITE_FULL: "cannot grow: the disk is full; free space and run the command again (results are kept)",
    sqlite3.SQLITE_READONLY: "cannot be written ({}), even to read a run; make its folder writable, or copy it",
    sqlite3.SQLITE_CANTOPEN: _CLOSED,
    sqlite3.SQLITE_PERM: _CLOSED,
    sqlite3.SQLITE_IOERR: "cannot be read or written ({}); is the disk full or gone? use another --run",
    sqlite3.SQLITE_NOTADB: "is not a KL Lens journal ({}); use another --run",
}
_DAMAGED = "is damaged ({}); restore it from a copy, or use another --run"
# Bugs of the program, not damage of the file.
_OURS = (
    sqlite3.ProgrammingError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.NotSupportedError,
)
_ODD = (
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)


class Journal(sqlite3.Connection):
    """`rows`, `write` and `alone` raise a RunError that names the file and says what to do."""

    def __init__(self, path: Path) -> None:
        """Opens it; creates the tables of a new one, and raises for one of another version."""
        self.path = path
        with self._errors():
            super().__init__(path, timeout=LOCK_SECONDS)
            try:
                self.execute("PRAGMA journal_mode=WAL")
                self.execute("PRAGMA synchronous=NORMAL")
                if self._version() != SCHEMA_VERSION:
                    self._make_tables()
            except BaseException:
                self.close()
                raise

    def rows(self, query: str, *values: Any) -> list[Any]:
        with self._errors():
            return self.execute(query, values).fetchall()

    def write(self, change: str, rows: Iterable[Sequence[Any]] = ((),)) -> None:
        """Makes the change once for each row, in one transaction."""
        with self.alone():
            self.executemany(change, rows)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A transaction in which no other process can write; one inside another is a part of it."""
        with self._errors():
            if self.in_transaction:
                yield
            else:
                with self:
                    self.execute("BEGIN IMMEDIATE")
                    yield
                if not self.path.exists():
                    raise RunError(
                        f"{self.path} was deleted or moved while this command worked; run it again, or move the folder "
                        "back and run it again"
                    )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except _OURS:
            raise
        except (sqlite3.Error, UnicodeDecodeError) as error:
            # UnicodeDecodeError: names of tables and columns. The upper bits are extended codes.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            reason = _REASONS.get(code, _DAMAGED).format(one_line(error))
            raise RunError(f"{self.path} {reason}") from error

    def _version(self) -> int:
        return int(self.execute("PRAGMA user_version").fetchone()[0])

    def _make_tables(self) -> None:
        with self.alone():  # if two processes create it, the second finds it complete
            version = self._version()
            if version == SCHEMA_VERSION:
                return
            if version or self.execute("SELECT * FROM sqlite_master").fetchone():
                maker = "a newer" if version > SCHEMA_VERSION else "an older"
                raise RunError(
                    f"{self.path} was made by {maker} version of KL Lens (version {version} of the journal; this one "
                    f"reads {SCHEMA_VERSION}) and is left as it is. To start anew, give another --run or delete it"
                )
            for statement in _SCHEMA.split(";"):
                self.execute(statement)
            self.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


Method = TypeVar("Method", bound=Callable[..., Any])


def checks_rows(method: Method) -> Method:
    """For readers of a run: a row that KL Lens cannot have stored is reported as damage."""

    @functools.wraps(method)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return method(self, *arguments, **options)
        except _ODD as error:
            reason = _DAMAGED.format(f"{type(error).__name__}: {one_line(error)}")
            raise RunError(f"{self.folder / FILE} {reason}") from error

    return checked  # type: ignore[return-value]


# Folder → file handle, and how often this process holds it.
_holds: dict[str, tuple[int, int]] = {}


class Hold:
    """Holds the folder until `release`: one process at a time may write; another is told which one. The same process
    may take it several times. The system releases it when the process ends. Reading needs no lock."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self._key: str | None = os.path.realpath(folder)
        handle, times = _holds.get(self._key, (-1, 0))
        if not times:
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                _take(handle, folder, command)
            except BaseException:
                os.close(handle)
                raise
        _holds[self._key] = handle, times + 1

    def release(self) -> None:
        if self._key is None:
            return
        handle, times = _holds[self._key]
        if times > 1:
            _holds[self._key] = handle, times - 1
        else:
            del _holds[self._key]
            os.close(handle)
        self._key = None


def _take(handle: int, folder: Path, command: Sequence[str]) -> None:
    alone = lock(handle, wait=False)
    os.lseek(handle, 0, os.SEEK_SET)
    if not alone:
        holder = os.read(handle, 4096).decode(errors="replace").strip()
        raise RunError(
            f"{folder} is in use by {holder or 'another process'}; wait for it, or use another --run"
        )
    since = time.strftime("%H:%M:%S")
    words = shlex.join(command)[:1000]
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} ({words}, since {since})\n".encode())
