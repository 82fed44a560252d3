"""All runs of this process: begun, found again, cancelled, deleted."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import structlog

from proxy.background.answer import Answer
from proxy.background.feed import State
from proxy.background.makers import Makers, drop_reason
from proxy.background.meta import (
    OBJECT,
    Meta,
    check_same,
    digest_of,
    is_object,
    not_found,
    read_meta,
)
from proxy.background.recovery import Recovery
from proxy.background.remote import RemoteRun
from proxy.background.replicas import Replicas
from proxy.errors import UpstreamError
from proxy.store import CopyInfo, CopyKey, Gone, StoreError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from proxy.background.maker import Maker
    from proxy.background.makers import Counters
    from proxy.background.run import Run, RunMode
    from proxy.core.held_bytes import HeldBytes
    from proxy.settings import Settings
    from proxy.store import Store, Tombstone
    from proxy.store.shared import SharedStore
    from proxy.upstream.client import UpstreamClient
    from proxy.upstream.headers import Pairs

__all__ = ["Begun", "Runs"]

_CLAIM_POLL_S = 0.05

log = structlog.stdlib.get_logger("lastword")


@dataclass(frozen=True)
class Begun:
    """A run that has begun, and the headers that upstream's stream came with."""

    run: Run
    headers: Pairs | None


class Runs:
    """The runs that this process makes, and the copies of those that have ended."""

    def __init__(
        self,
        settings: Settings,
        client: UpstreamClient,
        store: Store,
        counters: Counters,
        held: HeldBytes,
    ) -> None:
        self.store = store
        self._counters = counters
        self._makers = Makers(settings, client, store, counters, held)
        shared = cast("SharedStore", store) if settings.shares_store else None
        self._recovery = Recovery(
            self._makers,
            store,
            shared,
            headers=[(b"host", client.origin_host)],
            copy_ttl_s=settings.copy_ttl_s,
        )
        self._shared = shared
        self._replicas = (
            Replicas(self._makers, self._recovery, shared, lease_s=settings.lease_s)
            if shared is not None
            else None
        )
        self._begun: dict[CopyKey, tuple[str, Maker]] = {}  # with a client-chosen id, by it

    @property
    def active(self) -> int:
        """How many runs are being made."""
        return self._makers.active

    async def start(self) -> None:
        """Take care of what an earlier process left open, and begin to expire copies."""
        await self._recovery.start()
        if self._replicas is not None:
            await self._replicas.start()

    async def aclose(self, reason: str = "The proxy is shutting down.") -> None:
        """End the runs that live by this process, leave vLLM its own, store what is pending."""
        self._recovery.stop()
        if self._replicas is not None:
            self._replicas.stop()
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
    ) -> Begun | Answer | None:
        """Begin a run, or find the one that was begun with the same ``request_id`` and body.

        ``body`` is what goes up, ``asked`` what the client sent.  Returns once the response has
        an id, or with upstream's answer if that is no stream; None if another replica has begun
        it: then its copy is there.  Raises ``BadRequestError`` if the id is taken by another body,
        ``UpstreamError`` if upstream fails before the response has an id, ``StoreError`` if a
        shared store cannot keep it.
        """
        digest = digest_of(asked)
        wanted = CopyKey(owner, request_id) if request_id is not None else None
        if self._shared is not None and wanted is None:
            await self._shared.size()  # no run is begun where it is known that it cannot be kept
        while wanted is not None:
            begun = self._begun.get(wanted)
            if begun is not None and not begun[1].refused:
                check_same(begun[0], digest)
                return await self._await_begun(begun[1])
            claimed = await self._shared.claim(wanted, digest) if self._shared else None
            if claimed is None:
                break
            if claimed.digest is None:
                return None
            check_same(claimed.digest, digest)
            await asyncio.sleep(_CLAIM_POLL_S)
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
        if (maker := self._makers.by_key.get(key)) is not None:  # taken up since
            return maker.run
        if found is None and (
            await self.store.known(response_id)
            or any(other.response_id == response_id for other in self._makers.by_key)
        ):
            raise not_found(response_id)
        return found

    async def adopt(
        self, info: CopyInfo, headers: Pairs, *, follows: bool = True
    ) -> Run | RemoteRun | CopyInfo:
        """Take up an open copy with its owner's headers; return the run, or what is known.

        Whoever gets another replica's run enters its ``followed`` at once; who does not follow
        gets what is known.
        """
        if self._replicas is None:
            return await self._recovery.adopt(info, headers)
        if is_object(info):
            return info
        return (
            self._replicas.join(info, headers) if follows else self._replicas.visit(info, headers)
        )

    async def rejoin(
        self, key: CopyKey, headers: Pairs
    ) -> Run | RemoteRun | CopyInfo | Tombstone | None:
        """Find a run again that another replica has taken over, or what has become of it."""
        found = await self.store.get(key)
        if isinstance(found, CopyInfo) and found.ended_at is None:
            return await self.adopt(found, headers)
        return found

    async def settled(self, info: CopyInfo, headers: Pairs) -> CopyInfo | Tombstone | None:
        """Return what has become of an open copy whose run is over on another replica."""
        if self._replicas is None:
            return info
        await self._replicas.settle(info, headers)
        return await self.store.get(info.key)

    async def keep_owner(self, owner: str, response_id: str, asked: bytes) -> None:
        """Remember whose a response is that vLLM keeps itself, and the body it was asked for."""
        key = CopyKey(owner, response_id)
        try:
            meta = Meta(OBJECT, digest_of(asked)).encode()
            if await self.store.create(key, meta=meta, snapshot=b"{}") is None:
                await self.store.end(key)
        except StoreError as error:
            self._counters.count_dropped_copy(drop_reason(error))
            log.warning("an owner could not be kept", response_id=response_id, error=str(error))

    async def cancel(self, run: Run | RemoteRun) -> Run | CopyInfo | Tombstone | None:
        """End a run as cancelled, and upstream's generation with it; return what it is then."""
        if isinstance(run, RemoteRun):
            if self._replicas is None:
                raise RuntimeError("only a shared store has runs of other replicas")
            return await self._replicas.cancel(run)
        run.cancel()
        if run.key is not None and (maker := self._makers.by_key.get(run.key)) is not None:
            await maker.stop(State.ENDED)
        return run

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
        if self._shared is not None and (error := await maker.run.kept()) is not None:
            await maker.abandon(f"The response cannot be kept: {error}")
            raise error
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
            if wanted is not None and self._shared is not None:
                with suppress(StoreError):  # a claim that is not renewed ends by itself
                    await self._shared.unclaim(wanted)
