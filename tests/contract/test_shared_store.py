"""What a store offers that several processes use: some on one server, with a test's clock."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import pytest

from proxy.store import (
    Block,
    CopyInfo,
    CopyKey,
    CopyLostError,
    Gone,
    Limits,
    StoreFullError,
    Tombstone,
    redis,
    redis_tail,
)
from proxy.store.redis import RedisStore
from proxy.store.shared import Claimed, LeaseLostError
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE_S, Signal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

KEY = CopyKey("a" * 64, "resp_1")
LEASE_S = 10.0


class Replica:
    """One process's store, and what it has heard."""

    def __init__(self, server: RedisServer, prefix: str, limits: Limits, lease_s: float) -> None:
        self.now = 1_000.0
        self.store = RedisStore(
            server.url, limits, prefix=prefix, lease_s=lease_s, clock=lambda: self.now
        )
        self.signal = Signal()
        self.lost: list[CopyKey] = []
        self.cancels: list[CopyKey] = []
        self.orphans_heard = 0

    def lease_lost(self, key: CopyKey) -> None:
        """Hear that another has taken a copy."""
        self.lost.append(key)
        self.signal.notify()

    def cancel_asked(self, key: CopyKey) -> None:
        """Hear that a run shall be cancelled."""
        self.cancels.append(key)
        self.signal.notify()

    def orphaned(self) -> None:
        """Hear that a copy was given back."""
        self.orphans_heard += 1
        self.signal.notify()


class Ear:
    """A watcher that keeps what it is told."""

    def __init__(self, signal: Signal) -> None:
        self.blocks: list[Block] = []
        self.end: int | str | None = None
        self._signal = signal

    def grown(self, blocks: Sequence[Block]) -> None:
        """Take the next blocks."""
        assert self.end is None
        self.blocks += blocks
        self._signal.notify()

    def finished(self, blocks: int) -> None:
        """Take the end."""
        self.end = blocks
        self._signal.notify()

    def gone(self) -> None:
        """Take that the copy is gone."""
        self.end = "gone"
        self._signal.notify()

    def out_of_touch(self) -> None:
        """Take that nothing more is to be expected."""
        self.end = "out of touch"
        self._signal.notify()


class House:
    """Replicas that share one server."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self._prefix = f"{uuid.uuid4().hex}:"
        self._replicas: list[Replica] = []

    async def replica(
        self, limits: Limits | None = None, *, lease_s: float = LEASE_S, started: bool = True
    ) -> Replica:
        """Start one more."""
        replica = Replica(self.server, self._prefix, limits or Limits(), lease_s)
        self._replicas.append(replica)
        if started:
            await replica.store.start(replica)
        return replica

    def turn(self, seconds: float) -> None:
        """Let time pass for all."""
        for replica in self._replicas:
            replica.now += seconds

    def delete(self, pattern: str) -> None:
        """Remove keys behind the stores' backs, as an eviction does."""
        script = "for _, k in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', k) end"
        assert self.server.ask("EVAL", script, "0", self._prefix + pattern).startswith(b"$-1")

    def add(self, stream: str, entry_id: str, *fields: str) -> None:
        """Write an entry into a stream behind the stores' backs."""
        assert self.server.ask("XADD", self._prefix + stream, entry_id, *fields).startswith(b"$")

    async def aclose(self) -> None:
        """Close all of them."""
        for replica in self._replicas:
            await replica.store.aclose()


@pytest.fixture(params=["redis", "valkey"])
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    """Give each kind of server."""
    server = request.getfixturevalue(f"{request.param}_server")
    assert isinstance(server, RedisServer)
    house = House(server)
    yield house
    await house.aclose()


def blocks(*numbers: int) -> list[Block]:
    """Make blocks with these numbers."""
    return [Block(number, f"data: {number}\n\n".encode()) for number in numbers]


async def read(store: RedisStore, key: CopyKey = KEY) -> list[Block]:
    """Read a copy."""
    return [block async for batch in store.read(key) for block in batch]


async def until(signal: Signal, condition: object) -> None:
    """Wait until something was heard."""
    assert callable(condition)
    async with asyncio.timeout(PATIENCE_S):
        await signal.until(condition)


