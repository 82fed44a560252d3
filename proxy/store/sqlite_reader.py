"""What is read from a SQLite store: short queries on connections that only read."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from proxy.store import Block, CopyInfo, CopyKey, Gone, StoreUnavailableError, Tombstone
from proxy.store.rows import decode_row
from proxy.store.sqlite_file import DatabaseFile, failed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Readers",
    "count_blocks",
    "find",
    "find_copies",
    "index_after",
    "is_known",
    "read_batch",
]

_T = TypeVar("_T")
_InfoRow: TypeAlias = tuple[
    str, str, bytes, bytes, float, float | None, int | None, int | None, int
]

_THREADS = 4
_READ_BYTES = 1024 * 1024

_INFO = """
    SELECT c.owner, c.response_id, c.meta, c.snapshot, c.created_at, c.ended_at,
        b.number, b.upto, coalesce(b.total, 0) + length(c.meta) + length(c.snapshot)
    FROM copies c LEFT JOIN batches b ON b.rowid =
        (SELECT rowid FROM batches WHERE copy = c.id ORDER BY upto DESC LIMIT 1)
"""


class Readers:
    """A few threads, each with a connection of its own."""

    def __init__(self, file: DatabaseFile) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="lastword-store-read")
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._closed = False

    async def run(self, query: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run a query in a thread; database errors become ``StoreUnavailableError``."""
        if self._closed:
            raise StoreUnavailableError(f"The store {self._file.path} is closed.")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(self._call, query))

    def refuse(self) -> None:
        """Take no query from now on."""
        self._closed = True

    def close(self) -> None:
        """Wait for the running queries and close the connections."""
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()

    def _call(self, query: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
            if connection is None:
                connection = self._local.connection = self._file.connect_reader()
                self._connections.append(connection)
            return query(connection)
        except sqlite3.Error as error:
            raise failed(self._file.path, error) from error


def find(connection: sqlite3.Connection, key: CopyKey) -> CopyInfo | Tombstone | None:
    """Tell what is known of a key, copy and tombstone as of the same moment."""
    connection.execute("BEGIN")
    try:
        for info in find_copies(connection, "c.owner = ? AND c.response_id = ?", _names(key)):
            return info
        row = connection.execute(
            "SELECT reason, at FROM tombstones WHERE owner = ? AND response_id = ?", _names(key)
        ).fetchone()
        return None if row is None else Tombstone(key, Gone(row[0]), row[1])
    finally:
        connection.execute("ROLLBACK")


def find_copies(
    connection: sqlite3.Connection, where: str, values: Sequence[object] = ()
) -> list[CopyInfo]:
    """List what is known of the copies that the clause names, oldest first."""
    rows = connection.execute(f"{_INFO} WHERE {where} ORDER BY c.id", tuple(values))
    return [_info(row) for row in rows]


def count_blocks(connection: sqlite3.Connection, key: CopyKey) -> tuple[int, int] | None:
    """Return the copy's id and its block count."""
    row: tuple[int, int] | None = connection.execute(
        "SELECT id, (SELECT coalesce(max(upto), 0) FROM batches WHERE copy = copies.id)"
        " FROM copies WHERE owner = ? AND response_id = ?",
        _names(key),
    ).fetchone()
    return row


def read_batch(connection: sqlite3.Connection, copy: int, start: int, end: int) -> list[Block]:
    """Return some blocks from ``start`` to before ``end``; none if the copy went away."""
    rows = connection.execute(
        "SELECT upto, data FROM batches WHERE copy = ?1 AND upto > ?2"
        " AND EXISTS (SELECT 1 FROM copies WHERE id = ?1) ORDER BY upto",
        (copy, start),
    )
    batch: list[Block] = []
    size = 0
    with closing(rows):  # and with it the snapshot that it reads from
        for upto, data in rows:
            size += len(data)
            if batch and size > _READ_BYTES:
                break
            blocks = decode_row(data)
            skipped = start - (upto - len(blocks))
            batch += blocks[max(0, skipped) :]
            if upto >= end:  # a copy ends where a row ends
                break
    return batch


def index_after(connection: sqlite3.Connection, key: CopyKey, number: int) -> int:
    """Return the index of the first block with a greater number."""
    found = count_blocks(connection, key)
    if found is None:
        return 0
    copy, count = found
    row = connection.execute(
        "SELECT b.upto, b.data FROM batches b WHERE b.rowid ="
        " (SELECT rowid FROM batches WHERE copy = ? AND number > ? ORDER BY upto LIMIT 1)",
        (copy, number),
    ).fetchone()
    if row is None:
        return count
    upto, data = row
    return int(upto) - sum(block.number > number for block in decode_row(data))


def is_known(connection: sqlite3.Connection, response_id: str) -> bool:
    """Tell whether any owner has a copy or a tombstone under this id."""
    (known,) = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM copies WHERE response_id = ?1)"
        " OR EXISTS (SELECT 1 FROM tombstones WHERE response_id = ?1)",
        (response_id,),
    ).fetchone()
    return bool(known)


def _names(key: CopyKey) -> tuple[str, str]:
    return key.owner, key.response_id


def _info(row: _InfoRow) -> CopyInfo:
    owner, response_id, meta, snapshot, created_at, ended_at, number, upto, size = row
    return CopyInfo(
        key=CopyKey(owner, response_id),
        meta=meta,
        snapshot=snapshot,
        created_at=created_at,
        ended_at=ended_at,
        last_number=-1 if number is None else number,
        blocks=upto or 0,
        size=size,
    )
