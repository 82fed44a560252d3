"""One run, its copy and its followers, without a network: every interleaving must be whole."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.background import feed as feed_module
from proxy.background.feed import Place, State
from proxy.background.follower import Ending, follow, replay
from proxy.background.run import GATHER_S, Run, RunMode
from proxy.store import Block, CopyInfo, CopyKey, Gone, Limits, StoreFullError
from proxy.store.memory import MemoryStore
from tests.fake_scripts import event, response_object, vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY = CopyKey("owner", "resp_1")
START = -2


class SlowStore(MemoryStore):
    """A store whose writes take as long as the test says."""

    def __init__(self, limits: Limits | None = None) -> None:
        super().__init__(limits)
        self.gate = asyncio.Event()
        self.gate.set()

    async def append(
        self, key: CopyKey, after: int, blocks: Sequence[Block], *, snapshot: bytes | None = None
    ) -> None:
        """Wait for the gate, then write."""
        await self.gate.wait()
        await super().append(key, after, blocks, snapshot=snapshot)


class Client:
    """A sink that takes what it takes: paused by the test, or by every write."""

    def __init__(self) -> None:
        self.data = b""
        self.open = asyncio.Event()
        self.open.set()
        self.slow = False

    @property
    def paused(self) -> bool:
        """Whether it takes no more."""
        return not self.open.is_set()

    def write(self, data: bytes) -> None:
        """Take it."""
        self.data += data
        if self.slow:
            self.open.clear()

    def write_http_chunk(self, http_chunk: bytes, size: int, now: float) -> None:
        """Take its data."""
        assert now == 1.0
        self.write(http_chunk[-2 - size : -2])

    async def drain(self) -> None:
        """Wait until it takes more."""
        await self.open.wait()


class Bench:
    """A run under test, with what was told of it."""

    def __init__(
        self,
        mode: RunMode = RunMode.UPSTREAM,
        store: MemoryStore | None = None,
        *,
        gather_s: float = GATHER_S,
    ) -> None:
        self.store = store or SlowStore()
        self.dropped: list[str] = []
        self.to_come: list[bytes] = []
        self.run = Run(
            mode,
            store=self.store,
            max_event_bytes=1 << 20,
            on_dropped=lambda _, error: self.dropped.append(str(error)),
            meta=b"{}",
            gather_s=lambda: gather_s,
        )
        self.run.on_created = lambda response_id: CopyKey("owner", response_id)
        self.followers: list[tuple[int, Client, asyncio.Task[Ending | Place]]] = []

    def join(self, after: int = START, *, slow: bool = False) -> Client:
        """Let a follower join."""
        client = Client()
        client.slow = slow
        task = asyncio.create_task(follow(self.run, self.store, after, client))
        self.followers.append((after, client, task))
        return client

    @property
    def slow_store(self) -> SlowStore:
        """The store, if it is one that the test can hold up."""
        assert isinstance(self.store, SlowStore)
        return self.store

    def take(self, count: int, reads: str) -> None:
        """Let the next events come: in one read, in two, or each in an HTTP chunk of its own."""
        events = self.to_come[:count]
        del self.to_come[:count]
        match reads:
            case "one":
                self.run.take(b"".join(events))
            case "cut":
                self.run.take(b"".join(events)[:17])
                self.run.take(b"".join(events)[17:])
            case _:
                self.take_chunks(events)

    def take_chunks(self, events: list[bytes]) -> int:
        """Let events come in HTTP chunks; tell how many of them were taken as such."""
        taken = 0
        for raw in events:
            if size := self.run.take_http_chunk(b"%x\r\n%b\r\n" % (len(raw), raw), 1.0):
                assert size == len(raw)
                taken += 1
            else:
                self.run.take(raw)
        return taken

    async def do(self, step: tuple[Any, ...], reads: str) -> None:
        """Do one step of a scenario."""
        match step:
            case ("take", count):
                self.take(count, reads)
            case ("join", after, slow):
                self.join(after, slow=slow)
            case ("turn", count):
                await turns(count)
            case ("store", goes):
                self.slow_store.gate.set() if goes else self.slow_store.gate.clear()
            case ("client", which, reads) if which < len(self.followers):
                client = self.followers[which][1]
                client.open.set() if reads else client.open.clear()

    async def close(self, state: State = State.ENDED) -> None:
        """End the run and let every follower read to its end."""
        async with asyncio.timeout(PATIENCE_S):
            await self.run.close(state)
            for _, client, task in self.followers:
                while not task.done():
                    client.open.set()
                    await asyncio.sleep(0)

    async def stored(self) -> list[bytes]:
        """Read the copy."""
        return [block.raw async for batch in self.store.read(KEY) for block in batch]


async def turns(count: int = 20) -> None:
    """Let everything that is ready go on."""
    for _ in range(count):
        await asyncio.sleep(0)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 5)),
        st.tuples(st.just("join"), st.integers(-2, 40), st.booleans()),
        st.tuples(st.just("turn"), st.integers(1, 6)),
        st.tuples(st.just("store"), st.booleans()),
        st.tuples(st.just("client"), st.integers(0, 5), st.booleans()),
    ),
    max_size=40,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=steps,
    tail=st.sampled_from([0, 300, 1000, 1 << 20]),
    reads=st.sampled_from(["one", "cut", "chunks"]),
)
def test_every_follower_gets_all_of_it_once(
    steps: list[tuple[Any, ...]],
    tail: int,
    reads: str,
) -> None:
    """However joins, writes, the disk and slow clients fall together: no gap, no repeat."""
    events = vllm_events("incomplete", deltas=25, background=True)

    async def scenario() -> None:
        bench = Bench()
        bench.to_come = list(events)
        for step in steps:
            await bench.do(step, reads)
        bench.take(len(events), reads)
        bench.run.finish()
        bench.slow_store.gate.set()
        await bench.close()
        info = await bench.store.get(KEY)
        assert isinstance(info, CopyInfo)
        assert info.ended_at is not None
        whole = await bench.stored()
        assert b"".join(whole[:-1]) == b"".join(events[:-1])
        assert whole[-1].startswith(b"event: response.incomplete\n")
        for after, client, task in bench.followers:
            assert task.result() is Ending.WHOLE
            assert client.data == b"".join(whole[max(0, after + 1) :])
        assert bench.run._tail_bytes <= max(tail, 0)
        assert not bench.run._live

    before = feed_module._TAIL_BYTES
    feed_module._TAIL_BYTES = tail
    try:
        asyncio.run(scenario())
    finally:
        feed_module._TAIL_BYTES = before


async def test_memory_is_bounded_by_what_the_store_has() -> None:
    """What is stored is let go of but for a tail; what is not stored yet is kept."""
    bench = Bench()
    store = bench.slow_store
    stuck = bench.join()
    stuck.open.clear()
    quick, stopping = bench.join(), bench.join()
    bench.run.take(vllm_events()[0])
    await turns()
    stopping.open.clear()
    big = [event("response.output_text.delta", n, delta="x" * 10_000) for n in range(1, 100)]
    store.gate.clear()
    for block in big:
        bench.run.take(block)
    await turns()
    assert bench.run._tail_bytes > 900_000
    store.gate.set()
    await turns()
    assert bench.run._tail_bytes <= 64 * 1024
    assert len(stuck.data) == 0
    assert stopping.data == vllm_events()[0]
    assert quick.data.endswith(big[-1])
    bench.run.take(vllm_events()[-1].replace(b'"sequence_number":10', b'"sequence_number":100'))
    await bench.close()
    whole = b"".join(await bench.stored())
    assert [stuck.data, quick.data, stopping.data] == [whole] * 3


async def test_copy_that_is_lost_ends_only_those_that_need_it() -> None:
    """The live stream goes on; a follower that is behind what is left is cut, not lied to."""
    bench = Bench(store=SlowStore(Limits(max_copy_bytes=100_000)))
    quick, stuck = bench.join(), bench.join()
    stuck.open.clear()
    sent = vllm_events()[0]
    bench.run.take(sent)
    for number in range(1, 40):
        block = event("response.output_text.delta", number, delta="x" * 5_000)
        bench.run.take(block)
        sent += block
        await turns(4)
    async with asyncio.timeout(PATIENCE_S):
        while not bench.run.copy_lost:  # noqa: ASYNC110 - the recorder gathers for a moment
            await asyncio.sleep(0.005)
    assert len(bench.dropped) == 1
    assert bench.run._tail_bytes <= 64 * 1024
    last = event("response.completed", 40, response=response_object("completed"))
    bench.run.take(last)
    await bench.close()
    assert quick.data == sent + last
    assert [task.result() for *_, task in bench.followers] == [Ending.WHOLE, Ending.LOST]
    assert stuck.data == b""


@pytest.mark.parametrize(
    "chunks",
    [
        [[0], [1], [3]],
        [[0, 2]],
        [[0, 1, 2], [2]],
        [[0, 1], [0]],
        [[0], [1, 2, 2, 3]],
        [[5, 6, 8]],
    ],
)
async def test_numbers_that_do_not_follow(chunks: list[list[int]]) -> None:
    """A gap, a step back or a repeat drops the copy, also in the chunk that begins it."""
    bench = Bench()
    client = bench.join()
    sent = b""
    first = response_object("in_progress")
    for chunk in chunks:
        blocks = [event("response.created", number, response=first) for number in chunk]
        bench.run.take(b"".join(blocks))
        sent += b"".join(blocks)
        await turns()
    await bench.close()
    assert client.data == sent
    assert len(bench.dropped) == 1
    assert "numbers go from" in bench.dropped[0]
    info = await bench.store.get(KEY)
    assert not (isinstance(info, CopyInfo) and info.ended_at is not None)


@pytest.mark.parametrize("numbers", [[1, 3], [1, 1], [1, 0], [None, 0, 5]])
@pytest.mark.parametrize("chunks", [False, True])
async def test_deltas_that_do_not_follow(numbers: list[int | None], *, chunks: bool) -> None:
    """One by one, as deltas mostly come: the copy is dropped, the live stream is all of them."""
    bench = Bench()
    client = bench.join()
    created = event("response.created", 0, response=response_object("in_progress"))
    if numbers[0] is None:
        created = created.replace(b'"sequence_number":0,', b"")
    sent = [created]
    sent += [event("response.output_text.delta", n, delta="x") for n in numbers if n is not None]
    for raw in sent:
        bench.take_chunks([raw]) if chunks else bench.run.take(raw)
        await turns()
    await bench.close()
    assert client.data == b"".join(sent)
    assert ["numbers go from" in why for why in bench.dropped] == [True]


async def test_deltas_in_chunks_of_their_own() -> None:
    """All but the first of a kind go the short way, to a live client and into the copy alike."""
    bench = Bench()
    client, stuck = bench.join(), bench.join()
    created = event("response.created", 0, response=response_object("in_progress"))
    deltas = [event("response.output_text.delta", n, delta="x") for n in range(1, 9)]
    assert bench.take_chunks([created]) == 0
    await turns()
    assert bench.take_chunks(deltas[:2]) == 1
    stuck.open.clear()
    assert bench.take_chunks(deltas[2:]) == len(deltas) - 2
    assert stuck.data == b"".join([created, *deltas[:2]])
    await bench.close()
    assert [client.data, stuck.data] == [b"".join([created, *deltas])] * 2
    assert await bench.stored() == [created, *deltas]


async def test_chunks_are_stored_when_they_are_many() -> None:
    """However long they may gather; and those that a store is too slow for are its copy's end."""
    bench = Bench(gather_s=3600)
    bench.run.take(event("response.created", 0, response=response_object("in_progress")))
    await turns()
    deltas = [
        event("response.output_text.delta", n, delta="x" * 1_000) for n in range(10_000, 30_000)
    ]
    bench.run._number = 9_999
    bench.take_chunks(deltas[:40])
    await turns()
    assert len(await bench.stored()) > 1
    bench.slow_store.gate.clear()
    bench.take_chunks(deltas[40:])
    bench.slow_store.gate.set()
    await turns()
    assert ["too slow" in why for why in bench.dropped] == [True]
    await bench.close()


