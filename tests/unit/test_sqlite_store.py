"""What only the SQLite store promises: its file, its crashes, its one writer."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from proxy.store import (
    Block,
    CopyKey,
    CopyLostError,
    Gone,
    Limits,
    StoreError,
    StoreUnavailableError,
    Tombstone,
)
from proxy.store.opening import open_store, owner_secret
from proxy.store.secret import SECRET_BYTES, load_secret
from proxy.store.sqlite import SqliteStore
from proxy.store.sqlite_file import DatabaseFile, require_wal
from proxy.store.sqlite_schema import APPLICATION_ID, MIGRATIONS, migrate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KIB = 1024
MIB = 1024 * KIB
KEY = CopyKey("a" * 64, "resp_1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the database lies."""
    return tmp_path / "copies.db"


@asynccontextmanager
async def opened(path: Path, limits: Limits | None = None) -> AsyncIterator[SqliteStore]:
    """Open a store and close it."""
    store = SqliteStore(path, limits)
    try:
        yield store
    finally:
        await store.aclose()


async def read(store: SqliteStore, key: CopyKey) -> list[Block]:
    """Read a whole copy."""
    return [block async for batch in store.read(key) for block in batch]


async def keep(store: SqliteStore, key: CopyKey, *raws: bytes) -> None:
    """Keep an open copy of these blocks, each appended by itself."""
    await store.create(key, meta=b"", snapshot=b"")
    for index, raw in enumerate(raws):
        await store.append(key, index, [Block(index, raw)])


def limit_pages(store: SqliteStore, more: int) -> None:
    """Make the disk full as SQLite sees it: ``more`` pages are left (0 undoes it)."""
    sql = store._connection.execute
    (pages,) = sql("PRAGMA page_count").fetchone()
    sql(f"PRAGMA max_page_count = {pages + more if more else 2**30}")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command; off the event loop by ``asyncio.to_thread``."""
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours


def damage(path: Path, start: int, size: int) -> None:
    """Overwrite a part of a file."""
    with path.open("r+b") as file:
        file.seek(start)
        file.write(os.urandom(size))


def count(path: Path, table: str) -> int:
    """Count the rows of a table in a closed store."""
    with closing(sqlite3.connect(path)) as connection:
        (rows,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608 - ours
        return int(rows)


# The file


async def test_files_are_private(path: Path) -> None:
    """The database, its log and its lock can be read by their owner alone, whatever the umask."""
    os.close(os.open(path, os.O_CREAT, 0o644))
    umask = os.umask(0)
    try:
        async with opened(path) as store:
            await keep(store, KEY, b"secret")
            owner_secret(f"sqlite:{path}")
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    finally:
        os.umask(umask)

    suffixes = ("", "-wal", "-shm", ".lock", ".secret")
    assert modes == {f"copies.db{suffix}": 0o600 for suffix in suffixes}


async def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    """A directory that is not there is made, for its owner alone."""
    path = tmp_path / "var" / "lastword" / "copies.db"
    async with opened(path) as store:
        await keep(store, KEY, b"x")

    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("place", ["file/copies.db", "directory", "/proc/lastword/copies.db"])
async def test_an_unusable_place_is_refused(tmp_path: Path, place: str) -> None:
    """Where no file can be written, the start is refused with the place and the remedy."""
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()

    with pytest.raises(StoreError, match=r"cannot be opened for writing.*may write to") as caught:
        SqliteStore(tmp_path / place)

    assert Path(place).name in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
async def test_an_unwritable_directory_is_refused(tmp_path: Path) -> None:
    """A directory without write permission is refused at start."""
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="cannot be opened for writing"):
        SqliteStore(tmp_path / "locked" / "copies.db")


async def test_a_second_opening_is_refused(path: Path) -> None:
    """One store at a time has the file, in this process or another; a closed one frees it."""
    program = (
        "import sys; from pathlib import Path; from proxy.store.sqlite import SqliteStore\n"
        "SqliteStore(Path(sys.argv[1]))"
    )
    async with opened(path) as store:
        with pytest.raises(StoreError, match=r"in use by another lastword.*copies\.db\.lock"):
            SqliteStore(path)
        second = await asyncio.to_thread(run, sys.executable, "-c", program, path)
        await keep(store, KEY, b"x")

    assert second.returncode == 1
    assert "in use by another lastword" in second.stderr
    async with opened(path) as store:
        assert await read(store, KEY) == [Block(0, b"x")]


def test_another_file_is_refused(path: Path) -> None:
    """What is no database is refused and left as it is; the refusal holds no lock."""
    path.write_bytes(b"dear diary, " * 1_000)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"is damaged.*move it away"):
            SqliteStore(path)

    assert path.read_bytes() == b"dear diary, " * 1_000


async def test_another_programs_database_is_refused(path: Path) -> None:
    """A database with tables that are not ours is refused and keeps its tables."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE diary (day TEXT)")
    with pytest.raises(StoreError, match="belongs to another program"):
        SqliteStore(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("diary",)]


