"""The tables of a SQLite store and the steps from each version of them to the next.

Why these tables: an append is one new row at the end of ``batches`` and an entry in one
index, whatever the size of the copy; what is known of an open copy's length stands in its
last batch, so nothing that holds a large snapshot is rewritten per event.  A copy goes by
its row in ``copies``; its batches are removed little by little, listed in ``doomed``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.store import StoreError

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

__all__ = ["APPLICATION_ID", "MIGRATIONS", "migrate"]

APPLICATION_ID = 0x4C_57_52_44  # "LWRD"

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # AUTOINCREMENT: an id is never used again while batches of a gone copy are left.
        """CREATE TABLE copies (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            owner TEXT NOT NULL,
            response_id TEXT NOT NULL,
            created_at REAL NOT NULL,
            ended_at REAL,
            size INTEGER NOT NULL,  -- set when the copy ends
            meta BLOB NOT NULL,
            snapshot BLOB NOT NULL,
            UNIQUE (response_id, owner)
        )""",
        "CREATE INDEX copies_by_end ON copies (ended_at, id, size)",
        # upto: the block count after this batch; number: its last block's; total: the bytes
        # of all blocks up to here; data: the blocks in msgpack.
        """CREATE TABLE batches (
            copy INTEGER NOT NULL,
            upto INTEGER NOT NULL,
            number INTEGER NOT NULL,
            total INTEGER NOT NULL,
            data BLOB NOT NULL
        )""",
        "CREATE UNIQUE INDEX batches_by_copy ON batches (copy, upto, number)",
        """CREATE TABLE tombstones (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            owner TEXT NOT NULL,
            response_id TEXT NOT NULL,
            reason TEXT NOT NULL,
            at REAL NOT NULL,
            UNIQUE (response_id, owner)
        )""",
        "CREATE INDEX tombstones_by_age ON tombstones (at)",
        "CREATE TABLE doomed (copy INTEGER PRIMARY KEY)",
        f"PRAGMA application_id = {APPLICATION_ID}",
    ),
)


def migrate(
    connection: sqlite3.Connection,
    path: Path,
    steps: tuple[tuple[str, ...], ...] = MIGRATIONS,
) -> None:
    """Bring the tables to the newest version, each step whole or not at all."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if tables and application != APPLICATION_ID:
        raise StoreError(
            f"The database {path} belongs to another program: give the store a file of its own."
        )
    if version > len(steps):
        raise StoreError(
            f"The database {path} has schema version {version}, this lastword knows up to"
            f" {len(steps)}: run the newer lastword that wrote it, or move the file away to"
            " start with an empty one."
        )
    for number, step in enumerate(steps[version:], start=version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in step:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