# Leases


async def test_only_the_holder_writes(house: House) -> None:
    """Another process can neither append to an open copy, nor end it, nor take or drop it."""
    a, b = await house.replica(), await house.replica()
    await a.store.create(KEY, meta=b"m", snapshot=b"s")
    await a.store.append(KEY, 0, blocks(0))

    for write in (b.store.append(KEY, 1, blocks(1)), b.store.end(KEY)):
        with pytest.raises(LeaseLostError):
            await write
    assert await b.store.take(KEY) is None

    await a.store.append(KEY, 1, blocks(1))
    await a.store.end(KEY)
    assert await read(b.store) == blocks(0, 1)


async def test_a_lease_that_ran_out_is_taken_once(house: House) -> None:
    """Of many takers one wins; what the old writer still sends is refused and changes nothing."""
    a = await house.replica()
    others = [await house.replica() for _ in range(3)]
    await a.store.create(KEY, meta=b"m", snapshot=b"s")
    await a.store.append(KEY, 0, blocks(0, 1))
    house.turn(LEASE_S - 0.1)
    assert await others[0].store.take(KEY) is None
    house.turn(0.2)

    taken = await asyncio.gather(*(other.store.take(KEY) for other in others))

    (won,) = [place for place, one in enumerate(taken) if one is not None]
    b = others[won]
    first = taken[won]
    assert first is not None
    assert (first.info.blocks, first.info.last_number, first.cancelled) == (2, 1, False)
    await b.store.append(KEY, 2, blocks(2))
    for write in (a.store.append(KEY, 2, blocks(9)), a.store.append(KEY, 3, blocks(9))):
        with pytest.raises(LeaseLostError):
            await write
    assert a.lost == [KEY]
    assert await a.store.drop(KEY, Gone.DROPPED) is False
    await b.store.end(KEY)
    assert await read(a.store) == blocks(0, 1, 2)


async def test_a_stale_writer_drops_nothing(house: House) -> None:
    """A writer that has lost its lease without knowing cannot remove the copy of the next one."""
    a, b = await house.replica(), await house.replica()
    await a.store.create(KEY, meta=b"", snapshot=b"")
    house.turn(LEASE_S + 1)
    assert await b.store.take(KEY) is not None

    assert await a.store.drop(KEY, Gone.DROPPED) is False

    await b.store.append(KEY, 0, blocks(0))


async def test_leases_are_renewed(house: House) -> None:
    """A process that lives keeps its leases, however long its runs take; a lost one is told of."""
    a, b = await house.replica(), await house.replica()
    other = CopyKey("b" * 64, "resp_2")
    await a.store.create(KEY, meta=b"", snapshot=b"")
    await a.store.create(other, meta=b"", snapshot=b"")
    for _ in range(3):
        house.turn(LEASE_S - 1)
        await a.store._leases.renew()
        assert await b.store.take(KEY) is None
    house.turn(LEASE_S + 1)
    assert await b.store.take(KEY) is not None

    await a.store._leases.renew()

    assert a.lost == [KEY]
    await a.store.append(other, 0, blocks(0))


async def test_what_is_given_back_is_an_orphan_at_once(house: House) -> None:
    """A process that stops gives its open copies back, and the others hear of it."""
    a, b = await house.replica(), await house.replica()
    await a.store.create(KEY, meta=b"m", snapshot=b"s")
    await a.store.append(KEY, 0, blocks(0))
    assert await b.store.orphans() == []

    await a.store.aclose()

    await until(b.signal, lambda: b.orphans_heard)
    assert await b.store.orphans() == [KEY]
    assert await b.store.take(KEY) is not None
    assert await b.store.orphans() == []
    await b.store.append(KEY, 1, blocks(1))


