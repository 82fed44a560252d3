"""All runs of this process: begun, found again, cancelled, deleted, taken up after a restart."""

from __future__ import annotations

import asyncio
import hashlib
import re
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import structlog

from proxy.background.maker import Answer, Maker, MakerLimits
from proxy.background.run import FlawedStreamError, Run, RunMode, State
from proxy.core.outcome import Outcome
from proxy.core.responses import judge, may_be_terminal
from proxy.errors import BadRequestError, UpstreamError
from proxy.store import (
    CopyInfo,
    CopyKey,
    Gone,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    Tombstone,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from proxy.core.held_bytes import HeldBytes
    from proxy.settings import Settings
    from proxy.store import Store
    from proxy.upstream.client import UpstreamClient
    from proxy.upstream.headers import Pairs

__all__ = ["OBJECT", "Begun", "Counters", "Meta", "Runs"]

RESPONSE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
OBJECT = "object"
_SWEEP_S = 30.0
_LAST_BLOCKS = 8
_CLOSE_S = 5.0
INTERRUPTED = "The proxy was restarted before the response was finished."
# Why copies are dropped, in words for a metric; any other reason is "lost".
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


class Meta(msgspec.Struct, frozen=True):
    """What a copy is kept with: who made it go on, and the body it was asked for with.

    ``mode`` is a ``RunMode``, or ``OBJECT`` for a response that vLLM keeps itself: only its owner
    is known here.
    """

    mode: str
    body: str = ""
    path: str = ""


_meta = msgspec.json.Decoder(Meta)


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
        self._settings = settings
        self._client = client
        self.store = store
        self._counters = counters
        self._held = held
        self._makers: dict[CopyKey, Maker] = {}
        self._begun: dict[CopyKey, tuple[str, Maker]] = {}  # with a client-chosen id, by it
        self._running: set[Maker] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._waiting: dict[CopyKey, float] = {}  # since when copies wait for credentials
        self._closing = False

    @property
    def active(self) -> int:
        """How many runs are being made."""
        return len(self._running)

    async def start(self) -> None:
        """Take care of what an earlier process left open, and begin to expire copies."""
        for info in await self.store.open_copies():
            mode = _meta.decode(info.meta).mode
            if mode == OBJECT or await self._is_whole(info):
                await self.store.end(info.key)
            elif mode == RunMode.UPSTREAM:
                self._own(self._take_up(info, [(b"host", self._client.origin_host)]))
            else:  # before anyone can ask for it
                await self._logged(self._end_interrupted(info))
        self._sweeper = self._own(self._sweep())

    async def aclose(self, reason: str = "The proxy is shutting down.") -> None:
        """End the runs that live by this process, leave vLLM its own, store what is pending."""
        self._closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for maker in list(self._running):
            await maker.stop(State.ELSEWHERE, reason)
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
        digest = hashlib.sha256(asked).hexdigest()
        wanted = CopyKey(owner, request_id) if request_id is not None else None
        begun = self._begun.get(wanted) if wanted is not None else None
        if begun is not None and not begun[1].refused:
            _check_same(begun[0], digest)
            return await self._await_begun(begun[1])
        meta = msgspec.json.encode(Meta(mode.value, digest, path.decode("latin-1")))
        maker = self._new(mode, owner, meta, path, headers)
        if wanted is not None:
            self._begun[wanted] = (digest, maker)
        self._own(self._make(maker, maker.create(target, body), wanted))
        return await self._await_begun(maker)

    async def find(self, owner: str, response_id: str) -> Run | CopyInfo | Tombstone | None:
        """Find what an owner may see of a response; None if it was never ours.

        Raises ``BadRequestError`` (404) for another owner's.
        """
        key = CopyKey(owner, response_id)
        if (maker := self._makers.get(key)) is not None:
            return maker.run
        found = await self.store.get(key)
        if (maker := self._makers.get(key)) is not None:  # taken up while the store was asked
            return maker.run
        if found is None and (
            await self.store.known(response_id)
            or any(other.response_id == response_id for other in self._makers)
        ):
            raise not_found(response_id)
        return found

    async def adopt(self, info: CopyInfo, headers: Pairs) -> Run | CopyInfo:
        """Take up an open copy with its owner's headers; return the run, or what is known."""
        taken = info.key in self._makers or self._closing
        if not taken and _meta.decode(info.meta).mode == RunMode.UPSTREAM:
            self._own(self._take_up(info, headers))
            await asyncio.sleep(0)
        maker = self._makers.get(info.key)
        return maker.run if maker is not None else info

    async def keep_owner(self, owner: str, response_id: str, asked: bytes) -> None:
        """Remember whose a response is that vLLM keeps itself, and the body it was asked for."""
        key = CopyKey(owner, response_id)
        try:
            meta = msgspec.json.encode(Meta(OBJECT, hashlib.sha256(asked).hexdigest()))
            if await self.store.create(key, meta=meta, snapshot=b"{}") is None:
                await self.store.end(key)
        except StoreError as error:
            self._counters.count_dropped_copy(_DROP_REASONS.get(type(error), "lost"))
            log.warning("an owner could not be kept", response_id=response_id, error=str(error))

    async def cancel(self, run: Run) -> None:
        """End a run as cancelled, and upstream's generation with it."""
        run.cancel()
        if run.key is not None and (maker := self._makers.get(run.key)) is not None:
            await maker.stop(State.ENDED)

    async def delete(self, key: CopyKey) -> None:
        """Remove an ended copy; what is left says that it was deleted."""
        await self.store.drop(key, Gone.DELETED)

    @staticmethod
    def check_same(meta: bytes, asked: bytes) -> None:
        """Check that a copy was asked for with the same body; raises ``BadRequestError``."""
        _check_same(_meta.decode(meta).body, hashlib.sha256(asked).hexdigest())

    # Inside.

    def _new(self, mode: RunMode, owner: str, meta: bytes, path: bytes, headers: Pairs) -> Maker:
        run = Run(
            mode,
            store=self.store,
            max_event_bytes=self._settings.max_event_bytes,
            share=self._held.share(),
            on_dropped=self._drop,
            meta=meta,
        )
        maker = Maker(
            run,
            self._client,
            path=path,
            headers=headers,
            limits=MakerLimits(
                idle_s=self._settings.upstream_idle_s,
                stall_check_s=self._settings.stall_check_s,
                down_s=self._settings.upstream_down_s,
            ),
        )

        def register(response_id: str) -> CopyKey:
            key = CopyKey(owner, response_id)
            self._makers[key] = maker
            return key

        run.on_created = register
        self._running.add(maker)
        return maker

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
            self._forget(maker)

    async def _take_up(self, info: CopyInfo, headers: Pairs) -> None:
        """Complete a copy that vLLM still makes from vLLM's own stream."""
        if info.key in self._makers:
            return
        meta = _meta.decode(info.meta)
        maker = self._new(
            RunMode.UPSTREAM, info.key.owner, info.meta, meta.path.encode("latin-1"), headers
        )
        self._makers[info.key] = maker
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
        finally:
            self._forget(maker)

    async def _is_whole(self, info: CopyInfo) -> bool:
        """Whether a copy holds its terminal event: only the mark that it has ended is missing."""
        start = max(0, info.blocks - _LAST_BLOCKS)
        async with aclosing(self.store.read(info.key, start)) as batches:
            async for batch in batches:
                if any(may_be_terminal(block.raw) and judge(block.raw) for block in batch):
                    return True
        return False

    async def _end_interrupted(self, info: CopyInfo, reason: str | None = None) -> None:
        """End a copy whose run died with the process that made it."""
        run = Run(
            RunMode(_meta.decode(info.meta).mode),
            store=self.store,
            max_event_bytes=self._settings.max_event_bytes,
            share=self._held.share(),
            on_dropped=self._drop,
            meta=info.meta,
        )
        run.resume(
            info.key, snapshot=info.snapshot, last_number=info.last_number, blocks=info.blocks
        )
        run.fail(reason or INTERRUPTED, Outcome.STOPPED)
        await run.close(State.ENDED)
        self._counters.count_run(run)

    async def _sweep(self) -> None:
        """Expire copies now and then, and give up those that nobody can take up any more."""
        pause_s = min(_SWEEP_S, max(1.0, self._settings.copy_ttl_s / 4))
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.store.expire()
                late = asyncio.get_running_loop().time() - self._settings.copy_ttl_s
                for key, since in list(self._waiting.items()):
                    info = await self.store.get(key)
                    if since > late or key in self._makers or not isinstance(info, CopyInfo):
                        continue
                    del self._waiting[key]
                    await self._end_interrupted(info, "The response was not taken up in time.")
            except StoreError as error:
                log.warning("the store could not be swept", error=str(error))

    def _own(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run ``work`` in a task that ``aclose`` awaits; what goes wrong in it is logged."""
        task = asyncio.create_task(self._logged(work))  # noqa: TID251 - aclose awaits it
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _logged(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception:
            log.exception("a background run failed inside the proxy")

    def _forget(self, maker: Maker) -> None:
        self._running.discard(maker)
        run = maker.run
        if run.key is not None and self._makers.get(run.key) is maker:
            del self._makers[run.key]
        if run.key is not None:
            self._counters.count_run(run)

    def _drop(self, run: Run, error: Exception) -> None:
        """Tell of a copy that could not be kept, and leave no part of it behind."""
        reason = _DROP_REASONS.get(type(error), "lost")
        self._counters.count_dropped_copy(reason)
        log.warning(
            "a copy was dropped; its live stream goes on",
            response_id=run.key.response_id if run.key else None,
            reason=reason,
            error=str(error),
        )
        if run.key is not None and run.holds_copy:
            self._own(self._drop_stored(run.key))

    async def _drop_stored(self, key: CopyKey) -> None:
        try:
            await self.store.drop(key, Gone.DROPPED)
        except StoreError as error:
            log.warning("a dropped copy could not be removed", error=str(error))


def not_found(response_id: str) -> BadRequestError:
    """The 404 of an unknown id, in vLLM's words."""
    return BadRequestError(404, f"Response with id '{response_id}' not found.", param="response_id")


def _check_same(known: str, digest: str) -> None:
    if known != digest:
        raise BadRequestError(
            400,
            "A response with this request_id exists already, and it was asked for with another"
            " body. Send the same body to follow it, or choose another request_id.",
            param="request_id",
        )
