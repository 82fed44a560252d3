"""The contract that every store keeps: one suite, each store, a clock that tests turn."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from proxy.store import (
    Block,
    CopyInfo,
    CopyKey,
    CopyLostError,
    Gone,
    Limits,
    Store,
    StoreFullError,
    StoreUnavailableError,
    Tombstone,
)
from proxy.store.opening import open_store
from proxy.store.redis import RedisStore
from tests.redis_server import RedisServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MIB = 1024 * 1024
KEY = CopyKey("a" * 64, "resp_1")


@dataclass
class Clock:
    """A clock that stands until a test turns it."""

    now: float = 1_000.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


@dataclass
class House:
    """Opens stores of one kind, all on the same place, and closes them after the test."""

    url: str
    prefix: str
    clock: Clock = field(default_factory=Clock)
    stores: list[Store] = field(default_factory=list)

    def open(self, limits: Limits | None = None) -> Store:
        """Open the store."""
        store = open_store(self.url, limits, clock=self.clock, prefix=self.prefix)
        self.stores.append(store)
        return store

    async def reopen(self) -> Store:
        """Close the last store and open it again, as a restart does."""
        await self.stores[-1].aclose()
        return self.open()


@pytest.fixture(params=["memory", "sqlite", "redis", "valkey"])
async def house(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[House]:
    """Each kind of store; those on a server share it and have a key prefix each."""
    urls = {"memory": "memory:", "sqlite": f"sqlite:{tmp_path / 'copies.db'}"}
    server: RedisServer | None = None
    if request.param not in urls:
        server = request.getfixturevalue(f"{request.param}_server")
        assert isinstance(server, RedisServer)
        urls[request.param] = server.url
    house = House(urls[request.param], prefix=f"{uuid.uuid4().hex}:")
    yield house
    for store in house.stores:
        await store.aclose()
    if server is not None:
        server.ask("FLUSHALL")  # some tests leave 100 MB


@pytest.fixture
def store(house: House) -> Store:
    """Open a store with the limits that it has by itself."""
    return house.open()


def key(name: str, owner: str = "a") -> CopyKey:
    """Name a copy."""
    return CopyKey(owner * 64, name)


def blocks(*numbers: int, size: int = 0) -> list[Block]:
    """Make blocks with these numbers, each of ``size`` bytes if given."""
    return [
        Block(number, f"data: {number}\n\n".encode().ljust(size, b".")[: size or None])
        for number in numbers
    ]


async def read(store: Store, key: CopyKey, start: int = 0) -> list[Block]:
    """Read a copy from an index on."""
    return [block async for batch in store.read(key, start) for block in batch]


async def info(store: Store, key: CopyKey) -> CopyInfo:
    """Get what is known of a copy that must be there."""
    found = await store.get(key)
    assert isinstance(found, CopyInfo)
    return found


async def reason(store: Store, key: CopyKey) -> Gone | None:
    """Get why a copy is gone; None if it is not or never was there."""
    found = await store.get(key)
    return found.reason if isinstance(found, Tombstone) else None


async def keep(store: Store, key: CopyKey, size: int, *, ended: bool = True) -> None:
    """Keep a copy of exactly ``size`` bytes."""
    await store.create(key, meta=b"", snapshot=b"")
    await store.append(key, 0, [Block(0, b"x" * size)])
    if ended:
        await store.end(key)


# Creating, appending, ending


async def test_create_makes_an_empty_open_copy(house: House, store: Store) -> None:
    """A new copy holds what it was made with, no blocks, and is open."""
    assert await store.create(KEY, meta=b"m", snapshot=b"{}") is None

    assert await store.get(KEY) == CopyInfo(
        key=KEY,
        meta=b"m",
        snapshot=b"{}",
        created_at=house.clock.now,
        ended_at=None,
        last_number=-1,
        blocks=0,
        size=3,
    )
    assert await read(store, KEY) == []


@pytest.mark.parametrize("ended", [pytest.param(False, id="open"), pytest.param(True, id="ended")])
async def test_create_returns_the_copy_that_is_there(store: Store, *, ended: bool) -> None:
    """A second create changes nothing and returns what the first one has become."""
    await store.create(KEY, meta=b"first", snapshot=b"{}")
    await store.append(KEY, 0, blocks(0, 1))
    if ended:
        await store.end(KEY)
    before = await info(store, KEY)

    assert await store.create(KEY, meta=b"second", snapshot=b"[]") == before
    assert await info(store, KEY) == before


async def test_unknown_key(store: Store) -> None:
    """Of a key that was never here nothing is known, and reading it ends at once."""
    assert await store.get(KEY) is None
    assert await read(store, KEY) == []
    assert await store.index_after(KEY, 5) == 0
    assert await store.drop(KEY, Gone.DELETED) is False


async def test_append_keeps_order_and_bytes(store: Store) -> None:
    """Blocks come back as they went in, one by one or many at once, any byte in them."""
    await store.create(KEY, meta=b"", snapshot=b"")
    every_byte = Block(3, bytes(range(256)))
    await store.append(KEY, 0, blocks(-1, 0))
    await store.append(KEY, 2, blocks(1, 1, 2))
    await store.append(KEY, 5, [every_byte])

    assert await read(store, KEY) == [*blocks(-1, 0, 1, 1, 2), every_byte]
    found = await info(store, KEY)
    assert (found.blocks, found.last_number) == (6, 3)
    assert found.size == sum(len(block.raw) for block in await read(store, KEY))


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_append_after_a_wrong_count_is_refused(store: Store, after: int) -> None:
    """A batch that does not continue the copy changes nothing; the right one still does."""
    await store.create(KEY, meta=b"", snapshot=b"")
    await store.append(KEY, 0, blocks(0, 1))

    with pytest.raises(CopyLostError, match="holds 2 blocks"):
        await store.append(KEY, after, blocks(2))

    await store.append(KEY, 2, blocks(2))
    assert await read(store, KEY) == blocks(0, 1, 2)


async def test_append_and_end_need_a_copy(store: Store) -> None:
    """Writing to a copy that is not there, or no longer, is refused."""
    with pytest.raises(CopyLostError, match="not there"):
        await store.append(KEY, 0, blocks(0))
    with pytest.raises(CopyLostError, match="not there"):
        await store.end(KEY)
    await keep(store, KEY, 10, ended=False)
    await store.drop(KEY, Gone.DELETED)
    with pytest.raises(CopyLostError, match="not there"):
        await store.append(KEY, 1, blocks(1))
    with pytest.raises(CopyLostError, match="not there"):
        await store.end(KEY)


async def test_append_after_the_end_is_refused(store: Store) -> None:
    """An ended copy does not change."""
    await store.create(KEY, meta=b"", snapshot=b"")
    await store.append(KEY, 0, blocks(0))
    await store.end(KEY)

    with pytest.raises(CopyLostError, match="has ended"):
        await store.append(KEY, 1, blocks(1))

    assert await read(store, KEY) == blocks(0)


async def test_snapshot_updates(store: Store) -> None:
    """The snapshot is the last one given, with blocks, without any, or at the end."""
    await store.create(KEY, meta=b"m", snapshot=b"1")
    await store.append(KEY, 0, blocks(0), snapshot=b"22")
    assert (await info(store, KEY)).snapshot == b"22"
    await store.append(KEY, 1, [], snapshot=b"")
    assert (await info(store, KEY)).snapshot == b""
    await store.append(KEY, 1, blocks(1))
    assert (await info(store, KEY)).snapshot == b""
    await store.end(KEY, snapshot=b"333")
    assert (await info(store, KEY)).snapshot == b"333"
    assert (await info(store, KEY)).meta == b"m"


async def test_the_first_end_stands(house: House, store: Store) -> None:
    """Ending twice is harmless and changes neither time nor snapshot."""
    await store.create(KEY, meta=b"", snapshot=b"")
    await store.end(KEY, snapshot=b"first")
    house.clock.now += 50

    await store.end(KEY, snapshot=b"second")

    found = await info(store, KEY)
    assert (found.ended_at, found.snapshot) == (1_000.0, b"first")


async def test_owners_are_apart(store: Store) -> None:
    """One id under two owners is two copies; what happens to one leaves the other alone."""
    mine, theirs = key("resp_1", "a"), key("resp_1", "b")
    await store.create(mine, meta=b"mine", snapshot=b"")
    assert await store.get(theirs) is None
    await store.create(theirs, meta=b"theirs", snapshot=b"")
    await store.append(mine, 0, blocks(0))
    await store.append(theirs, 0, blocks(7, 8))

    await store.drop(mine, Gone.DELETED)

    assert await reason(store, mine) is Gone.DELETED
    assert await read(store, theirs) == blocks(7, 8)


# Reading


@pytest.mark.parametrize("batch", [1, 3, 7])
async def test_read_from_every_index(store: Store, batch: int) -> None:
    """Reading from any index gives exactly the rest, however the blocks were appended."""
    whole = blocks(*range(7))
    await store.create(KEY, meta=b"", snapshot=b"")
    for start in range(0, 7, batch):
        await store.append(KEY, start, whole[start : start + batch])

    for start in range(9):
        assert await read(store, KEY, start) == whole[start:]


async def test_index_after(store: Store) -> None:
    """Blocks may share a number; the index is that of the first one that is greater."""
    await store.create(KEY, meta=b"", snapshot=b"")
    assert await store.index_after(KEY, -1) == 0
    await store.append(KEY, 0, blocks(-1, 0, 0))
    await store.append(KEY, 3, blocks(0, 1, 1, 4, 4))

    expected = {-100: 0, -2: 0, -1: 1, 0: 4, 1: 6, 2: 6, 3: 6, 4: 8, 5: 8, 10**12: 8}
    assert {n: await store.index_after(KEY, n) for n in expected} == expected


async def test_batches_are_short(store: Store) -> None:
    """A batch holds at most 1 MiB, or one block that is larger."""
    whole = [
        *blocks(*range(20), size=300_000),
        *blocks(20, size=2 * MIB),
        *blocks(21, 22, size=10),
    ]
    await store.create(KEY, meta=b"", snapshot=b"")
    await store.append(KEY, 0, whole)

    batches = [batch async for batch in store.read(KEY)]

    assert [block for batch in batches for block in batch] == whole
    assert all(
        len(batch) == 1 or sum(len(block.raw) for block in batch) <= MIB for batch in batches
    )
    assert len(batches) < len(whole)


async def test_read_goes_to_the_end_of_its_beginning(store: Store) -> None:
    """What is appended while somebody reads is for the next read."""
    await store.create(KEY, meta=b"", snapshot=b"")
    whole = [*blocks(0, size=MIB), *blocks(1, 2)]
    await store.append(KEY, 0, whole)

    async with aclosing(store.read(KEY)) as batches:
        got = list(await anext(batches))
        await store.append(KEY, 3, blocks(3))
        got += [block async for batch in batches for block in batch]

    assert got == whole
    assert await read(store, KEY, len(got)) == blocks(3)


async def test_a_reader_stops_and_goes_on(store: Store) -> None:
    """A reader that stops half-way holds nothing up and goes on where it was."""
    await store.create(KEY, meta=b"", snapshot=b"")
    await store.append(KEY, 0, blocks(*range(5), size=MIB))

    async with aclosing(store.read(KEY)) as batches:
        first = list(await anext(batches))
    await store.append(KEY, 5, blocks(5, size=10))
    await store.end(KEY)

    assert first + await read(store, KEY, len(first)) == [
        *blocks(*range(5), size=MIB),
        *blocks(5, size=10),
    ]


async def test_a_copy_that_goes_ends_its_readers(store: Store) -> None:
    """Once a copy is gone, its readers get no more, not even of a new copy of that name."""
    await store.create(KEY, meta=b"", snapshot=b"")
    await store.append(KEY, 0, blocks(0, 1, 2, size=MIB))

    async with aclosing(store.read(KEY)) as batches:
        await anext(batches)
        await store.drop(KEY, Gone.DELETED)
        await store.create(KEY, meta=b"", snapshot=b"")
        await store.append(KEY, 0, blocks(7, 8, 9, size=MIB))
        rest = [batch async for batch in batches]

    assert rest == []


async def test_big_blocks(store: Store) -> None:
    """Blocks of 16 MiB are kept like others."""
    whole = [Block(0, b"a"), Block(1, bytes(16 * MIB)), Block(2, b"b" * 16 * MIB), Block(3, b"c")]
    await store.create(KEY, meta=b"", snapshot=b"")
    await store.append(KEY, 0, whole)
    await store.end(KEY, snapshot=b"s" * 16 * MIB)

    assert await read(store, KEY) == whole
    assert await read(store, KEY, 2) == whole[2:]
    assert await store.index_after(KEY, 1) == 2
    assert await store.size() == 48 * MIB + 2


async def test_ten_thousand_blocks(store: Store) -> None:
    """A long copy comes back whole, and its every part by number."""
    whole = blocks(*range(10_000), size=250)
    await store.create(KEY, meta=b"", snapshot=b"")
    for start in range(0, 10_000, 1_000):
        await store.append(KEY, start, whole[start : start + 1_000])
    await store.end(KEY)

    assert await read(store, KEY) == whole
    for number in (0, 999, 1_000, 5_432, 9_998, 9_999):
        assert await store.index_after(KEY, number) == number + 1
        assert await read(store, KEY, number + 1) == whole[number + 1 :]


async def test_fifty_writers_at_once(store: Store) -> None:
    """Writers to different copies do not get in each other's way, nor do readers."""

    async def write(name: CopyKey) -> None:
        await store.create(name, meta=b"", snapshot=b"")
        for number in range(40):
            await store.append(name, number, blocks(number))
            if number % 8 == 0:
                assert await read(store, name) == blocks(*range(number + 1))
        await store.end(name)

    names = [key(f"resp_{number}") for number in range(50)]
    await asyncio.gather(*map(write, names))

    for name in names:
        assert await read(store, name) == blocks(*range(40))
    assert await store.open_copies() == []