async def test_orphans_are_left_alone_until_their_writers_could_renew(house: House) -> None:
    """After the server was away, nobody takes what nobody had a chance to keep."""
    a, b = await house.replica(), await house.replica(lease_s=0.2)
    await a.store.create(KEY, meta=b"", snapshot=b"")
    house.turn(LEASE_S + 1)
    b.store._link.went_down(OSError("away"))
    b.store._link.came_up()
    assert await b.store.orphans() == []

    async with asyncio.timeout(PATIENCE_S):
        while not (found := await b.store.orphans()):  # noqa: ASYNC110 -- of the real clock
            await asyncio.sleep(0.05)
    assert found == [KEY]


async def test_an_append_that_is_sent_twice_is_kept_once(house: House) -> None:
    """The answer to a batch may be lost: sent again, the same batch is known."""
    a = await house.replica()
    await a.store.create(KEY, meta=b"", snapshot=b"")
    sent: list[object] = []
    run = a.store._writer.run

    async def twice(call: object, **how: object) -> object:
        sent.append(await run(call, **how))  # type: ignore[arg-type]
        return await run(call, **how)  # type: ignore[arg-type]

    a.store._writer.run = twice  # type: ignore[method-assign]
    await a.store.append(KEY, 0, blocks(0, 1))
    await a.store.append(KEY, 2, blocks(2))
    await a.store.end(KEY)

    assert sent == [[b"done"]] * 3
    assert await read(a.store) == blocks(0, 1, 2)


# Claims


async def test_a_key_is_claimed_once(house: House) -> None:
    """Of several that want to make the same copy one may; the others hear with what it began."""
    a, b = await house.replica(), await house.replica()
    assert await a.store.claim(KEY, "digest a") is None
    assert await b.store.claim(KEY, "digest b") == Claimed("digest a")

    await a.store.create(KEY, meta=b"", snapshot=b"")

    assert await b.store.claim(KEY, "digest b") == Claimed(None)


async def test_a_claim_is_let_go_of(house: House) -> None:
    """When no copy comes of it, the next one may try; only the claimer can let go."""
    a, b = await house.replica(), await house.replica()
    await a.store.claim(KEY, "digest")
    await b.store.unclaim(KEY)
    assert await b.store.claim(KEY, "digest") == Claimed("digest")
    await a.store.unclaim(KEY)
    assert await b.store.claim(KEY, "digest") is None
    await b.store.aclose()
    assert await a.store.claim(KEY, "digest") is None


async def test_a_claim_dies_with_its_process(house: House) -> None:
    """A claim that is not renewed runs out by itself; one that is renewed does not."""
    dead = await house.replica(lease_s=1.0, started=False)
    alive = await house.replica(lease_s=1.0)
    other = CopyKey("b" * 64, "resp_2")
    await dead.store.claim(KEY, "digest")
    await alive.store.claim(other, "digest")
    async with asyncio.timeout(PATIENCE_S):
        while await alive.store.claim(KEY, "digest") is not None:  # noqa: ASYNC110 -- real time
            await asyncio.sleep(0.02)
    assert await dead.store.claim(other, "digest") == Claimed("digest")


# Watching