async def test_chunks_of_a_stream_that_tells_no_name() -> None:
    """They are counted with what is held of it, and not taken the short way."""
    bench = Bench()
    deltas = [event("response.output_text.delta", n, delta="x") for n in range(5)]
    assert bench.take_chunks(deltas) == 0
    assert bench.run.nameless_bytes == len(b"".join(deltas))


async def test_chunks_behind_a_copy_that_is_lost() -> None:
    """They still go to the live client, and nothing gathers for a store that takes nothing."""
    bench = Bench(store=SlowStore(Limits(max_copy_bytes=1_000)))
    client = bench.join()
    created = event("response.created", 0, response=response_object("in_progress"))
    deltas = [event("response.output_text.delta", n, delta="x" * 500) for n in range(1, 9)]
    bench.run.take(created)
    async with asyncio.timeout(PATIENCE_S):
        for raw in deltas[:4]:
            bench.take_chunks([raw])
        while not bench.run.copy_lost:  # noqa: ASYNC110 - the recorder gathers for a moment
            await asyncio.sleep(0.005)
    bench.take_chunks(deltas[4:])
    assert bench.run._recorder is not None
    assert not bench.run._recorder._pending
    await bench.close()
    assert client.data == b"".join([created, *deltas])


async def test_first_number_need_not_be_0() -> None:
    """Where a stream begins is its own affair."""
    bench = Bench()
    bench.run.take(event("response.created", 5, response=response_object("in_progress")))
    bench.run.take(event("response.completed", 6, response=response_object("completed")))
    await bench.close()
    assert not bench.dropped
    assert len(await bench.stored()) == 2