async def test_a_cancelled_append_is_done_or_not(store: Store) -> None:
    """A caller that is cancelled leaves a batch kept whole or not at all, the store at work."""
    await store.create(KEY, meta=b"", snapshot=b"")
    append = asyncio.ensure_future(store.append(KEY, 0, blocks(0, 1)))
    await asyncio.sleep(0)
    append.cancel()
    await asyncio.gather(append, return_exceptions=True)
    await store.create(key("other"), meta=b"", snapshot=b"")

    count = (await info(store, KEY)).blocks
    assert count in {0, 2}
    await store.append(KEY, count, blocks(2))
    assert await read(store, KEY) == [*blocks(0, 1)[:count], *blocks(2)]


# Going away


@pytest.mark.parametrize("why", list(Gone))
async def test_drop_leaves_a_tombstone(house: House, store: Store, why: Gone) -> None:
    """A dropped copy is gone whole; whose it was and why it went stays."""
    await keep(store, KEY, 10)
    house.clock.now += 5

    assert await store.drop(KEY, why) is True

    assert await store.get(KEY) == Tombstone(KEY, why, 1_005.0)
    assert await read(store, KEY) == []
    assert await store.index_after(KEY, 0) == 0
    assert await store.size() == 0


async def test_a_tombstone_keeps_its_reason(store: Store) -> None:
    """Dropping what is gone already changes nothing."""
    await keep(store, KEY, 10, ended=False)
    await store.drop(KEY, Gone.DROPPED)

    assert await store.drop(KEY, Gone.DELETED) is False
    assert await reason(store, KEY) is Gone.DROPPED