async def test_a_watcher_hears_every_block_once_and_the_end(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process appends comes as it comes: no gap, no repeat, then the end.

    The read that every watcher shares is woken when one joins: it would else block for a minute.
    """
    monkeypatch.setattr(redis_tail, "_BLOCK_S", 60.0)
    a, b = await house.replica(), await house.replica()
    await a.store.create(KEY, meta=b"", snapshot=b"")
    await a.store.append(KEY, 0, blocks(0, 1))
    late, early = Ear(b.signal), Ear(b.signal)
    b.store.watch(KEY, 2, late)
    other = CopyKey("b" * 64, "resp_2")
    await a.store.create(other, meta=b"", snapshot=b"")
    b.store.watch(other, 0, early)
    for number in range(2, 6):
        await a.store.append(KEY, number, blocks(number))
        await until(b.signal, lambda number=number: len(late.blocks) == number - 1)
    await a.store.append(other, 0, blocks(*range(300)))
    await a.store.end(KEY)
    await a.store.end(other)

    await until(b.signal, lambda: late.end is not None and early.end is not None)

    assert (late.blocks, late.end) == (blocks(2, 3, 4, 5), 6)
    assert (early.blocks, early.end) == (blocks(*range(300)), 300)


async def test_a_watcher_that_comes_late_hears_the_end(house: House) -> None:
    """News from before the watch is not waited for."""
    a, b = await house.replica(), await house.replica()
    gone = CopyKey("b" * 64, "resp_2")
    for key in (KEY, gone):
        await a.store.create(key, meta=b"", snapshot=b"")
        await a.store.append(key, 0, blocks(0))
        await a.store.append(key, 1, blocks(1))
        await a.store.end(key)
    await a.store.drop(gone, Gone.DELETED)
    behind, of_nothing = Ear(b.signal), Ear(b.signal)
    b.store.watch(KEY, 1, behind)
    b.store.watch(gone, 1, of_nothing)

    await until(b.signal, lambda: behind.end is not None and of_nothing.end is not None)

    assert (behind.blocks, behind.end, of_nothing.end) == (blocks(1), 2, "gone")


async def test_watchers_of_a_copy_that_goes(house: House) -> None:
    """A copy that is dropped ends its watchers everywhere; so does one whose keys vanish."""
    a, b = await house.replica(lease_s=0.3), await house.replica(lease_s=0.3)
    keys = [CopyKey(f"{n:064}", "resp") for n in range(3)]
    ears = [Ear(b.signal) for _ in keys]
    for key, ear in zip(keys, ears, strict=True):
        await a.store.create(key, meta=b"", snapshot=b"")
        await a.store.append(key, 0, blocks(0))
        b.store.watch(key, 1, ear)
    await a.store.drop(keys[0], Gone.DROPPED)
    house.delete(f"events:{keys[1].owner}*")
    house.delete(f"copy:{keys[2].owner}*")

    await until(b.signal, lambda: all(ear.end == "gone" for ear in ears))


async def test_a_copy_without_room_is_not_taken_over_torn(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others take all the room that is made, the copy is dropped, not left to a taker."""
    a, b = await house.replica(), await house.replica()
    await a.store.create(KEY, meta=b"", snapshot=b"")
    await a.store.append(KEY, 0, blocks(0))
    monkeypatch.setattr(redis, "_TRIES_FOR_ROOM", 0)
    with pytest.raises(StoreFullError):
        await a.store.append(KEY, 1, blocks(1))

    await a.store.renew_leases()

    assert isinstance(await b.store.get(KEY), Tombstone)
    house.turn(LEASE_S + 1)
    assert await b.store.orphans() == []


async def test_one_spoilt_stream_does_not_end_the_reading_of_all(house: House) -> None:
    """What is no row ends its own copy's watchers; what is no news is told of and passed over."""
    a, b = await house.replica(), await house.replica()
    spoilt, whole = Ear(b.signal), Ear(b.signal)
    other = CopyKey("b" * 64, "resp_2")
    for key, ear in ((KEY, spoilt), (other, whole)):
        await a.store.create(key, meta=b"", snapshot=b"")
        await a.store.append(key, 0, blocks(0))
        b.store.watch(key, 1, ear)
    house.add(f"events:{KEY.owner}:{KEY.response_id}", "2-0", "d", "no row")
    house.add("news", "*", "kind", "ended", "copy", f"{other.owner}:{other.response_id}")
    await until(b.signal, lambda: spoilt.end == "gone")
    await a.store.append(other, 1, blocks(1))
    await a.store.end(other)

    await until(b.signal, lambda: whole.end is not None)

    assert (whole.blocks, whole.end) == (blocks(1), 2)


async def test_cancel_is_heard_by_all_and_kept_for_a_taker(house: House) -> None:
    """Whoever writes the copy hears of it; one that takes it over later is told."""
    a, b = await house.replica(), await house.replica()
    await a.store.create(KEY, meta=b"", snapshot=b"")
    assert await b.store.ask_cancel(KEY) is True
    await until(a.signal, lambda: a.cancels == [KEY])
    house.turn(LEASE_S + 1)

    taken = await b.store.take(KEY)

    assert taken is not None
    assert taken.cancelled
    await b.store.end(KEY)
    assert await a.store.ask_cancel(KEY) is False


# A server that others use too


@pytest.mark.parametrize("what", ["copy", "events"])
async def test_a_copy_that_lost_a_part_is_gone(house: House, what: str) -> None:
    """If the server has evicted a key, nothing is replayed of the rest, and it is accounted for."""
    a = await house.replica()
    for ended in (False, True):
        key = CopyKey("b" * 64, f"resp_{ended}")
        await a.store.create(key, meta=b"", snapshot=b"1234")
        await a.store.append(key, 0, blocks(0, 1, 2))
        if ended:
            await a.store.end(key)
        house.delete(f"{what}:*")

        assert [b async for b in a.store.read(key)] == []
        assert await a.store.get(key) == Tombstone(key, Gone.EVICTED, 1_000.0)
        if not ended:
            with pytest.raises(CopyLostError, match="not there"):
                await a.store.append(key, 3, blocks(3))
    assert await a.store.size() == 0
    assert await a.store.open_copies() == []


async def test_a_trimmed_stream_is_gone(house: House) -> None:
    """A stream whose head someone has trimmed is never replayed as if it were whole."""
    a = await house.replica()
    await a.store.create(KEY, meta=b"", snapshot=b"")
    for number in range(3):
        await a.store.append(KEY, number, blocks(number))
    stream = a.store._keys.events(b"%s:%s" % (KEY.owner.encode(), KEY.response_id.encode()))
    house.server.ask("XTRIM", stream.decode(), "MAXLEN", "2")

    assert await read(a.store) == []
    assert isinstance(await a.store.get(KEY), Tombstone)


async def test_a_server_that_was_emptied(house: House) -> None:
    """Everything is gone without a trace, and new copies are kept as ever."""
    a, b = await house.replica(), await house.replica()
    await a.store.create(KEY, meta=b"", snapshot=b"")
    house.server.ask("FLUSHALL")
    house.server.ask("SCRIPT", "FLUSH")

    with pytest.raises(CopyLostError):
        await a.store.append(KEY, 0, blocks(0))

    assert await b.store.get(KEY) is None
    await a.store.create(KEY, meta=b"", snapshot=b"")
    await a.store.append(KEY, 0, blocks(0))
    assert await read(b.store) == blocks(0)


async def test_keys_of_an_ended_copy_vanish_by_themselves(house: House) -> None:
    """Should no proxy be left to expire it, the server does; everything has the prefix."""
    a = await house.replica(Limits(copy_ttl_s=100))
    await a.store.create(KEY, meta=b"", snapshot=b"")
    await a.store.append(KEY, 0, blocks(0))
    copy, events = a.store._keys.of(f"{KEY.owner}:{KEY.response_id}".encode())[:2]
    assert house.server.ask("PTTL", copy.decode()) == b":-1\r\n"
    await a.store.end(KEY)
    for name in (copy, events):
        assert 100_000 < int(house.server.ask("PTTL", name.decode())[1:]) <= 160_000

    house.delete("copy:*")
    house.delete("events:*")
    house.turn(100)
    assert await a.store.expire() == [Tombstone(KEY, Gone.EXPIRED, 1_100.0)]
    assert isinstance(await a.store.get(KEY), Tombstone)
    assert await a.store.size() == 0
    house.delete("*")
    assert await a.store.get(KEY) is None


async def test_the_servers_clock_counts(house: House) -> None:
    """Without a clock of the tests' own every process goes by the server's."""
    store = RedisStore(house.server.url, prefix=f"{uuid.uuid4().hex}:", lease_s=0.2)
    other = RedisStore(house.server.url, prefix=store._keys.open.decode()[:-4], lease_s=0.2)
    await store.create(KEY, meta=b"", snapshot=b"")
    info = await store.get(KEY)
    assert isinstance(info, CopyInfo)
    seconds, micros = (int(part) for part in house.server.ask("TIME").split()[2::2])
    assert abs(info.created_at - seconds - micros / 1e6) < PATIENCE_S
    async with asyncio.timeout(PATIENCE_S):
        while await other.take(KEY) is None:  # noqa: ASYNC110 -- of the real clock
            await asyncio.sleep(0.02)
    await store.aclose()
    await other.aclose()
