"""A run of another replica, as its followers here read it, without a network."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from proxy.background.follower import Ending, follow
from proxy.background.meta import Meta
from proxy.background.remote import RemoteRun
from proxy.store import Block, CopyInfo, CopyKey
from proxy.store.memory import MemoryStore
from tests.fake_scripts import vllm_events
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from proxy.store.shared import SharedStore

KEY = CopyKey("owner", "resp_1")
EVENTS = vllm_events("completed", background=True)
BLOCKS = [Block(number, raw) for number, raw in enumerate(EVENTS)]


class Shared(MemoryStore):
    """A store that notes who watches."""

    watched = 0

    def watch(self, key: CopyKey, blocks: int, watcher: object) -> None:
        """Note it."""
        self.watched += 1

    def unwatch(self, key: CopyKey) -> None:
        """Note it."""
        self.watched -= 1


class Client:
    """A sink that takes everything."""

    paused = False

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        """Take it."""
        self.data += data

    def write_http_chunk(self, http_chunk: bytes, size: int, now: float) -> None:
        """Take nothing: another replica's events come without HTTP."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Wait for nothing."""


async def remote_run(stored: int, told: int) -> tuple[Shared, RemoteRun]:
    """Make a run of whose ``stored`` blocks this process was told the first ones."""
    store = Shared()
    await store.create(KEY, meta=Meta("proxy").encode(), snapshot=b"{}")
    await store.append(KEY, 0, BLOCKS[:told])
    info = await store.get(KEY)
    assert isinstance(info, CopyInfo)
    await store.append(KEY, told, BLOCKS[told:stored])
    return store, RemoteRun(info, cast("SharedStore", store), [], lambda _: None)


async def turns() -> None:
    """Let everything that is ready go on."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_store_that_is_ahead() -> None:
    """What the store has and the run has not been told of comes once, and not twice."""
    store, run = await remote_run(stored=8, told=4)
    clients = {after: Client() for after in (-2, 1, 3)}
    with run.followed():
        tasks = [
            asyncio.create_task(follow(run, store, after, client))
            for after, client in clients.items()
        ]
        await turns()
        run.grown(BLOCKS[4:8])
        await turns()
        run.grown(BLOCKS[8:])
        run.finished(len(BLOCKS))
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*tasks) == [Ending.WHOLE] * 3
    for after, client in clients.items():
        assert client.data == b"".join(EVENTS[max(0, after + 1) :]), after
    assert store.watched == 0


async def test_endings_that_are_none() -> None:
    """A copy that goes is a cut, one that is out of reach ends without a terminal event."""
    for tell, ending in (
        (RemoteRun.gone, Ending.LOST),
        (RemoteRun.out_of_touch, Ending.ELSEWHERE),
        (RemoteRun.leave, Ending.ELSEWHERE),
    ):
        store, run = await remote_run(stored=4, told=4)
        client = Client()
        with run.followed():
            task = asyncio.create_task(follow(run, store, -2, client))
            await turns()
            tell(run)
            async with asyncio.timeout(PATIENCE_S):
                assert await task is ending
        assert client.data == b"".join(EVENTS[:4])