async def test_create_removes_a_tombstone(store: Store) -> None:
    """A key may be used again after its copy went; nothing of the old copy comes back."""
    await keep(store, KEY, 10)
    await store.drop(KEY, Gone.EXPIRED)

    assert await store.create(KEY, meta=b"new", snapshot=b"") is None
    await store.append(KEY, 0, blocks(5))

    assert await read(store, KEY) == blocks(5)
    await store.drop(KEY, Gone.DELETED)
    assert await reason(store, KEY) is Gone.DELETED


async def test_copies_expire_after_their_end(house: House) -> None:
    """The time runs from the end; open copies never expire."""
    store = house.open(Limits(copy_ttl_s=100))
    await keep(store, key("early"), 10)
    await keep(store, key("late"), 20, ended=False)
    await keep(store, key("open"), 30, ended=False)
    house.clock.now += 60
    await store.end(key("late"))
    house.clock.now += 39.9
    assert await store.expire() == []

    house.clock.now += 0.1
    assert await store.expire() == [Tombstone(key("early"), Gone.EXPIRED, 1_100.0)]
    assert await store.expire() == []
    house.clock.now += 1_000
    assert [stone.key for stone in await store.expire()] == [key("late")]

    assert await reason(store, key("early")) is Gone.EXPIRED
    assert (await info(store, key("open"))).size == 30
    assert await store.size() == 30


