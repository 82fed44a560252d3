"""Write one copy behind its run: a live event never waits for the store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from proxy.store import CopyLostError, StoreError, StoreFullError, StoreUnavailableError
from proxy.store.shared import LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.store import Block, CopyKey, Store

__all__ = ["Recorder"]

# What may wait for the store; beyond it the store is too slow for this run.
_MAX_PENDING_BYTES = 16 * 1024 * 1024
# Waking a task and the store for every single event would cost more than relaying it. What has
# gathered is stored a moment later, or sooner if it is much or says something of the response.
_BATCH_BLOCKS = 256
_BATCH_BYTES = 32 * 1024


class Recorder:
    """Keep the copy of one run, one batch in flight while the next gathers.

    ``gather_s`` tells how many seconds events may gather, ``on_stored`` is told how many blocks the
    store holds, ``on_lost`` once why the copy cannot be kept any more; the run goes on without it.
    """

    def __init__(
        self,
        store: Store,
        key: CopyKey,
        *,
        on_stored: Callable[[int], None],
        on_lost: Callable[[Exception], None],
        gather_s: Callable[[], float],
    ) -> None:
        self._gather_s = gather_s
        self._store = store
        self._key = key
        self._on_stored = on_stored
        self._on_lost = on_lost
        self._pending: list[Block] = []
        self._pending_bytes = 0
        self._snapshot: bytes | None = None
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._ends = False
        self._given_up: Exception | None = None
        self.holds = False  # whether there is a copy that is ours to drop
        self.begun: asyncio.Future[StoreError | None] = self._loop.create_future()

    def add(self, blocks: list[Block], size: int, snapshot: bytes | None = None) -> None:
        """Take blocks of ``size`` bytes to be stored, and the response object if it has changed."""
        if self._given_up is not None:
            return
        # What waits already tells: one event may be larger than the limit by itself.
        if self._pending_bytes > _MAX_PENDING_BYTES:
            self.give_up(StoreFullError("The store is too slow for this run."))
            return
        self._pending += blocks
        self._pending_bytes += size
        if snapshot is not None:
            self._snapshot = snapshot
        much = len(self._pending) >= _BATCH_BLOCKS or self._pending_bytes >= _BATCH_BYTES
        if much or snapshot is not None:
            self._wake.set()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._gather_s(), self._ring)

    def add_one(self, block: Block, size: int) -> None:
        """Take one block that says nothing new of the response: what is done for every delta."""
        if self._timer is None or self._pending_bytes > _BATCH_BYTES:
            self.add([block], size)
        else:  # it waits with others, for which the timer runs
            self._pending.append(block)
            self._pending_bytes += size

    def close(self, *, ended: bool) -> None:
        """Store what is pending, mark the copy as ended if it has, and stop."""
        self._closing = True
        self._ends = ended
        self._wake.set()

    def give_up(self, reason: Exception) -> None:
        """Drop the copy: a part of it must not be taken for the whole."""
        if self._given_up is None:
            self._given_up = reason
            self._pending = []
            self._wake.set()

    def _ring(self) -> None:
        self._timer = None
        self._wake.set()

    async def run(self, *, create: tuple[bytes, bytes] | None, stored: int = 0) -> None:
        """Write until closed.

        ``create`` is (meta, snapshot) of a new copy; None goes on with one that holds ``stored``
        blocks.
        """
        try:
            if create is not None:
                await self._create(*create)
            self.holds = True
            self.begun.set_result(None)
            await self._write(stored)
        except StoreError as error:
            # One that is away drops the copy itself once it is back; another's is not ours.
            self.holds &= not isinstance(error, StoreUnavailableError | LeaseLostError)
            self._given_up = error
            self._pending = []
            self._on_lost(error)
            if not self.begun.done():
                self.begun.set_result(error)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def _create(self, meta: bytes, snapshot: bytes) -> None:
        if await self._store.create(self._key, meta=meta, snapshot=snapshot) is not None:
            raise CopyLostError("A copy under this response id is there already.")

    async def _write(self, stored: int) -> None:
        while True:
            if self._given_up is not None:
                raise self._given_up
            if self._pending or self._snapshot is not None:
                batch, self._pending, self._pending_bytes = self._pending, [], 0
                snapshot, self._snapshot = self._snapshot, None
                await self._store.append(self._key, stored, batch, snapshot=snapshot)
                stored += len(batch)
                self._on_stored(stored)
            elif self._closing:
                break
            else:
                self._wake.clear()
                await self._wake.wait()
        if self._ends:
            await self._store.end(self._key)
