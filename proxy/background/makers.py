"""The runs that this process makes now, the tasks that make them, and what is counted of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

import structlog

from proxy.background.feed import State
from proxy.background.maker import Maker, MakerLimits
from proxy.background.run import GATHER_S, FlawedStreamError, Run, RunMode
from proxy.store import CopyKey, Gone, StoreError, StoreFullError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from proxy.core.held_bytes import HeldBytes
    from proxy.settings import Settings
    from proxy.store import CopyInfo, Store
    from proxy.store.shared import SharedStore
    from proxy.upstream.client import UpstreamClient
    from proxy.upstream.headers import Pairs

__all__ = ["Counters", "Makers", "drop_reason"]

_CLOSE_S = 5.0
_DROP_REASONS: dict[type[Exception], str] = {
    StoreFullError: "full",
    StoreUnavailableError: "unavailable",
    FlawedStreamError: "stream",
}

log = structlog.stdlib.get_logger("lastword")


class Counters(Protocol):
    """What is counted of runs."""

    def count_dropped_copy(self, reason: str) -> None:
        """Count a copy that could not be kept: ``full``, ``unavailable``, ``stream``, ``lost``."""

    def count_run(self, run: Run) -> None:
        """Count a run that has ended."""


def drop_reason(error: Exception) -> str:
    """Say in a word for a metric why a copy is dropped."""
    return _DROP_REASONS.get(type(error), "lost")


class Makers:
    """Makers by the key of their copy, once they have one, and the tasks of this process."""

    def __init__(
        self,
        settings: Settings,
        client: UpstreamClient,
        store: Store,
        counters: Counters,
        held: HeldBytes,
    ) -> None:
        self._settings = settings
        self._client = client
        self._store = store
        self._shared = cast("SharedStore", store) if settings.shares_store else None
        self._counters = counters
        self._held = held
        self.by_key: dict[CopyKey, Maker] = {}
        self._running: set[Maker] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.closing = False

    @property
    def active(self) -> int:
        """How many runs are being made."""
        return len(self._running)

    async def aclose(self, reason: str) -> None:
        """End the runs that live by this process, leave vLLM its own, wait for what is pending."""
        self.closing = True
        for maker in list(self._running):
            await maker.stop(State.ELSEWHERE, reason)
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def new(self, mode: RunMode, owner: str, meta: bytes, path: bytes, headers: Pairs) -> Maker:
        """Make the maker of a run that is found by its key as soon as the response has an id."""
        maker = Maker(
            self._new_run(mode, meta),
            self._client,
            path=path,
            headers=headers,
            limits=MakerLimits(
                idle_s=self._settings.upstream_idle_s,
                stall_check_s=self._settings.stall_check_s,
                down_s=self._settings.upstream_down_s,
            ),
            shared=self._shared,
        )

        def register(response_id: str) -> CopyKey:
            key = CopyKey(owner, response_id)
            self.by_key[key] = maker
            return key

        maker.run.on_created = register
        self._running.add(maker)
        return maker

    def forget(self, maker: Maker) -> None:
        """Let go of a maker whose run is over, and count what the run was."""
        self._running.discard(maker)
        run = maker.run
        if run.key is not None and self.by_key.get(run.key) is maker:
            del self.by_key[run.key]
        if run.key is not None and run.state is not State.MOVED:  # it is another's to count
            self.count(run)

    def count(self, run: Run) -> None:
        """Count what a run was that is over."""
        self._counters.count_run(run)

    def reopen(self, mode: RunMode, info: CopyInfo) -> Run:
        """Make a run that goes on with a copy, for an ending of the proxy's own."""
        run = self._new_run(mode, info.meta)
        run.resume(
            info.key, snapshot=info.snapshot, last_number=info.last_number, blocks=info.blocks
        )
        return run

    def own(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run ``work`` in a task that ``aclose`` awaits; what goes wrong in it is logged."""
        task = asyncio.create_task(self.logged(work))  # noqa: TID251 - aclose awaits it
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def logged(self, work: Coroutine[None, None, None]) -> None:
        """Do ``work``; what goes wrong in it is logged."""
        try:
            await work
        except StoreError as error:
            log.warning("a background run waits for the store", error=str(error))
        except Exception:
            log.exception("a background run failed inside the proxy")

    def _new_run(self, mode: RunMode, meta: bytes) -> Run:
        return Run(
            mode,
            store=self._store,
            max_event_bytes=self._settings.max_event_bytes,
            share=self._held.share(),
            on_dropped=self._drop,
            meta=meta,
            gather_s=self._gather_s,
        )

    def _gather_s(self) -> float:
        return GATHER_S if self._shared is None else self._shared.gather_s

    def _drop(self, run: Run, error: Exception) -> None:
        """Tell of a copy that could not be kept, and leave no part of it behind."""
        reason = drop_reason(error)
        self._counters.count_dropped_copy(reason)
        log.warning(
            "a copy was dropped; its live stream goes on",
            response_id=run.key.response_id if run.key else None,
            reason=reason,
            error=str(error),
        )
        if run.key is not None and run.holds_copy:
            self.own(self._drop_stored(run.key))

    async def _drop_stored(self, key: CopyKey) -> None:
        try:
            await self._store.drop(key, Gone.DROPPED)
        except StoreError as error:
            log.warning("a dropped copy could not be removed", error=str(error))