async def test_many_copies_expire_at_once(house: House) -> None:
    """All that is late goes in one call, however much it is."""
    store = house.open(Limits(copy_ttl_s=100, tombstone_ttl_s=100))
    names = [key(f"resp_{number}") for number in range(600)]
    await asyncio.gather(*(keep(store, name, 10) for name in names))
    house.clock.now += 100

    assert {stone.key for stone in await store.expire()} == set(names)
    assert await store.size() == 0
    house.clock.now += 100
    assert await store.expire() == []
    assert [await store.get(name) for name in names] == [None] * 600


async def test_tombstones_expire(house: House) -> None:
    """A tombstone stays for its time, then nothing is known of the key."""
    store = house.open(Limits(tombstone_ttl_s=100))
    await keep(store, KEY, 10)
    await store.drop(KEY, Gone.DELETED)
    house.clock.now += 99
    assert await store.expire() == []
    assert await reason(store, KEY) is Gone.DELETED

    house.clock.now += 1
    assert await store.expire() == []
    assert await store.get(KEY) is None


async def test_tombstones_are_bounded(house: House) -> None:
    """Beyond their number the oldest tombstones go."""
    store = house.open(Limits(max_tombstones=3))
    for number in range(5):
        await keep(store, key(f"resp_{number}"), 10)
        await store.drop(key(f"resp_{number}"), Gone.DELETED)
        house.clock.now += 1
    await store.create(key("resp_3"), meta=b"", snapshot=b"")
    await keep(store, key("resp_5"), 10)
    await store.drop(key("resp_5"), Gone.DELETED)

    left = [name for name in range(6) if await reason(store, key(f"resp_{name}"))]
    assert left == [2, 4, 5]


