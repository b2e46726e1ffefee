"""SQLite connection to `run.sqlite` with one-line errors: damaged, locked, not a journal, not writable, disk full."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from kl_lens.base.errors import RunError, one_line

FILE = "run.sqlite"
LOCK_SECONDS = 30.0  # how long to wait for another process

_ELSEWHERE = "use another --run"
_REASONS = {
    sqlite3.SQLITE_BUSY: "is in use by another process; wait for that one, or {elsewhere}",
    sqlite3.SQLITE_LOCKED: "is in use by another process; wait for that one, or {elsewhere}",
    sqlite3.SQLITE_FULL: "cannot grow: the disk is full; free space and run the command again (results are kept)",
    sqlite3.SQLITE_READONLY: "cannot be written ({error}), even to read a run; make its folder writable, or copy it",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened ({error}); the folder must be writable, even to read a run",
    sqlite3.SQLITE_PERM: "cannot be opened ({error}); the folder must be writable, even to read a run",
    sqlite3.SQLITE_IOERR: "cannot be read or written ({error}); is the disk full or gone? {elsewhere}",
    sqlite3.SQLITE_NOTADB: "is not a KL Lens journal ({error}); {elsewhere}",
}
_DAMAGED = "is damaged ({error}); restore it from a copy, or {elsewhere}"
# Bugs of the program, not damage of the file.
_OURS = (sqlite3.ProgrammingError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.NotSupportedError)
_ODD = (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)


@contextmanager
def journal_errors(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into a RunError that names the file and says what to do."""
    try:
        yield
    except _OURS:
        raise
    except (sqlite3.Error, UnicodeDecodeError) as error:  # UnicodeDecodeError: names of tables and columns
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the upper bits are extended codes
        reason = _REASONS.get(code, _DAMAGED).format(error=one_line(error), elsewhere=_ELSEWHERE)
        raise RunError(f"{path} {reason}") from error


Method = TypeVar("Method", bound=Callable[..., Any])


def _explained(method: Method) -> Method:
    @functools.wraps(method)
    def explained(self: Any, *arguments: Any) -> Any:
        with journal_errors(self.path):
            return method(self, *arguments)

    return explained  # type: ignore[return-value]


class _Cursor(sqlite3.Cursor):
    """Wraps reading too: damage may only show when rows are fetched."""

    @property
    def path(self) -> Path:
        return self.connection.path  # type: ignore[attr-defined]

    execute = _explained(sqlite3.Cursor.execute)
    executemany = _explained(sqlite3.Cursor.executemany)
    executescript = _explained(sqlite3.Cursor.executescript)
    fetchone = _explained(sqlite3.Cursor.fetchone)
    fetchall = _explained(sqlite3.Cursor.fetchall)
    __next__ = _explained(sqlite3.Cursor.__next__)


class Journal(sqlite3.Connection):
    """`with journal:` commits or rolls back, as in sqlite3."""

    def __init__(self, database: Any, *arguments: Any, **options: Any) -> None:
        self.path = Path(database)
        super().__init__(database, *arguments, **options)

    def cursor(self, *_: Any) -> _Cursor:  # type: ignore[override]
        return super().cursor(_Cursor)

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        return self.cursor().execute(*arguments)

    def executemany(self, *arguments: Any) -> sqlite3.Cursor:
        return self.cursor().executemany(*arguments)

    def executescript(self, *arguments: Any) -> sqlite3.Cursor:
        return self.cursor().executescript(*arguments)

    __exit__ = _explained(sqlite3.Connection.__exit__)

    def alone(self) -> Self:
        """`with journal.alone():` is a transaction in which no other process can write."""
        self.execute("BEGIN IMMEDIATE")
        return self


def checks_rows(method: Method) -> Method:
    """For readers of a run: a row that KL Lens cannot have stored is reported as damage."""

    @functools.wraps(method)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return method(self, *arguments, **options)
        except _ODD as error:
            reason = _DAMAGED.format(error=f"{type(error).__name__}: {one_line(error)}", elsewhere=_ELSEWHERE)
            raise RunError(f"{self.folder / FILE} {reason}") from error

    return checked  # type: ignore[return-value]
