"""What the writer does to the tables: each method runs inside one of its transactions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.store import (
    Block,
    CopyInfo,
    CopyKey,
    CopyLostError,
    Gone,
    Limits,
    StoreFullError,
    Tombstone,
)
from proxy.store.room import check_copy_room, check_store_room
from proxy.store.rows import encode_row, rows
from proxy.store.sqlite_reader import find_copies

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

__all__ = ["DEFAULT_MAX_BYTES", "Tables"]

DEFAULT_MAX_BYTES = 1024 * 1024 * 1024
_EXPIRED_AT_ONCE = 256
_PURGED_ROWS = 256
_PURGED_BYTES = 4 * 1024 * 1024

_ROW_COST = 4_096
"""What a row writes beside its bytes: a page of the index."""


@dataclass(slots=True)
class _Open:
    """What an append must know of its copy; read from the tables when first asked for."""

    id: int
    blocks: int
    total: int
    meta: int
    snapshot: int

    @property
    def size(self) -> int:
        return self.total + self.meta + self.snapshot


class Tables:
    """The tables with their limits and their sums."""

    def __init__(
        self, connection: sqlite3.Connection, limits: Limits, clock: Callable[[], float]
    ) -> None:
        self._sql = connection.execute
        self._connection = connection
        self._limits = limits
        self._max_bytes = (
            DEFAULT_MAX_BYTES if limits.max_store_bytes is None else limits.max_store_bytes
        )
        self._clock = clock
        self._open: dict[CopyKey, _Open] = {}
        self.written = 0
        """About how much was written since the caller last set it to zero."""
        self.reload()

    def probe(self) -> int:
        """Write what changes nothing, and return the bytes of all copies."""
        (version,) = self._sql("PRAGMA user_version").fetchone()
        self._sql(f"PRAGMA user_version = {version}")
        return self.size

    def reload(self) -> None:
        """Take the sums from the tables: at start and after a rollback."""
        self._open.clear()
        (self._ended_size,) = self._sql(
            "SELECT coalesce(sum(size), 0) FROM copies WHERE ended_at IS NOT NULL"
        ).fetchone()
        (open_size,) = self._sql(
            "SELECT coalesce(sum(length(meta) + length(snapshot) + coalesce((SELECT total"
            " FROM batches WHERE copy = copies.id ORDER BY upto DESC LIMIT 1), 0)), 0)"
            " FROM copies WHERE ended_at IS NULL"
        ).fetchone()
        self.size: int = self._ended_size + open_size
        (self._stones,) = self._sql("SELECT count(*) FROM tombstones").fetchone()
        (self._doomed,) = self._sql("SELECT count(*) FROM doomed").fetchone()

    @property
    def dirty(self) -> bool:
        """Whether blocks of copies that are gone wait for ``purge``."""
        return bool(self._doomed)

    def create(self, key: CopyKey, meta: bytes, snapshot: bytes) -> CopyInfo | None:
        """Make an open copy, or return the one that is there."""
        names = key.owner, key.response_id
        for info in find_copies(self._connection, "c.owner = ? AND c.response_id = ?", names):
            return info
        size = len(meta) + len(snapshot)
        self._make_room(0, size)
        self._stones -= self._sql(
            "DELETE FROM tombstones WHERE owner = ? AND response_id = ?", names
        ).rowcount
        made = self._sql(
            "INSERT INTO copies (owner, response_id, created_at, size, meta, snapshot)"
            " VALUES (?, ?, ?, 0, ?, ?)",
            (*names, self._clock(), meta, snapshot),
        )
        self._open[key] = _Open(made.lastrowid or 0, 0, 0, len(meta), len(snapshot))
        self.size += size
        self.written += size + _ROW_COST
        return None

    def append(
        self, key: CopyKey, after: int, blocks: Sequence[Block], snapshot: bytes | None
    ) -> None:
        """Add blocks behind the ``after`` blocks that the copy holds."""
        copy = self._writable(key)
        if after != copy.blocks:
            raise CopyLostError(
                f"The copy of {key.response_id} holds {copy.blocks} blocks, not {after}:"
                " its writer lost its place and must stop writing."
            )
        self._grow(key, copy, sum(len(block.raw) for block in blocks), snapshot)
        for row, size in rows(blocks):
            copy.blocks += len(row)
            copy.total += size
            self._sql(
                "INSERT INTO batches (copy, upto, number, total, data) VALUES (?, ?, ?, ?, ?)",
                (copy.id, copy.blocks, row[-1].number, copy.total, encode_row(row)),
            )
            self.written += size + _ROW_COST

    def end(self, key: CopyKey, snapshot: bytes | None) -> None:
        """Mark the copy as ended now; the first end stands."""
        if key not in self._open and self._has_ended(key):
            return
        copy = self._writable(key)
        self._grow(key, copy, 0, snapshot)
        self._sql(
            "UPDATE copies SET ended_at = ?, size = ? WHERE id = ?",
            (self._clock(), copy.size, copy.id),
        )
        self._ended_size += copy.size
        del self._open[key]

    def drop(self, key: CopyKey, reason: Gone) -> bool:
        """Remove a copy and leave a tombstone; its blocks wait for ``purge``."""
        row = self._sql(
            "SELECT id, ended_at, size FROM copies WHERE owner = ? AND response_id = ?",
            (key.owner, key.response_id),
        ).fetchone()
        if row is None:
            return False
        copy, ended_at, size = row
        if ended_at is None:
            self._remove(key, copy, self._writable(key).size, reason)
        else:
            self._ended_size -= size
            self._remove(key, copy, size, reason)
        return True

    def expire(self) -> tuple[list[Tombstone], bool]:
        """Remove some of what has outlived its time; tell which copies, and if that was all."""
        now = self._clock()
        gone = [
            self._remove_ended(row, Gone.EXPIRED)
            for row in self._oldest(now - self._limits.copy_ttl_s, _EXPIRED_AT_ONCE)
        ]
        stones = self._sql(
            "DELETE FROM tombstones WHERE id IN"
            " (SELECT id FROM tombstones WHERE at <= ? ORDER BY at LIMIT ?)",
            (now - self._limits.tombstone_ttl_s, _EXPIRED_AT_ONCE),
        ).rowcount
        self._stones -= stones
        return gone, max(len(gone), stones) < _EXPIRED_AT_ONCE

    def purge(self) -> None:
        """Remove some blocks of a copy that is gone."""
        row = self._sql("SELECT copy FROM doomed LIMIT 1").fetchone()
        if row is None:
            self._doomed = 0
            return
        (copy,) = row
        rows = self._sql(
            "SELECT upto, total FROM batches WHERE copy = ? ORDER BY upto LIMIT ?",
            (copy, _PURGED_ROWS),
        ).fetchall()
        if not rows:
            self._doomed -= self._sql("DELETE FROM doomed WHERE copy = ?", (copy,)).rowcount
            return
        upto, first = rows[0]
        upto = max([upto, *(row[0] for row in rows if row[1] - first <= _PURGED_BYTES)])
        self._sql("DELETE FROM batches WHERE copy = ? AND upto <= ?", (copy, upto))

    def _has_ended(self, key: CopyKey) -> bool:
        row = self._sql(
            "SELECT ended_at FROM copies WHERE owner = ? AND response_id = ?",
            (key.owner, key.response_id),
        ).fetchone()
        return row is not None and row[0] is not None

    def _writable(self, key: CopyKey) -> _Open:
        copy = self._open.get(key)
        if copy is not None:
            return copy
        row = self._sql(
            "SELECT c.id, coalesce(b.upto, 0), coalesce(b.total, 0), length(c.meta),"
            " length(c.snapshot) FROM copies c LEFT JOIN batches b ON b.rowid ="
            " (SELECT rowid FROM batches WHERE copy = c.id ORDER BY upto DESC LIMIT 1)"
            " WHERE c.owner = ? AND c.response_id = ? AND c.ended_at IS NULL",
            (key.owner, key.response_id),
        ).fetchone()
        if row is None:
            what = "has ended" if self._has_ended(key) else "is not there"
            raise CopyLostError(
                f"The copy of {key.response_id} {what}: its writer must stop writing."
            )
        copy = self._open[key] = _Open(*row)
        return copy

    def _grow(self, key: CopyKey, copy: _Open, added: int, snapshot: bytes | None) -> None:
        """Find room for new blocks and a new snapshot, or drop the copy and say so."""
        if snapshot is not None:
            added += len(snapshot) - copy.snapshot
        try:
            self._make_room(copy.size, added)
        except StoreFullError:
            self._remove(key, copy.id, copy.size, Gone.DROPPED)
            raise
        if snapshot is not None:
            self._sql("UPDATE copies SET snapshot = ? WHERE id = ?", (snapshot, copy.id))
            copy.snapshot = len(snapshot)
            self.written += len(snapshot) + _ROW_COST
        self.size += added

    def _make_room(self, held: int, added: int) -> None:
        """Evict ended copies until ``added`` bytes fit to a copy that holds ``held`` of them."""
        check_copy_room(held + added, self._limits.max_copy_bytes)
        check_store_room(self.size + added, self._max_bytes, ended_size=self._ended_size)
        while self.size + added > self._max_bytes:
            self._remove_ended(self._oldest(None, 1)[0], Gone.EVICTED)

    def _oldest(self, until: float | None, limit: int) -> list[tuple[int, str, str, int]]:
        """List ended copies, the one that ended first before the others."""
        return self._sql(
            "SELECT id, owner, response_id, size FROM copies WHERE ended_at IS NOT NULL"
            " AND (?1 IS NULL OR ended_at <= ?1) ORDER BY ended_at, id LIMIT ?2",
            (until, limit),
        ).fetchall()

    def _remove_ended(self, row: tuple[int, str, str, int], reason: Gone) -> Tombstone:
        copy, owner, response_id, size = row
        self._ended_size -= size
        return self._remove(CopyKey(owner, response_id), copy, size, reason)

    def _remove(self, key: CopyKey, copy: int, size: int, reason: Gone) -> Tombstone:
        self._sql("DELETE FROM copies WHERE id = ?", (copy,))
        self._sql("INSERT INTO doomed VALUES (?)", (copy,))
        self._doomed += 1
        self._open.pop(key, None)
        self.size -= size
        stone = Tombstone(key, reason, self._clock())
        self._sql(
            "INSERT INTO tombstones (owner, response_id, reason, at) VALUES (?, ?, ?, ?)",
            (key.owner, key.response_id, reason, stone.at),
        )
        self._stones += 1
        if self._stones > self._limits.max_tombstones:
            self._stones -= self._sql(
                "DELETE FROM tombstones WHERE id IN"
                " (SELECT id FROM tombstones ORDER BY id LIMIT ?)",
                (self._stones - self._limits.max_tombstones,),
            ).rowcount
        return stone