# Limits


async def test_room_is_made_by_evicting_what_ended_first(house: House) -> None:
    """Whole ended copies go, by the time of their end, no more of them than needed."""
    store = house.open(Limits(max_store_bytes=100))
    await keep(store, key("second"), 20, ended=False)
    await keep(store, key("open"), 20, ended=False)
    await keep(store, key("first"), 20)
    house.clock.now += 1
    await store.end(key("second"))
    house.clock.now += 1
    await keep(store, key("third"), 20)
    await store.create(KEY, meta=b"", snapshot=b"")
    await store.append(KEY, 0, blocks(0, size=20))
    assert await store.size() == 100

    await store.append(KEY, 1, blocks(1, size=1))
    assert await reason(store, key("first")) is Gone.EVICTED
    assert await store.size() == 81
    await store.append(KEY, 2, blocks(2, size=59))

    assert await reason(store, key("second")) is Gone.EVICTED
    assert await reason(store, key("third")) is Gone.EVICTED
    assert await read(store, KEY) == [
        *blocks(0, size=20),
        *blocks(1, size=1),
        *blocks(2, size=59),
    ]
    assert (await info(store, key("open"))).blocks == 1
    assert await store.size() == 100


async def test_creating_evicts_too(house: House) -> None:
    """Meta and snapshot count, and make room for themselves."""
    store = house.open(Limits(max_store_bytes=100))
    await keep(store, key("old"), 95)

    await store.create(KEY, meta=b"123", snapshot=b"456")

    assert await reason(store, key("old")) is Gone.EVICTED
    assert await store.size() == 6


async def test_a_full_store_drops_the_copy_being_written(house: House) -> None:
    """If ended copies do not make room, the writer's copy goes and they stay."""
    store = house.open(Limits(max_store_bytes=100))
    await keep(store, key("ended"), 30)
    await keep(store, key("open"), 50, ended=False)
    await keep(store, KEY, 10, ended=False)

    with pytest.raises(StoreFullError, match="max_store_bytes"):
        await store.append(KEY, 1, blocks(1, size=41))

    assert await reason(store, KEY) is Gone.DROPPED
    assert await store.size() == 80
    assert (await info(store, key("ended"))).size == 30
    with pytest.raises(CopyLostError):
        await store.append(KEY, 1, blocks(1))
    await store.append(key("open"), 1, blocks(1, size=20))


