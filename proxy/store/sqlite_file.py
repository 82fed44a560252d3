"""The database file: who may open it, and whether it is fit to be opened."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from proxy.store import StoreError, StoreUnavailableError
from proxy.store.sqlite_schema import migrate

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DatabaseFile", "damaged", "failed", "require_wal"]

_MAGIC = b"SQLite format 3\x00"
_CHECKED_BYTES = 64 * 1024 * 1024
"""A larger file is not read through at start; damage in it shows when it is read."""
_BUSY_S = 1.0
"""Only a foreign program (a backup, a shell) ever makes us wait."""
_WAL_KEPT_BYTES = 4 * 1024 * 1024


def failed(path: Path, error: sqlite3.Error) -> StoreUnavailableError:
    """Say that the database failed while in use."""
    return StoreUnavailableError(
        f"The database {path} failed: {error}. Look at the disk (space, errors, permissions)."
    )


class DatabaseFile:
    """A database that this process alone has open, from construction to ``release``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._wal = path.with_name(path.name + "-wal")
        self._lock: int | None = None
        self._identity: tuple[int, int] | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(path)
            self._make_private()
            self._check()
            self._identity = self._look()
        except OSError as error:
            self.release()
            raise StoreError(
                f"The database {path} cannot be opened for writing ({error.filename or path}:"
                f" {error.strerror}): give the store a directory that lastword may write to."
            ) from error
        except BaseException:
            self.release()
            raise

    def connect_writer(self) -> sqlite3.Connection:
        """Open the one connection that writes; the tables are brought up to date."""
        connection = self._connect()
        try:
            require_wal(connection, self.path)
            # A crash of the process loses nothing that was committed, one of the machine at
            # most the last commits; FULL costs one disk flush per commit.
            connection.execute("PRAGMA synchronous = NORMAL")
            # What was deleted is overwritten where that costs no extra write.
            connection.execute("PRAGMA secure_delete = FAST")
            connection.execute(f"PRAGMA journal_size_limit = {_WAL_KEPT_BYTES}")
            migrate(connection, self.path)
        except sqlite3.Error as error:
            connection.close()
            raise StoreError(
                f"The database {self.path} cannot be opened: {error}. Look at the disk, or move"
                " the file away to start with an empty one."
            ) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def connect_reader(self) -> sqlite3.Connection:
        """Open a connection that only reads."""
        connection = self._connect()
        connection.execute("PRAGMA query_only = ON")
        return connection

    def check_in_place(self) -> None:
        """Raise ``StoreUnavailableError`` if the path leads to this database no longer.

        SQLite writes on into a file that was removed, and all of it is gone with the process.
        """
        try:
            found = self._look()
        except FileNotFoundError:
            found = None
        if found != self._identity:
            raise StoreUnavailableError(
                f"The database {self.path} was removed or replaced while in use: what is kept from"
                " now on will be lost. Restart lastword."
            )

    def _look(self) -> tuple[int, int]:
        status = self.path.stat()
        return status.st_dev, status.st_ino

    def wal_bytes(self) -> int:
        """Tell how large the write-ahead log is."""
        try:
            return self._wal.stat().st_size
        except FileNotFoundError:
            return 0

    def release(self) -> None:
        """Let another process open the database; harmless when repeated."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _connect(self) -> sqlite3.Connection:
        # isolation_level None: no transaction begins unasked.  A connection is made in one
        # thread and closed in another, never used by two at once.
        return sqlite3.connect(
            self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )

    def _make_private(self) -> None:
        """Have mode 0600 before SQLite writes a byte; its -wal and -shm take the same mode."""
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        for suffix in ("", "-wal", "-shm"):
            path = self.path.with_name(self.path.name + suffix)
            if path.exists():
                path.chmod(0o600)

    def _check(self) -> None:
        """Refuse a damaged file; it is never replaced.

        Here, before any connection is there, the file may be opened directly: closing it
        later would take SQLite's own locks away.
        """
        with self.path.open("rb") as file:
            head = file.read(len(_MAGIC))
            size = os.fstat(file.fileno()).st_size
        if not size:
            return
        try:
            if head != _MAGIC:
                raise damaged(self.path, "it does not start like a SQLite database")
            with closing(self._connect()) as connection:
                connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
                if size <= _CHECKED_BYTES:
                    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                    if verdict != "ok":
                        raise damaged(self.path, verdict)
        except sqlite3.Error as error:
            raise damaged(self.path, str(error)) from error


def require_wal(connection: sqlite3.Connection, path: Path) -> None:
    """Turn on the write-ahead log, or refuse the file system."""
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise StoreError(
            f"The file system of {path} cannot keep a write-ahead log (SQLite answers {mode!r}),"
            " as is usual for network file systems: put the database on a local disk."
        )


def _lock(path: Path) -> int:
    """Take the lock that lasts as long as the process: a crash frees it."""
    lock_path = path.with_name(path.name + ".lock")
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreError(
            f"The database {path} is in use by another lastword (it holds {lock_path}): stop"
            " that one, or give each its own file."
        ) from error
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"The file {lock_path} cannot be locked ({error.strerror}), as is usual for network"
            " file systems: put the database on a local disk."
        ) from error
    return descriptor


def damaged(path: Path, detail: str) -> StoreError:
    """Say that the database cannot be opened as it is."""
    detail = " ".join(detail.split())
    return StoreError(
        f"The database {path} is damaged ({detail}): put it back from a backup, or move it away"
        " to start with an empty one. It was not replaced."
    )