@pytest.mark.parametrize("how", ["overwritten", "cut"])
async def test_a_damaged_file_is_refused(path: Path, how: str) -> None:
    """Damage is found at start, said in a sentence, and nothing is replaced."""
    async with opened(path) as store:
        await keep(store, KEY, *[b"x" * 10 * KIB] * 25)
    if how == "cut":
        os.truncate(path, 128 * KIB)
    else:
        damage(path, 100 * KIB, 64 * KIB)  # not what the start itself reads
    size = os.stat(path).st_size  # noqa: PTH116

    with pytest.raises(StoreError, match=r"is damaged .*put it back from a backup"):
        SqliteStore(path)

    assert os.stat(path).st_size == size  # noqa: PTH116


async def test_damage_found_after_the_check_is_refused(path: Path) -> None:
    """What the check overlooks and the start meets is refused all the same, the lock freed."""
    async with opened(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE doomed")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"is damaged .*no such table: doomed"):
            SqliteStore(path)


async def test_damage_in_use_is_told(path: Path) -> None:
    """Damage that shows only in use is an error of the call that meets it."""
    async with opened(path) as store:
        await keep(store, KEY, *[b"x" * 100 * KIB] * 5)
        store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        damage(path, 4 * KIB, 400 * KIB)

        with pytest.raises(StoreUnavailableError, match=r"copies\.db failed: "):
            await read(store, KEY)


async def test_a_newer_schema_is_refused(path: Path) -> None:
    """A file of a newer lastword is refused, with both versions named."""
    async with opened(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(StoreError, match=f"has schema version {len(MIGRATIONS) + 1}"):
        SqliteStore(path)


def test_migration_goes_step_by_step(path: Path) -> None:
    """An older file gets the missing steps, each once; one that fails leaves the last whole."""
    mark = f"PRAGMA application_id = {APPLICATION_ID}"
    first = ("CREATE TABLE one (a)", mark)
    second = ("ALTER TABLE one ADD COLUMN b", "CREATE TABLE two (a)")
    broken = ("CREATE TABLE three (a)", "CREATE TABLE two (a)")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, path, (first,))
        connection.execute("INSERT INTO one VALUES (1)")
        with pytest.raises(sqlite3.Error, match="already exists"):
            migrate(connection, path, (first, second, broken))
        migrate(connection, path, (first, second))

        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        assert connection.execute("SELECT a, b FROM one").fetchall() == [(1, None)]
        tables = connection.execute("SELECT name FROM sqlite_schema").fetchall()
        assert tables == [("one",), ("two",)]


def test_a_file_system_without_wal_is_refused(path: Path) -> None:
    """Where SQLite cannot keep a write-ahead log, the start is refused."""
    with (
        closing(sqlite3.connect(f"file:{path}?vfs=unix-dotfile", uri=True)) as connection,
        pytest.raises(StoreError, match=r"cannot keep a write-ahead log.*local disk"),
    ):
        require_wal(connection, path)


def test_a_refused_start_frees_the_file(path: Path) -> None:
    """After a refusal the lock is free."""
    path.write_bytes(b"no database")
    with pytest.raises(StoreError, match="damaged"):
        SqliteStore(path)
    path.unlink()

    DatabaseFile(path).release()


# Crashes


CRASHER = """
import asyncio, sys
from pathlib import Path
from proxy.store import Block, CopyKey
from proxy.store.sqlite import SqliteStore

async def write(store, name):
    key = CopyKey("a", name)
    await store.create(key, meta=b"m", snapshot=b"0")
    count = 0
    while True:
        size = 1 + count % 3
        blocks = [Block(n, b"%d" % n * 50) for n in range(count, count + size)]
        await store.append(key, count, blocks, snapshot=b"%d" % (count + size))
        count += size
        print(name, count, flush=True)

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await asyncio.gather(*(write(store, f"{sys.argv[2]}_{n}") for n in range(5)))

asyncio.run(main())
"""


async def test_kill_at_any_moment(path: Path) -> None:
    """After kill -9 every copy is a true prefix that holds all that was acknowledged."""
    acknowledged: dict[str, int] = {}
    for turn, lines in enumerate((3, 40, 77, 150, 311)):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CRASHER, str(path), f"run{turn}", stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        said = [await child.stdout.readline() for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
        said += (await child.stdout.read()).splitlines(keepends=True)
        await child.wait()
        for line in said:
            if line.endswith(b"\n"):  # the last may be cut
                name, blocks = line.decode().split()
                acknowledged[name] = int(blocks)

        async with opened(path) as store:
            found = {one.key.response_id: one for one in await store.open_copies()}
            assert set(acknowledged) <= set(found)
            for name, one in found.items():
                whole = await read(store, one.key)
                assert whole == [Block(n, b"%d" % n * 50) for n in range(one.blocks)]
                assert one.blocks >= acknowledged.get(name, 0)
                assert one.snapshot == b"%d" % one.blocks
            assert await store.size() == sum(one.size for one in found.values())


async def test_what_a_crash_left_to_purge_is_purged(path: Path) -> None:
    """Blocks of dropped copies that were not yet removed go after the next start."""
    async with opened(path) as store:
        store._tables.purge = lambda: None  # type: ignore[method-assign]
        await keep(store, KEY, *[b"x" * 100 * KIB] * 20)
        await store.drop(KEY, Gone.DELETED)
        store._tables._doomed = 0
    assert count(path, "batches") == 20

    async with opened(path) as store:
        # No call is made: the start alone sets the purge going.
        while store._tables.dirty:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert (count(path, "batches"), count(path, "doomed")) == (0, 0)


async def test_what_waits_for_its_purge_is_not_read(path: Path) -> None:
    """A reader gets nothing more of a dropped copy, though its blocks are still in the file."""
    async with opened(path) as store:
        await keep(store, KEY, b"a" * MIB, b"b" * MIB)
        purge, store._tables.purge = store._tables.purge, lambda: None  # type: ignore[method-assign]
        batches = store.read(KEY)
        await anext(batches)
        await store.drop(KEY, Gone.DELETED)

        assert [batch async for batch in batches] == []
        store._tables.purge = purge  # type: ignore[method-assign]


async def purged(store: SqliteStore) -> None:
    """Wait until nothing is left to purge."""
    while store._tables.dirty:
        await store.size()


async def test_a_dropped_copys_room_is_used_again(path: Path) -> None:
    """The file does not grow by copies that come and go, small or large."""
    async with opened(path) as store:
        sizes = []
        for turn in range(4):
            await keep(store, CopyKey("a", f"small_{turn}"), *[b"x" * 100] * 20)
            await keep(store, CopyKey("a", f"large_{turn}"), b"x" * 4 * MIB)
            for kind in ("small", "large"):
                await store.drop(CopyKey("a", f"{kind}_{turn}"), Gone.DELETED)
            await purged(store)
            (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
            sizes.append(pages)

    assert sizes[-1] <= sizes[1] * 1.1


# Errors while in use


async def test_a_full_disk_costs_only_the_copy_that_meets_it(path: Path) -> None:
    """On a full disk the copy being written is dropped whole; the store works on afterwards."""
    other = CopyKey("b", "other")
    async with opened(path) as store:
        await keep(store, other, b"kept")
        await keep(store, KEY, b"begun")
        limit_pages(store, 20)

        with pytest.raises(StoreUnavailableError, match="full"):
            await store.append(KEY, 1, [Block(1, b"x" * MIB)])

        found = await store.get(KEY)
        assert isinstance(found, Tombstone)
        assert found.reason is Gone.DROPPED
        assert await store.size() == len(b"kept")
        await store.append(other, 1, [Block(1, b"more")])
        with pytest.raises(CopyLostError):
            await store.append(KEY, 1, [Block(1, b"late")])

        limit_pages(store, 0)
        await keep(store, KEY, b"again", b"x" * MIB)
        assert await read(store, other) == [Block(0, b"kept"), Block(1, b"more")]
        assert await store.size() == len(b"keptmore") + len(b"again") + MIB


async def test_a_full_disk_fails_the_guilty_of_a_group_alone(path: Path) -> None:
    """Appends that share a commit with one too large for the disk are kept."""
    names = [CopyKey("a", f"resp_{number}") for number in range(20)]
    async with opened(path) as store:
        for name in names:
            await keep(store, name, b"0")
        limit_pages(store, 20)

        results = await asyncio.gather(
            *(
                store.append(name, 1, [Block(1, b"x" * MIB if index == 7 else b"1")])
                for index, name in enumerate(names)
            ),
            return_exceptions=True,
        )

        failures = [index for index, result in enumerate(results) if result is not None]
        assert failures == [7]
        for index, name in enumerate(names):
            whole = [] if index == 7 else [Block(0, b"0"), Block(1, b"1")]
            assert await read(store, name) == whole
        assert await store.size() == 2 * 19


async def test_a_drop_that_fails_is_made_up_for(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If not even the drop can be written, it is done with the next write that can.

    The copy counts as gone at once, whatever is left of it on the disk, and it is told of once.
    """
    async with opened(path) as store:
        await keep(store, KEY, b"begun")
        store._connection.execute("PRAGMA query_only = ON")
        with pytest.raises(StoreUnavailableError, match="readonly"):
            await store.append(KEY, 1, [Block(1, b"lost")])
        assert isinstance(await store.get(KEY), Tombstone)
        with pytest.raises(StoreUnavailableError, match="readonly"):
            await store.size()
        assert caplog.text.count("Copies to drop (1)") == 1
        store._connection.execute("PRAGMA query_only = OFF")

        with pytest.raises(CopyLostError):
            await store.append(KEY, 1, [Block(1, b"late")])

        assert isinstance(await store.get(KEY), Tombstone)
        assert await store.size() == 0


async def test_a_full_disk_is_a_store_that_is_away(path: Path) -> None:
    """What can still be read but takes nothing must not count as there."""
    async with opened(path) as store:
        await keep(store, KEY, b"begun")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = os.path.getsize(f"{path}-wal")  # noqa: ASYNC240, PTH202 - it takes no time
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            assert not isinstance(await store.get(KEY), Tombstone)
            with pytest.raises(StoreUnavailableError):
                await store.size()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert await store.size() > 0


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_is_removed_is_a_store_that_is_away(
    path: Path,
    replaced: bool,  # noqa: FBT001
) -> None:
    """SQLite would write on into nothing without a word."""
    async with opened(path) as store:
        await keep(store, KEY, b"begun")
        os.replace(path, f"{path}.moved")  # noqa: PTH105 - as short a call as there is
        if replaced:
            os.close(os.open(path, os.O_CREAT))
        with pytest.raises(StoreUnavailableError, match="removed or replaced while in use"):
            await store.size()
        os.replace(f"{path}.moved", path)  # noqa: PTH105 - as above
        assert await store.size() > 0


async def test_a_bug_in_a_job_reaches_its_caller_alone(path: Path) -> None:
    """Whatever a job raises goes to its caller; the thread and the other jobs go on."""
    async with opened(path) as store:
        await store.create(KEY, meta=b"", snapshot=b"")

        results = await asyncio.gather(
            store.append(KEY, 0, [Block(0, b"a")]),
            store.append(KEY, 1, ["no block"]),  # type: ignore[list-item]
            store.append(KEY, 1, [Block(1, b"b")]),
            return_exceptions=True,
        )

        assert [type(result) for result in results] == [type(None), AttributeError, type(None)]
        assert await read(store, KEY) == [Block(0, b"a"), Block(1, b"b")]


async def test_a_full_file_system(tmp_path: Path) -> None:
    """On a real file system without room: refused batches, then work again with room."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place)
    if (await asyncio.to_thread(run, *mount)).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        async with opened(place / "copies.db") as store:
            other = CopyKey("b", "other")
            await keep(store, other, b"kept")
            ballast = place / "ballast"
            with suppress(OSError), ballast.open("wb") as file:
                file.write(bytes(3 * MIB))
            await store.create(KEY, meta=b"", snapshot=b"")
            with pytest.raises(StoreUnavailableError, match=r"copies\.db failed"):
                await store.append(KEY, 0, [Block(0, b"x" * 3 * MIB)])
            ballast.unlink()
            await store.append(other, 1, [Block(1, b"more")])
            assert isinstance(await store.get(KEY), Tombstone)
        async with opened(place / "copies.db") as store:
            assert await read(store, other) == [Block(0, b"kept"), Block(1, b"more")]
            assert await store.open_copies() == [await store.get(other)]
    finally:
        await asyncio.to_thread(run, "umount", place)


# The write-ahead log, the queue


async def test_a_slow_reader_does_not_grow_the_log(path: Path) -> None:
    """A reader that waits between two batches lets the write-ahead log be emptied."""
    async with opened(path) as store:
        await keep(store, KEY, *[b"x" * MIB] * 3)
        batches = store.read(KEY)
        await anext(batches)
        for turn in range(5):
            name = CopyKey("a", f"resp_{turn}")
            await keep(store, name, b"x" * 10 * MIB)
            await store.drop(name, Gone.DELETED)
        await purged(store)
        log = store._file.wal_bytes()
        rest = [block async for batch in batches for block in batch]

    assert log <= 32 * MIB
    assert len(rest) == 2


async def test_a_foreign_reader_does_not_stop_the_store(path: Path) -> None:
    """A backup that holds a snapshot open makes the log grow, and nothing fail."""
    async with opened(path) as store:
        await keep(store, KEY, b"x" * MIB)
        with closing(sqlite3.connect(path)) as foreign:
            foreign.execute("BEGIN")
            foreign.execute("SELECT count(*) FROM batches").fetchone()
            for index in range(2):
                name = CopyKey("a", f"resp_{index}")
                await keep(store, name, b"x" * 10 * MIB)
            assert store._file.wal_bytes() > 16 * MIB
        for index in range(2):
            await keep(store, CopyKey("b", f"resp_{index}"), b"x" * 10 * MIB)

        assert store._file.wal_bytes() <= 32 * MIB


async def test_readers_without_a_pause_do_not_grow_the_log(path: Path) -> None:
    """Where some reader is always reading, the write-ahead log is emptied all the same."""
    done = threading.Event()

    def read_on() -> None:
        with closing(sqlite3.connect(path)) as one, closing(sqlite3.connect(path)) as two:
            for begins, ends in itertools.cycle([(one, two), (two, one)]):
                begins.execute("BEGIN")
                begins.execute("SELECT count(*) FROM copies").fetchone()
                ends.rollback()
                if done.is_set():
                    return

    async with opened(path) as store:
        reading = asyncio.ensure_future(asyncio.to_thread(read_on))
        try:
            for turn in range(6):
                name = CopyKey("a", f"resp_{turn}")
                await keep(store, name, b"x" * 8 * MIB)
                await store.drop(name, Gone.DELETED)
            await purged(store)
            log = store._file.wal_bytes()
        finally:
            done.set()
            await reading

    assert log <= 32 * MIB


async def test_more_calls_than_the_queue_holds(path: Path) -> None:
    """Callers beyond the queue's bound wait their turn; all are answered, in order."""
    async with opened(path) as store:
        await store.create(KEY, meta=b"", snapshot=b"")
        await asyncio.gather(
            *(store.append(KEY, index, [Block(index, b"x")]) for index in range(3_000))
        )
        assert [block.number for block in await read(store, KEY)] == list(range(3_000))


async def test_callers_that_wait_at_the_close_are_refused(path: Path) -> None:
    """What was in the queue is done, who waited for a place in it is told of the close."""
    store = SqliteStore(path)
    await store.create(KEY, meta=b"", snapshot=b"")
    appends = [
        asyncio.ensure_future(store.append(KEY, index, [Block(index, b"x")]))
        for index in range(3_000)
    ]
    await asyncio.sleep(0)
    await store.aclose()
    results = await asyncio.gather(*appends, return_exceptions=True)

    done = sum(result is None for result in results)
    assert 0 < done < 3_000
    assert {type(result) for result in results[done:]} == {StoreUnavailableError}
    async with opened(path) as store:
        assert len(await read(store, KEY)) == done


async def test_a_cancelled_close_still_closes(path: Path) -> None:
    """Who gives up waiting for the close does not stop it."""
    store = SqliteStore(path)
    await keep(store, KEY, b"x")
    closer = asyncio.ensure_future(store.aclose())
    await asyncio.sleep(0)
    closer.cancel()
    await asyncio.gather(closer, return_exceptions=True)
    await store.aclose()

    async with opened(path) as store:
        assert await read(store, KEY) == [Block(0, b"x")]
    assert not path.with_name("copies.db-wal").exists()


# The secret and the setting


def test_the_secret_stays(path: Path) -> None:
    """The secret is made once, of full length, and is the same after a restart."""
    secret = load_secret(path)

    assert len(secret) == SECRET_BYTES
    assert load_secret(path) == secret
    assert {file.name for file in path.parent.iterdir()} == {"copies.db.secret"}
    assert load_secret(None) != load_secret(None)


@pytest.mark.parametrize("size", [0, SECRET_BYTES - 1, SECRET_BYTES + 1])
def test_a_secret_of_a_wrong_size_is_refused(path: Path, size: int) -> None:
    """A secret that was cut or is another file is refused, not replaced."""
    load_secret(path)
    secret = path.with_name("copies.db.secret")
    secret.write_bytes(b"x" * size)
    with pytest.raises(StoreError, match=r"copies\.db\.secret does not hold exactly 32 bytes"):
        load_secret(path)
    assert secret.stat().st_size == size


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o666])
def test_a_secret_that_others_can_read_is_refused(path: Path, mode: int) -> None:
    """A secret that others may know keeps no secret."""
    load_secret(path)
    path.with_name("copies.db.secret").chmod(mode)
    with pytest.raises(StoreError, match=f"has mode 0{mode:o}.*chmod 600"):
        load_secret(path)


def test_a_secret_that_cannot_be_made(tmp_path: Path) -> None:
    """A place where nothing can be written is named."""
    with pytest.raises(StoreError, match=r"copies\.db\.secret cannot be made"):
        load_secret(tmp_path / "missing" / "copies.db")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        pytest.param("sqlite:", "unknown: use memory:, sqlite:PATH or redis://HOST", id="no path"),
        pytest.param("sqlite://data/copies.db", "reads like a host name", id="two slashes"),
        pytest.param("postgres:x", "unknown", id="another scheme"),
        pytest.param("memory:x", "unknown", id="memory with a path"),
        pytest.param("", "unknown", id="empty"),
    ],
)
def test_an_unknown_store_is_refused(url: str, says: str) -> None:
    """A setting that names no store is refused, with what would be one."""
    with pytest.raises(StoreError, match=says):
        open_store(url)


async def test_the_setting_names_the_file(tmp_path: Path) -> None:
    """One slash or three name an absolute path; the secret lies beside it."""
    for slashes in ("", "//"):
        url = f"sqlite:{slashes}{tmp_path / 'copies.db'}"
        store = open_store(url)
        assert (tmp_path / "copies.db").exists()
        assert owner_secret(url) == load_secret(tmp_path / "copies.db")
        await store.aclose()