async def test_what_is_gone_makes_no_room(house: House) -> None:
    """A copy that was dropped or has expired is not counted on when room is needed."""
    store = house.open(Limits(max_store_bytes=100, copy_ttl_s=10))
    await keep(store, key("expired"), 60)
    house.clock.now += 10
    await store.expire()
    await keep(store, key("dropped"), 60)
    await store.drop(key("dropped"), Gone.DELETED)
    await keep(store, key("evicted"), 60)
    await keep(store, key("open"), 50, ended=False)
    await keep(store, KEY, 10, ended=False)

    with pytest.raises(StoreFullError, match="max_store_bytes"):
        await store.append(KEY, 1, blocks(1, size=41))

    assert await store.size() == 50


async def test_a_full_store_makes_no_copy(house: House) -> None:
    """A copy for which no room can be made is not made; no other is evicted for it."""
    store = house.open(Limits(max_store_bytes=100))
    await keep(store, key("open"), 50, ended=False)
    await keep(store, key("ended"), 40)

    with pytest.raises(StoreFullError, match="max_store_bytes"):
        await store.create(KEY, meta=b"", snapshot=b"x" * 51)

    assert await store.get(KEY) is None
    assert await store.size() == 90


@pytest.mark.parametrize("how", ["blocks", "snapshot", "end"])
async def test_a_copy_beyond_its_limit_is_dropped(house: House, how: str) -> None:
    """A copy may fill its limit; one byte more, of whatever, drops it whole."""
    store = house.open(Limits(max_copy_bytes=100))
    await store.create(KEY, meta=b"1", snapshot=b"2")
    await store.append(KEY, 0, blocks(0, size=98))

    calls = {
        "blocks": lambda: store.append(KEY, 1, [Block(1, b".")]),
        "snapshot": lambda: store.append(KEY, 1, [], snapshot=b"22"),
        "end": lambda: store.end(KEY, snapshot=b"22"),
    }
    with pytest.raises(StoreFullError, match="max_copy_bytes"):
        await calls[how]()

    assert await reason(store, KEY) is Gone.DROPPED
    assert await store.size() == 0
    assert await store.open_copies() == []


async def test_size_is_exact(house: House) -> None:
    """After whatever happened, the size is the sum over the copies that are there."""
    store = house.open(Limits(copy_ttl_s=10, max_copy_bytes=500, max_store_bytes=1_000))
    names = [key(f"resp_{number}") for number in range(8)]
    for number, name in enumerate(names):
        await store.create(name, meta=b"m" * number, snapshot=b"s")
        await store.append(name, 0, blocks(0, 1, size=30), snapshot=b"s" * number)
        await store.append(name, 2, blocks(2))
    await store.end(names[0], snapshot=b"end")
    await store.end(names[1])
    house.clock.now += 10
    await store.expire()
    await store.end(names[2], snapshot=b"")
    await store.drop(names[3], Gone.DELETED)
    with pytest.raises(StoreFullError):
        await store.append(names[4], 3, blocks(3, size=500))
    await store.append(names[5], 3, blocks(3, size=350))
    await store.append(names[6], 3, blocks(3, size=350))
    await store.end(names[6])

    found = [await store.get(name) for name in names]
    assert [isinstance(one, CopyInfo) for one in found] == [False] * 5 + [True] * 3
    assert await store.size() == sum(one.size for one in found if isinstance(one, CopyInfo))


# Restart and close


async def test_open_copies(house: House, store: Store) -> None:
    """Those that have not ended are listed, oldest first."""
    for number in range(4):
        await keep(store, key(f"resp_{number}"), 10 + number, ended=number == 1)
        house.clock.now += 1
    await store.drop(key("resp_2"), Gone.DELETED)

    found = await store.open_copies()

    assert found == [await info(store, key("resp_0")), await info(store, key("resp_3"))]


