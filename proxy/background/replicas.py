"""What this replica does for runs of other replicas, and hears from them about its own."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from proxy.background.feed import State
from proxy.background.meta import OBJECT, read_meta
from proxy.background.remote import RemoteRun
from proxy.errors import RequestError
from proxy.store import CopyInfo, StoreError

if TYPE_CHECKING:
    from proxy.background.makers import Makers
    from proxy.background.recovery import Recovery
    from proxy.background.run import Run
    from proxy.store import CopyKey, Tombstone
    from proxy.store.shared import SharedStore
    from proxy.upstream.headers import Pairs

__all__ = ["Replicas"]

_ANSWER_S = 5.0

log = structlog.stdlib.get_logger("lastword")


class Replicas:
    """Follows, cancels and takes over what other replicas make; the store's ``Listener``.

    A run whose replica has been silent for ``lease_s`` seconds is taken over by one of the others.
    """

    def __init__(
        self, makers: Makers, recovery: Recovery, store: SharedStore, *, lease_s: float
    ) -> None:
        self._makers = makers
        self._recovery = recovery
        self._store = store
        self._lease_s = lease_s
        self._remotes: dict[CopyKey, RemoteRun] = {}
        self._look = asyncio.Event()
        self._looker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look for runs that lost their replica."""
        await self._store.start(self)
        self._looker = self._makers.own(self._look_on())

    def stop(self) -> None:
        """Take nothing over any more, and let the followers of other replicas' runs go."""
        if self._looker is not None:
            self._looker.cancel()
        for remote in list(self._remotes.values()):
            remote.leave()

    def join(self, info: CopyInfo, headers: Pairs) -> Run | RemoteRun:
        """Give the run of an open copy; ``headers`` are its owner's, should it be taken up.

        The caller enters its ``followed`` before anything else is awaited.
        """
        if (maker := self._makers.by_key.get(info.key)) is not None:
            return maker.run
        remote = self._remotes.get(info.key)
        if remote is None:
            remote = RemoteRun(info, self._store, headers, self._left)
            self._remotes[info.key] = remote
        remote.headers = headers
        self.visit(info, headers)
        return remote

    def visit(self, info: CopyInfo, headers: Pairs) -> CopyInfo:
        """Take up an open copy that has waited for its owner's headers; return what is known."""
        if self._recovery.waits_for_owner(info.key):
            self._makers.own(self._take_over(info.key, headers))
        return info

    async def cancel(self, remote: RemoteRun) -> CopyInfo | Tombstone | None:
        """Have a run cancelled by its replica, and return what has become of its copy.

        Raises ``RequestError`` (503) if neither that replica nor a taker has done it in time.
        """
        with remote.followed():
            if await self._store.ask_cancel(remote.info.key):
                try:
                    async with asyncio.timeout(2 * self._lease_s + _ANSWER_S):
                        await remote.closed.wait()
                except TimeoutError as error:
                    raise RequestError(
                        503, "The replica that makes the response does not answer: try again."
                    ) from error
        return await self._store.get(remote.info.key)

    async def settle(self, info: CopyInfo, headers: Pairs) -> None:
        """Wait a moment for a copy whose run is over, and which is only not marked so yet."""
        remote = self.join(info, headers)
        if isinstance(remote, RemoteRun):
            with remote.followed(), suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await remote.closed.wait()

    # What the store tells.

    def lease_lost(self, key: CopyKey) -> None:
        """Leave a run to the replica that has taken it over."""
        maker = self._makers.by_key.pop(key, None)
        if maker is not None:
            maker.run.move()
            self._makers.own(maker.stop(State.ELSEWHERE))

    def cancel_asked(self, key: CopyKey) -> None:
        """Cancel a run that is made here."""
        maker = self._makers.by_key.get(key)
        if maker is not None and not maker.run.corrector.ended:
            maker.run.cancel()
            self._makers.own(maker.stop(State.ENDED))

    def orphaned(self) -> None:
        """Look at once for what was given back."""
        self._look.set()

    # Inside.

    def _left(self, remote: RemoteRun) -> None:
        if self._remotes.get(remote.info.key) is remote:
            del self._remotes[remote.info.key]

    async def _look_on(self) -> None:
        while True:
            try:
                for key in await self._store.orphans():
                    if not self._recovery.waits_for_owner(key):
                        await self._makers.logged(self._take_over(key))  # one must not stop all
            except StoreError as error:
                log.debug("runs that lost their replica cannot be looked for", error=str(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 3):
                    await self._look.wait()
            self._look.clear()

    async def _take_over(self, key: CopyKey, headers: Pairs | None = None) -> None:
        """Complete or end a copy whose replica is gone, unless another takes it first."""
        if self._makers.closing or key in self._makers.by_key:
            return
        taken = await self._store.take(key)
        if taken is None:
            return
        log.info("a run is taken over", response_id=key.response_id)
        if headers is None and (remote := self._remotes.get(key)) is not None:
            headers = remote.headers
        if taken.cancelled and read_meta(taken.info.meta).mode != OBJECT:
            await self._makers.logged(self._recovery.cancel(taken.info))
        else:
            await self._recovery.take_care(taken.info, headers)