async def test_event_larger_than_what_may_wait() -> None:
    """One event may be larger than all that may wait for a slow store; a second is too much."""
    for count, lost in ((1, False), (2, True)):
        bench = Bench(store=SlowStore(Limits(max_copy_bytes=1 << 30)))
        bench.run.corrector = type(bench.run.corrector)(max_event_bytes=1 << 30)
        store = bench.slow_store
        bench.run.take(vllm_events()[0])
        await turns()
        store.gate.clear()
        for number in range(count + 1):
            bench.run.take(event("x", number + 1, delta="x" * (17 << 20)))
            if number == 0:
                await turns()  # the store is at it
        store.gate.set()
        await bench.close()
        assert bench.run.copy_lost is lost, count


async def test_cursor_that_is_ahead() -> None:
    """A follower that knows more than the run so far waits for what is new to it."""
    bench = Bench()
    events = vllm_events("completed", background=True)
    bench.run.take(b"".join(events[:3]))
    ahead, beyond = bench.join(5), bench.join(500)
    for block in events[3:]:
        bench.run.take(block)
        await turns(3)
    await bench.close()
    assert ahead.data == b"".join(events[6:])
    assert beyond.data == b""


async def test_resumed_run_serves_what_only_the_store_has() -> None:
    """After a restart nothing is in memory: every cursor is answered all the same."""
    store = SlowStore()
    events = vllm_events("completed", background=True)
    await store.create(KEY, meta=b"{}", snapshot=b"{}")
    await store.append(KEY, 0, [Block(n, block) for n, block in enumerate(events[:6])])
    bench = Bench(store=store)
    bench.run.resume(KEY, snapshot=b'{"id":"resp_1"}', last_number=5, blocks=6)
    clients = {after: bench.join(after) for after in range(-2, len(events) + 1)}
    await turns()
    assert clients[-2].data == clients[-1].data == b"".join(events[:6])
    for block in events[6:]:
        bench.run.take(block)
    await bench.close()
    for after, client in clients.items():
        assert client.data == b"".join(events[max(0, after + 1) :]), after
    assert await bench.stored() == events


