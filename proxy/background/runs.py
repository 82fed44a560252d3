"""All runs of this process: begun, found again, cancelled, deleted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from proxy.background.maker import Answer
from proxy.background.makers import Makers
from proxy.background.meta import OBJECT, Meta, check_same, digest_of, not_found, read_meta
from proxy.background.recovery import Recovery
from proxy.background.run import State
from proxy.errors import UpstreamError
from proxy.store import CopyKey, Gone, StoreError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from proxy.background.maker import Maker
    from proxy.background.makers import Counters
    from proxy.background.run import Run, RunMode
    from proxy.settings import Settings
    from proxy.store import CopyInfo, Store, Tombstone
    from proxy.upstream.client import UpstreamClient
    from proxy.upstream.headers import Pairs

__all__ = ["Begun", "Runs"]

log = structlog.stdlib.get_logger("lastword")


@dataclass(frozen=True)
class Begun:
    """A run that has begun, and the headers that upstream's stream came with."""

    run: Run
    headers: Pairs | None


class Runs:
    """The runs that this process makes, and the copies of those that have ended."""

    def __init__(
        self, settings: Settings, client: UpstreamClient, store: Store, counters: Counters
    ) -> None:
        self.store = store
        self._counters = counters
        self._makers = Makers(settings, client, store, counters)
        self._recovery = Recovery(
            self._makers,
            store,
            headers=[(b"host", client.origin_host)],
            copy_ttl_s=settings.copy_ttl_s,
        )
        self._begun: dict[CopyKey, tuple[str, Maker]] = {}  # with a client-chosen id, by it

    async def start(self) -> None:
        """Take care of what an earlier process left open, and begin to expire copies."""
        await self._recovery.start()

    async def aclose(self, reason: str = "The proxy is shutting down.") -> None:
        """End the runs that live by this process, leave vLLM its own, store what is pending."""
        self._recovery.stop()
        await self._makers.aclose(reason)
        try:
            await self.store.aclose()
        except StoreError as error:  # a full disk, say: the rest must still be closed
            log.warning("the store could not be closed properly", error=str(error))

    async def begin(
        self,
        mode: RunMode,
        owner: str,
        *,
        path: bytes,
        target: bytes,
        headers: Pairs,
        body: bytes,
        asked: bytes,
        request_id: str | None,
    ) -> Begun | Answer:
        """Begin a run, or find the one that was begun with the same ``request_id`` and body.

        ``body`` is what goes up, ``asked`` what the client sent.  Returns once the response has
        an id, or with upstream's answer if that is no stream.  Raises ``BadRequestError`` if the
        id is taken by another body, ``UpstreamError`` if upstream fails before the response has
        an id.
        """
        digest = digest_of(asked)
        wanted = CopyKey(owner, request_id) if request_id is not None else None
        begun = self._begun.get(wanted) if wanted is not None else None
        if begun is not None and not begun[1].refused:
            check_same(begun[0], digest)
            return await self._await_begun(begun[1])
        meta = Meta(mode.value, digest, path.decode("latin-1")).encode()
        maker = self._makers.new(mode, owner, meta, path, headers)
        if wanted is not None:
            self._begun[wanted] = (digest, maker)
        self._makers.own(self._make(maker, maker.create(target, body), wanted))
        return await self._await_begun(maker)

    async def find(self, owner: str, response_id: str) -> Run | CopyInfo | Tombstone | None:
        """Find what an owner may see of a response; None if it was never ours.

        Raises ``BadRequestError`` (404) for another owner's.
        """
        key = CopyKey(owner, response_id)
        if (maker := self._makers.by_key.get(key)) is not None:
            return maker.run
        found = await self.store.get(key)
        if (
            maker := self._makers.by_key.get(key)
        ) is not None:  # taken up since
            return maker.run
        if found is None and (
            await self.store.known(response_id)
            or any(other.response_id == response_id for other in self._makers.by_key)
        ):
            raise not_found(response_id)
        return found

    async def adopt(self, info: CopyInfo, headers: Pairs) -> Run | CopyInfo:
        """Take up an open copy with its owner's headers; return the run, or what is known."""
        return await self._recovery.adopt(info, headers)

    async def keep_owner(self, owner: str, response_id: str, asked: bytes) -> None:
        """Remember whose a response is that vLLM keeps itself, and the body it was asked for."""
        key = CopyKey(owner, response_id)
        try:
            meta = Meta(OBJECT, digest_of(asked)).encode()
            if await self.store.create(key, meta=meta, snapshot=b"{}") is None:
                await self.store.end(key)
        except StoreError as error:
            self._counters.count_dropped_copy("store")
            log.warning("an owner could not be kept", response_id=response_id, error=str(error))

    async def cancel(self, run: Run) -> None:
        """End a run as cancelled, and upstream's generation with it."""
        run.cancel()
        if run.key is not None and (maker := self._makers.by_key.get(run.key)) is not None:
            await maker.stop(State.ENDED)

    async def delete(self, key: CopyKey) -> None:
        """Remove an ended copy; what is left says that it was deleted."""
        await self.store.drop(key, Gone.DELETED)

    @staticmethod
    def check_same(meta: bytes, asked: bytes) -> None:
        """Check that a copy was asked for with the same body; raises ``BadRequestError``."""
        check_same(read_meta(meta).body, digest_of(asked))

    # Inside.

    async def _await_begun(self, maker: Maker) -> Begun | Answer:
        """Wait for the response's id; the client that waits may leave without harm to the run."""
        begun = await asyncio.shield(maker.started)
        if isinstance(begun, Answer):
            return begun
        await asyncio.shield(maker.run.created)
        if maker.run.key is None:
            raise UpstreamError(
                502, "The upstream server's event stream ended before the response was created."
            )
        return Begun(maker.run, begun)

    async def _make(
        self, maker: Maker, making: Coroutine[None, None, None], wanted: CopyKey | None
    ) -> None:
        try:
            await making
        finally:
            if wanted is not None and self._begun.get(wanted, (None, None))[1] is maker:
                del self._begun[wanted]
            maker.give_up()
            self._makers.forget(maker)
