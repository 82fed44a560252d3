"""What the sweeper does with copies that wait for their owner's next request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import pytest

from proxy.background import recovery
from proxy.background.meta import Meta
from proxy.background.recovery import Recovery
from proxy.background.run import RunMode
from proxy.store import CopyInfo, CopyKey, Tombstone
from proxy.store.memory import MemoryStore
from tests.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from proxy.background.makers import Makers

KEY = CopyKey("owner", "resp_1")


class Nobody:
    """Makers of which nobody makes anything."""

    closing = False

    def __init__(self) -> None:
        self.by_key: dict[CopyKey, object] = {}

    def own(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run it."""
        return asyncio.create_task(work)


class Store(MemoryStore):
    """A store that has something happen while the sweeper asks for a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.swept = asyncio.Semaphore(0)
        self.meanwhile: Callable[[], object] = lambda: None

    async def expire(self) -> list[Tombstone]:
        """Tell that another turn begins."""
        self.swept.release()
        return []

    async def get(self, key: CopyKey) -> CopyInfo | Tombstone | None:
        """Look the copy up."""
        self.meanwhile()
        return await super().get(key)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Give a store whose sweeper is quick."""
    monkeypatch.setattr(recovery, "_SWEEP_S", 0.001)
    return Store()


async def sweeping(store: Store, since: float) -> Recovery:
    """Start a sweeper with a copy that waits since then."""
    swept = Recovery(cast("Makers", Nobody()), store, None, headers=[], copy_ttl_s=1.0)
    swept._waiting[KEY] = since
    await swept.start()
    return swept


async def turns(store: Store, count: int) -> None:
    """Wait until the sweeper has begun so many turns more."""
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(count):
            await store.swept.acquire()


async def test_a_copy_that_another_process_took_care_of_waits_no_longer(store: Store) -> None:
    """Gone or ended: nothing is kept of what nobody needs to take up any more."""
    swept = await sweeping(store, since=asyncio.get_running_loop().time())

    await turns(store, 2)

    assert not swept.waits_for_owner(KEY)
    swept.stop()


async def test_a_copy_taken_up_while_it_is_looked_at_ends_nothing(store: Store) -> None:
    """Its owner comes just when it is late: the sweeper leaves it to them, and sweeps on."""
    await store.create(KEY, meta=Meta(RunMode.UPSTREAM).encode(), snapshot=b"{}")
    swept = await sweeping(store, since=asyncio.get_running_loop().time() - 10)
    store.meanwhile = lambda: swept._waiting.pop(KEY, None)

    await turns(store, 3)

    info = await store.get(KEY)
    assert isinstance(info, CopyInfo)
    assert info.ended_at is None
    swept.stop()
