"""Take care of copies whose run lost its process: complete them from vLLM, or end them."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import TYPE_CHECKING

import structlog

from proxy.background.feed import State
from proxy.background.meta import OBJECT, read_meta
from proxy.background.run import Run, RunMode
from proxy.core.background import error_message
from proxy.core.outcome import Outcome
from proxy.core.responses import judge, may_be_terminal
from proxy.store import CopyInfo, CopyKey, StoreError

if TYPE_CHECKING:
    from proxy.background.makers import Makers
    from proxy.store import Store
    from proxy.store.shared import SharedStore
    from proxy.upstream.headers import Pairs

__all__ = ["Recovery", "is_interruption"]

INTERRUPTED = "The proxy was restarted before the response was finished."
ABANDONED = "The proxy that made the response was lost before it was finished."
_SWEEP_S = 30.0
_LAST_BLOCKS = 8

log = structlog.stdlib.get_logger("lastword")


def is_interruption(response: bytes) -> bool:
    """Whether a response ended since its proxy did.

    Its clients may have seen more of it than its copy holds, so no cursor is ahead of its end.
    """
    return error_message(response) in (INTERRUPTED, ABANDONED)


class Recovery:
    """Completes or ends open copies, and expires those that have ended.

    ``headers`` go up with a request that no client's headers are known for.
    """

    def __init__(
        self,
        makers: Makers,
        store: Store,
        shared: SharedStore | None,
        *,
        headers: Pairs,
        copy_ttl_s: float,
    ) -> None:
        self._makers = makers
        self._store = store
        self._shared = shared
        self._headers = headers
        self._copy_ttl_s = copy_ttl_s
        self._sweeper: asyncio.Task[None] | None = None
        self._waiting: dict[CopyKey, float] = {}  # since when copies wait for credentials

    async def start(self) -> None:
        """Take care of what an earlier process left open, and begin to expire copies.

        With a shared store it is others' processes that leave copies open, and ``Replicas`` finds
        them.
        """
        if self._shared is None:
            left = await self._store.open_copies()
            if left:
                log.info("runs of an earlier process are taken up or ended", count=len(left))
            for info in left:
                await self.take_care(info)
        self._sweeper = self._makers.own(self._sweep())

    def stop(self) -> None:
        """Expire no more copies."""
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def take_care(self, info: CopyInfo, headers: Pairs | None = None) -> None:
        """Complete or end an open copy that this process may write; ``headers`` are its owner's."""
        mode = read_meta(info.meta).mode
        if mode == OBJECT or await self._is_whole(info):
            await self._store.end(info.key)
        elif mode == RunMode.UPSTREAM:
            self._makers.own(self._take_up(info, headers or self._headers))
        else:  # before anyone can ask for it
            reason = INTERRUPTED if self._shared is None else ABANDONED
            await self._makers.logged(self._end(info, reason))

    async def cancel(self, info: CopyInfo) -> None:
        """End an open copy that this process may write as cancelled."""
        if await self._is_whole(info):
            await self._store.end(info.key)
            return
        run = self._makers.reopen(read_meta(info.meta).run_mode, info)
        run.cancel()
        await run.close(State.ENDED)
        self._makers.count(run)

    def waits_for_owner(self, key: CopyKey) -> bool:
        """Whether a copy can only be completed with credentials that its owner has."""
        return key in self._waiting

    async def adopt(self, info: CopyInfo, headers: Pairs) -> Run | CopyInfo:
        """Take up an open copy with its owner's headers; return the run, or what is known."""
        taken = info.key in self._makers.by_key or self._makers.closing
        if not taken and read_meta(info.meta).mode == RunMode.UPSTREAM:
            self._makers.own(self._take_up(info, headers))
            await asyncio.sleep(0)
        maker = self._makers.by_key.get(info.key)
        return maker.run if maker is not None else info

    async def _take_up(self, info: CopyInfo, headers: Pairs) -> None:
        """Complete a copy that vLLM still makes from vLLM's own stream."""
        if info.key in self._makers.by_key:
            return
        path = read_meta(info.meta).path.encode("latin-1")
        maker = self._makers.new(RunMode.UPSTREAM, info.key.owner, info.meta, path, headers)
        self._makers.by_key[info.key] = maker
        maker.run.resume(
            info.key, snapshot=info.snapshot, last_number=info.last_number, blocks=info.blocks
        )
        try:
            if await maker.resume():
                self._waiting.pop(info.key, None)
            else:  # only the owner's next request can bring the key that vLLM wants
                await maker.run.close(State.ELSEWHERE)
                now = asyncio.get_running_loop().time()
                self._waiting.setdefault(info.key, now)
                if self._shared is not None:
                    await self._shared.release(info.key)
        finally:
            self._makers.forget(maker)

    async def _is_whole(self, info: CopyInfo) -> bool:
        """Whether a copy holds its terminal event: only the mark that it has ended is missing."""
        start = max(0, info.blocks - _LAST_BLOCKS)
        async with aclosing(self._store.read(info.key, start)) as batches:
            async for batch in batches:
                if any(may_be_terminal(block.raw) and judge(block.raw) for block in batch):
                    return True
        return False

    async def _end(self, info: CopyInfo, reason: str) -> None:
        """End a copy whose run died with the process that made it."""
        run = self._makers.reopen(read_meta(info.meta).run_mode, info)
        run.fail(reason, Outcome.STOPPED)
        await run.close(State.ENDED)
        self._makers.count(run)

    async def _sweep(self) -> None:
        """Expire copies now and then, and give up those that nobody can take up any more."""
        pause_s = min(_SWEEP_S, max(1.0, self._copy_ttl_s / 4))
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._store.expire()
                for key in list(self._waiting):
                    await self._give_up(key)
            except StoreError as error:
                log.warning("the store could not be swept", error=str(error))

    async def _give_up(self, key: CopyKey) -> None:
        """End a copy that has waited for its owner for too long; forget one that need not wait."""
        info = await self._store.get(key)
        if not isinstance(info, CopyInfo) or info.ended_at is not None:
            self._waiting.pop(key, None)
            return
        waits_s = asyncio.get_running_loop().time() - self._waiting.get(key, math.inf)
        if waits_s < self._copy_ttl_s or key in self._makers.by_key:
            return
        del self._waiting[key]
        if self._shared is None or await self._shared.take(key) is not None:
            await self._end(info, "The response was not taken up in time.")