async def test_run_that_goes_on_elsewhere() -> None:
    """When this process stops following it, the copy stays open and no ending is invented."""
    bench = Bench()
    client = bench.join()
    events = vllm_events()[:4]
    bench.run.take(b"".join(events))
    await bench.close(State.ELSEWHERE)
    assert [task.result() for *_, task in bench.followers] == [Ending.ELSEWHERE]
    assert client.data == b"".join(events)
    info = await bench.store.get(KEY)
    assert isinstance(info, CopyInfo)
    assert info.ended_at is None
    assert await bench.stored() == events


@pytest.mark.parametrize("reads", ["one", "chunks"])
async def test_run_that_another_replica_has_taken_over(reads: str) -> None:
    """What still comes is nobody's: its followers go on in the other's copy, without a gap."""
    bench = Bench()
    bench.to_come = vllm_events("completed", background=True)
    begun = bench.to_come[:6]
    client = bench.join()
    bench.take(4, reads)
    await turns(5)
    bench.take(2, reads)
    await turns(5)

    bench.run.move()
    bench.take(1, reads)  # a delta, and then all the rest
    bench.take(9, reads)
    await bench.run.close(State.ELSEWHERE)

    place = await bench.followers[0][2]
    assert isinstance(place, Place)
    assert place.number == 5
    assert client.data == b"".join(begun)
    assert bench.dropped == []


