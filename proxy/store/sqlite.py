"""Copies in one SQLite file: they survive restarts, for one process at a time."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from functools import partial
from typing import TYPE_CHECKING

from proxy.store import Block, CopyInfo, CopyKey, Gone, Limits, Tombstone
from proxy.store.sqlite_file import DatabaseFile, damaged, failed
from proxy.store.sqlite_reader import (
    Readers,
    count_blocks,
    find,
    find_copies,
    index_after,
    is_known,
    read_batch,
)
from proxy.store.sqlite_tables import Tables
from proxy.store.sqlite_writer import GroupWriter

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from pathlib import Path

__all__ = ["GROUP_S", "SqliteStore"]

GROUP_S = 0.010
"""Appends wait so long for others to share their commit, under load up to 100 ms."""

_WAL_CHECK_BYTES = 1024 * 1024
_WAL_BYTES = 16 * 1024 * 1024
"""Beyond it the write-ahead log is emptied at once, waiting for the readers of the moment."""


class SqliteStore:
    """A store in the file ``path``, made if absent; used from one event loop.

    Raises ``StoreError`` if the file cannot be used: in use, damaged, of a newer version,
    not writable, on a file system without a write-ahead log.
    """

    def __init__(
        self,
        path: Path,
        limits: Limits | None = None,
        *,
        clock: Callable[[], float] = time.time,
        group_s: float = GROUP_S,
    ) -> None:
        self._file = DatabaseFile(path)
        try:
            self._connection = self._file.connect_writer()
        except BaseException:
            self._file.release()
            raise
        try:
            self._tables = Tables(self._connection, limits or Limits(), clock)
        except sqlite3.Error as error:
            self._connection.close()
            self._file.release()
            raise damaged(path, str(error)) from error
        self._readers = Readers(self._file)
        self._wal_limit = _WAL_BYTES
        self._clock = clock
        self._closing: asyncio.Future[None] | None = None
        self._writer = GroupWriter(
            self._connection,
            reload=self._tables.reload,
            mend=partial(self._tables.drop, reason=Gone.DROPPED),
            upkeep=self._upkeep,
            failed=partial(failed, path),
            group_s=group_s,
        )
        self._writer.start()

    async def create(self, key: CopyKey, *, meta: bytes, snapshot: bytes) -> CopyInfo | None:
        """Make an empty, open copy, or return the one that is there."""
        return await self._writer.run(partial(self._tables.create, key, meta, snapshot))

    async def append(
        self, key: CopyKey, after: int, blocks: Sequence[Block], *, snapshot: bytes | None = None
    ) -> None:
        """Add blocks behind the ``after`` blocks that the copy holds; return once committed."""
        work = partial(self._tables.append, key, after, tuple(blocks), snapshot)
        await self._writer.run(work, key=key, blocks=len(blocks))

    async def end(self, key: CopyKey, *, snapshot: bytes | None = None) -> None:
        """Mark the copy as ended now; the first end stands."""
        await self._writer.run(partial(self._tables.end, key, snapshot), key=key)

    async def get(self, key: CopyKey) -> CopyInfo | Tombstone | None:
        """Tell what is known of a key."""
        if key in self._writer.holed:  # dropped, as soon as the disk takes that down
            return Tombstone(key, Gone.DROPPED, self._clock())
        return await self._readers.run(partial(find, key=key))

    async def known(self, response_id: str) -> bool:
        """Tell whether any owner has or had a copy under this id."""
        return await self._readers.run(partial(is_known, response_id=response_id))

    async def read(self, key: CopyKey, start: int = 0) -> AsyncGenerator[Sequence[Block], None]:
        """Yield the blocks from ``start`` on, in batches of at most 1 MiB or one block."""
        found = await self._readers.run(partial(count_blocks, key=key))
        if found is None:
            return
        copy, end = found
        while start < end:
            batch = await self._readers.run(partial(read_batch, copy=copy, start=start, end=end))
            if not batch:
                return
            start += len(batch)
            yield batch

    async def index_after(self, key: CopyKey, number: int) -> int:
        """Tell the index of the first block with a greater number."""
        return await self._readers.run(partial(index_after, key=key, number=number))

    async def drop(self, key: CopyKey, reason: Gone) -> bool:
        """Remove a copy whole and leave a tombstone."""
        return await self._writer.run(partial(self._tables.drop, key, reason))

    async def open_copies(self) -> Sequence[CopyInfo]:
        """List the copies that have not ended."""
        return await self._readers.run(partial(find_copies, where="c.ended_at IS NULL"))

    async def expire(self) -> Sequence[Tombstone]:
        """Remove what has outlived its time, some at a time so that appends get their turn."""
        gone: list[Tombstone] = []
        done = False
        while not done:
            some, done = await self._writer.run(self._tables.expire)
            gone += some
        return gone

    async def size(self) -> int:
        """Tell the bytes of all copies together; fails where the file takes no reads or writes."""
        await asyncio.to_thread(self._file.check_in_place)  # a disk may hang
        await self._readers.run(_look)
        return await self._writer.run(self._tables.probe)

    async def aclose(self) -> None:
        """Commit what waits, empty the write-ahead log, let go of the file."""
        if self._closing is None:
            self._readers.refuse()
            self._writer.stop()
            self._closing = asyncio.get_running_loop().run_in_executor(None, self._close)
        await asyncio.shield(self._closing)

    def _close(self) -> None:
        self._writer.join()
        try:
            self._readers.close()
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise failed(self._file.path, error) from error
        finally:
            self._connection.close()
            self._file.release()

    def _upkeep(self) -> bool:
        """Remove some of what is gone, keep the write-ahead log short; in the writer's thread."""
        if self._tables.dirty:
            self._writer.transact([self._tables.purge])
        if self._tables.written < _WAL_CHECK_BYTES:
            return self._tables.dirty
        self._tables.written = 0
        size = self._file.wal_bytes()
        if size > self._wal_limit:
            (blocked, _, _) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            # A foreign reader that stays must not cost every commit a wait.
            self._wal_limit = size + _WAL_BYTES if blocked else _WAL_BYTES
        return self._tables.dirty


def _look(connection: sqlite3.Connection) -> None:
    """Read something."""
    connection.execute("SELECT 1 FROM copies LIMIT 1").fetchone()