async def test_a_restart_keeps_everything(house: House, store: Store) -> None:
    """What was there is there again, open copies can be written on; memory starts empty."""
    await store.create(KEY, meta=b"m", snapshot=b"s")
    await store.append(KEY, 0, blocks(0, 1, 1))
    await keep(store, key("ended"), 10)
    await keep(store, key("gone"), 10)
    await store.drop(key("gone"), Gone.EVICTED)
    before = [await info(store, KEY), await info(store, key("ended"))]

    store = await house.reopen()

    if house.url == "memory:":
        assert await store.get(KEY) is None
        assert await store.size() == 0
        return
    assert [await info(store, KEY), await info(store, key("ended"))] == before
    assert await reason(store, key("gone")) is Gone.EVICTED
    assert await store.open_copies() == before[:1]
    assert await store.size() == sum(one.size for one in before)
    if isinstance(store, RedisStore):
        taken = await store.take(KEY)
        assert taken is not None
        assert taken.info == before[0]
    with pytest.raises(CopyLostError):
        await store.append(KEY, 2, blocks(2))
    await store.append(KEY, 3, blocks(2))
    assert await read(store, KEY) == blocks(0, 1, 1, 2)


async def test_closing_is_repeatable(store: Store) -> None:
    """Closing again, also at the same time, is harmless."""
    await keep(store, KEY, 10)
    await asyncio.gather(store.aclose(), store.aclose())
    await store.aclose()


async def test_closing_finishes_what_waits(house: House, store: Store) -> None:
    """Calls made before the close are answered: done, or refused as closed."""
    names = [key(f"resp_{number}") for number in range(50)]
    pending = [asyncio.ensure_future(store.create(name, meta=b"", snapshot=b"")) for name in names]
    await asyncio.sleep(0)
    await store.aclose()

    assert await asyncio.gather(*pending) == [None] * 50
    if house.url != "memory:":
        store = await house.reopen()
        assert len(await store.open_copies()) == 50


@pytest.mark.parametrize(
    "method",
    ["create", "append", "end", "get", "read", "index_after", "drop", "open", "expire", "size"],
)
async def test_use_after_close(store: Store, method: str) -> None:
    """A closed store says so, whatever it is asked."""
    await keep(store, KEY, 10)
    await keep(store, key("open"), 10, ended=False)
    await store.aclose()
    calls = {
        "create": lambda: store.create(KEY, meta=b"", snapshot=b""),
        "append": lambda: store.append(key("open"), 1, blocks(1)),
        "end": lambda: store.end(KEY),
        "get": lambda: store.get(KEY),
        "read": lambda: read(store, KEY),
        "index_after": lambda: store.index_after(KEY, 0),
        "drop": lambda: store.drop(KEY, Gone.DELETED),
        "open": store.open_copies,
        "expire": store.expire,
        "size": store.size,
    }

    with pytest.raises(StoreUnavailableError, match="closed"):
        await calls[method]()


async def test_close_in_the_middle_of_a_read(store: Store) -> None:
    """A reader that is half-way when the store closes is told, not left with a short copy."""
    await store.create(KEY, meta=b"", snapshot=b"")
    await store.append(KEY, 0, blocks(0, 1, size=MIB))
    async with aclosing(store.read(KEY)) as batches:
        await anext(batches)
        await store.aclose()
        with pytest.raises(StoreUnavailableError, match="closed"):
            await anext(batches)


async def test_an_id_is_known_as_long_as_anything_of_it_is_left(house: House) -> None:
    """Whoever's it is: a copy or a tombstone makes an id known, and nothing else does."""
    store = house.open(Limits(tombstone_ttl_s=100))
    assert not await store.known("resp_1")
    for owner in "ab":
        await keep(store, key("resp_1", owner), 1)
    await store.drop(key("resp_1", "a"), Gone.DELETED)
    await keep(store, key("resp_1", "a"), 1)  # again, over its tombstone
    for owner in "ab":
        assert await store.known("resp_1")
        await store.drop(key("resp_1", owner), Gone.DELETED)
    assert await store.known("resp_1")
    assert not await store.known("resp_2")

    house.clock.now += 101
    await store.expire()

    assert not await store.known("resp_1")
