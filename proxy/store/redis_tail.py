"""One blocking read for everything that this process follows, and for the news.

Why one: a connection per follower would be thousands.  An entry in a stream of our own wakes the
read when the set of followed copies changes.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog
from redis.exceptions import RedisError

from proxy.store import Block, StoreUnavailableError
from proxy.store.redis_keys import from_member
from proxy.store.redis_link import stop
from proxy.store.rows import decode_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from redis.asyncio import Redis

    from proxy.store.redis_keys import Keys
    from proxy.store.redis_link import Call, Link
    from proxy.store.shared import Listener, Watcher

__all__ = ["Tail"]

log = structlog.stdlib.get_logger("lastword")

_BLOCK_S = 2.0
_ROWS_AT_ONCE = 64
_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_LARGEST = 2**64 - 1
_WAKE_LASTS_S = 600.0


class _Watched:
    """A copy that somebody here follows: how many blocks they have, and how many there will be."""

    __slots__ = ("blocks", "total", "watcher")

    def __init__(self, blocks: int, watcher: Watcher) -> None:
        self.blocks = blocks
        self.total: int | None = None
        self.watcher = watcher


class Tail:
    """Tells watchers of their copies and the listener of the news.

    ``look_s``: so often every copy is looked at without waiting for news of it, since news may be
    lost.  ``patience_s``: after so long without the server watchers are told that it is over.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        listener: Listener,
        *,
        look_s: float,
        patience_s: float,
        look_call: Callable[[bytes], Call],
    ) -> None:
        self._link = link
        self._keys = keys
        self._listener = listener
        self._look_s = look_s
        self._patience_s = patience_s
        self._look_call = look_call
        self._client: Redis = link.blocking_client(_BLOCK_S)
        self._wake = keys.wake(secrets.token_hex(8))
        self._cursors: dict[bytes, bytes] = {}  # of the news and of the wake-up stream
        self._watched: dict[bytes, _Watched] = {}
        self._streams: dict[bytes, bytes] = {}  # a stream's name to its member
        self._fresh: set[bytes] = set()  # watched since the read last began
        self._waking: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reading = False

    def start(self) -> None:
        """Begin to read."""
        work = self._read_on(), self._look_on()
        self._tasks = [asyncio.create_task(one) for one in work]  # noqa: TID251 - see aclose

    async def aclose(self) -> None:
        """Stop reading; nobody is told any more."""
        await stop(*self._tasks, self._waking)
        self._watched.clear()
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    def watch(self, member: bytes, blocks: int, watcher: Watcher) -> None:
        """Tell the watcher what comes behind its first ``blocks`` blocks."""
        self._watched[member] = _Watched(blocks, watcher)
        self._streams[self._keys.events(member)] = member
        self._fresh.add(member)
        if self._waking is None:
            self._waking = asyncio.create_task(self._wake_up())  # noqa: TID251 - see aclose

    def unwatch(self, member: bytes) -> None:
        """Forget a watcher; the read that runs may still bring its blocks, to nobody."""
        if self._watched.pop(member, None) is not None:
            self._fresh.discard(member)
            del self._streams[self._keys.events(member)]

    # Inside.

    async def _wake_up(self) -> None:
        """Let the read begin again with what is new, and see what became of it before that."""
        with suppress(StoreUnavailableError):  # then the read fails too, and begins again with all
            while self._fresh:
                members, self._fresh = self._fresh, set()
                if self._reading:
                    await self._link.add(self._wake, lasts_s=_WAKE_LASTS_S)
                await self._look(members)
        self._waking = None

    async def _read_on(self) -> None:
        loop = asyncio.get_running_loop()
        away_since: float | None = None
        pause_s = _PAUSE_S
        while True:
            try:
                await self._read()
            except (RedisError, OSError, TimeoutError, StoreUnavailableError) as error:
                self._reading = False
                if not isinstance(error, StoreUnavailableError):
                    self._link.went_down(error)
                now = loop.time()
                away_since = now if away_since is None else away_since
                if now - away_since > self._patience_s:
                    self._tell_out_of_touch()
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            else:
                away_since = None
                pause_s = _PAUSE_S

    async def _read(self) -> None:
        if not self._cursors:  # news from now on
            last = await self._link.ask("XREVRANGE", self._keys.news, "+", "-", "COUNT", 1)
            self._cursors = {
                self._keys.news: last[0][0] if last else b"0-0",
                self._wake: b"0-0",
            }
        streams: dict[bytes, bytes] = dict(self._cursors)
        for stream, member in self._streams.items():
            streams[stream] = b"%d-%d" % (self._watched[member].blocks, _LARGEST)
        self._reading = True
        answer = await self._client.execute_command(  # type: ignore[no-untyped-call]
            *("XREAD", "COUNT", _ROWS_AT_ONCE, "BLOCK", int(_BLOCK_S * 1000), "STREAMS"),
            *streams,
            *streams.values(),
        )
        self._reading = False
        for stream, entries in answer or ():
            if stream in self._cursors:
                self._cursors[stream] = entries[-1][0]
            else:
                self._grow(stream, entries)
        for stream, entries in answer or ():  # what has ended has grown before
            if stream == self._keys.news:
                self._hear(entries)

    # What one entry holds must not end the reading of all.

    def _grow(self, stream: bytes, entries: Sequence[Any]) -> None:
        member = self._streams.get(stream)
        watched = self._watched.get(member) if member is not None else None
        if member is None or watched is None:
            return
        try:
            self._grow_one(member, watched, entries)
        except Exception:
            log.exception("a copy's stream holds what cannot be read", stream=stream)
            self._end(member, None)

    def _hear(self, entries: Sequence[Any]) -> None:
        for entry_id, fields in entries:
            try:
                self._hear_one(fields)
            except Exception:
                log.exception("news of other replicas cannot be read", entry=entry_id)

    def _grow_one(self, member: bytes, watched: _Watched, entries: Sequence[Any]) -> None:
        blocks: list[Block] = []
        for row_id, fields in entries:
            first = int(row_id.partition(b"-")[0]) - 1
            if first == watched.blocks + len(blocks):
                blocks += decode_row(fields[b"d"])
            elif first > watched.blocks + len(blocks):  # someone has trimmed the stream
                self._end(member, None)
                return
        watched.blocks += len(blocks)
        if blocks:
            watched.watcher.grown(blocks)
        if watched.total is not None and watched.blocks >= watched.total:
            self._end(member, watched.total)

    def _hear_one(self, told: Mapping[bytes, bytes]) -> None:
        kind, member = told.get(b"kind"), told.get(b"copy", b"")
        if kind == b"free":
            self._listener.orphaned()
        elif kind == b"cancel":
            self._listener.cancel_asked(from_member(member))
        elif kind == b"gone":
            self._end(member, None)
        elif kind == b"ended":
            self._end(member, int(told[b"extra"]))

    def _end(self, member: bytes, total: int | None) -> None:
        """Tell that a copy is gone (None) or has ended, once all its blocks are there."""
        watched = self._watched.get(member)
        if watched is None:
            return
        if total is None:
            self.unwatch(member)
            watched.watcher.gone()
        elif watched.blocks >= total:
            self.unwatch(member)
            watched.watcher.finished(total)
        else:
            watched.total = total

    async def _look_on(self) -> None:
        """Look at every copy now and then: it may have ended or gone without news."""
        while True:
            await asyncio.sleep(self._look_s)
            with suppress(StoreUnavailableError):
                await self._look(self._watched)

    async def _look(self, members: Iterable[bytes]) -> None:
        asked = list(members)
        answers = await self._link.run_all([self._look_call(m) for m in asked]) if asked else []
        for member, answer in zip(asked, answers, strict=True):
            if isinstance(answer, StoreUnavailableError):
                continue
            if not answer:
                self._end(member, None)
            elif answer[1]:
                self._end(member, int(answer[0]))

    def _tell_out_of_touch(self) -> None:
        for member, watched in list(self._watched.items()):
            self.unwatch(member)
            watched.watcher.out_of_touch()