@pytest.mark.parametrize("mode", list(RunMode))
async def test_cancel(mode: RunMode) -> None:
    """Cancelled once, a run stays so: twice changes nothing, nor does a late completion."""
    bench = Bench(mode)
    client = bench.join()
    events = vllm_events()
    bench.run.take(b"".join(events[:4]))
    bench.run.cancel()
    bench.run.cancel()
    bench.run.fail("no")
    bench.run.take(b"".join(events[4:]))
    await bench.close()
    assert client.data.count(b"\n\n") == 5
    assert b'"status":"cancelled"' in (bench.run.snapshot or b"")
    info = await bench.store.get(KEY)
    assert isinstance(info, CopyInfo)
    assert info.snapshot == bench.run.snapshot


async def test_replay_of_a_copy_that_goes_away() -> None:
    """Deleted while it is read, a replay is known to be cut short."""
    store = MemoryStore()
    blocks = [Block(n, b"x" * 700_000) for n in range(4)]
    await store.create(KEY, meta=b"", snapshot=b"")
    await store.append(KEY, 0, blocks)
    await store.end(KEY)
    client = Client()
    client.slow = True
    task = asyncio.create_task(replay(store, KEY, 0, 4, client))
    await turns()
    await store.drop(KEY, Gone.DELETED)
    client.open.set()
    client.slow = False
    async with asyncio.timeout(PATIENCE_S):
        assert await task is Ending.LOST
    assert len(client.data) < 4 * 700_000


async def test_store_that_cannot_begin_a_copy() -> None:
    """No room, or a copy under that id is there: the live stream goes on."""

    class Full(MemoryStore):
        async def create(self, key: CopyKey, *, meta: bytes, snapshot: bytes) -> CopyInfo | None:
            raise StoreFullError("full")

    taken = MemoryStore()
    await taken.create(KEY, meta=b"other", snapshot=b"")
    for store in (Full(), taken):
        bench = Bench(store=store)
        client = bench.join()
        events = vllm_events("completed")
        for block in events:
            bench.run.take(block)
            await turns(3)
        await bench.close()
        assert client.data == b"".join(events)
        assert len(bench.dropped) == 1
