"""Blocks on their way to followers: those still in memory, and who waits for the next ones."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from contextlib import nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from proxy.store import Block, CopyKey, Store

__all__ = ["Feed", "Place", "Sink", "State"]

# What is kept in memory of blocks that the store has, so that followers close behind need no read.
_TAIL_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024


class State(StrEnum):
    """How far a run is, for its followers."""

    OPEN = "open"
    ENDED = "ended"
    ELSEWHERE = "elsewhere"  # this process stops following it; vLLM makes it still
    MOVED = "moved"  # another replica has taken it over: its copy says how it goes on
    GONE = "gone"  # its copy is gone, and with it what comes next


class Place:
    """Where a follower stands that changes from one feed to another.

    ``index`` is exact as far as both feeds are surely the same; beyond that the number of the last
    event that it has got is what counts.
    """

    __slots__ = ("index", "number")

    def __init__(self, index: int | None, number: int) -> None:
        self.index = index
        self.number = number


class Sink(Protocol):
    """Where a follower's bytes go: the client's side of a response."""

    @property
    def paused(self) -> bool:
        """Whether the client takes no more at the moment."""

    def write(self, data: bytes) -> None:
        """Write whole blocks."""

    def write_http_chunk(self, http_chunk: bytes, size: int, now: float) -> None:
        """Write one block, which is the ``size`` bytes of data that a whole HTTP chunk holds.

        ``now`` is the loop's time.
        """

    async def drain(self) -> None:
        """Wait until the client takes more."""


class _Live:
    """A follower that has all there is and gets the next events as they come."""

    __slots__ = ("index", "sink", "woken")

    def __init__(self, index: int, sink: Sink, woken: asyncio.Future[None]) -> None:
        self.index = index
        self.sink = sink
        self.woken = woken

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class _Full:
    """A sink that takes nothing: its follower is only woken."""

    paused = True

    def write(self, data: bytes) -> None:
        """Take nothing."""

    def write_http_chunk(self, http_chunk: bytes, size: int, now: float) -> None:
        """Take nothing."""

    async def drain(self) -> None:
        """Wait for nothing."""


_FULL = _Full()


class Feed:
    """A run's blocks as its followers read them.

    The blocks are numbered from 0; ``first`` is the index of the first that is still in memory.
    """

    def __init__(self, store: Store, key: CopyKey | None = None) -> None:
        self.key = key
        self.state = State.OPEN
        self.copy_lost = False
        self.first = 0
        self.total = 0
        self._store = store
        self._number = -1
        self._tail: list[Block] = []
        self._tail_bytes = 0
        self._stored = 0
        self._live: set[_Live] = set()

    def followed(self) -> AbstractContextManager[None]:
        """Enter this while somebody follows."""
        return nullcontext()

    @property
    def last_number(self) -> int:
        """The number of the last event, -1 before the first."""
        return self._number

    async def index_after(self, number: int) -> int:
        """Tell the index of the first block behind the event of this number, which may be to come.

        A cursor is ahead of a run whose last blocks a crash has lost, until vLLM has told them
        again.
        """
        while number > self._number and self.state is State.OPEN:
            await self.live(self.total, _FULL)
        return await self._index_after(number)

    def read(self, index: int) -> tuple[bytes, int]:
        """Return blocks in memory from ``index`` on, and the index behind them."""
        pieces: list[bytes] = []
        size = 0
        for block in self._tail[index - self.first :]:
            pieces.append(block.raw)
            size += len(block.raw)
            if size >= _READ_BYTES:
                break
        return b"".join(pieces), index + len(pieces)

    async def live(self, index: int, sink: Sink) -> int:
        """Write to ``sink`` what comes from now on; return once it is full or the run is over.

        ``index`` is what the follower has; what it has then is returned.
        """
        woken = asyncio.get_running_loop().create_future()
        live = _Live(index, sink, woken)
        self._live.add(live)
        try:
            await woken
        finally:
            self._live.discard(live)
        return live.index

    async def index_of(self, place: Place) -> int:
        """Tell the index that a place of another feed of the same run has here."""
        return await self.index_after(place.number) if place.index is None else place.index

    def place(self, index: int) -> Place:
        """Tell where a follower stands that has got what is before ``index``."""
        if index <= self._stored:
            return Place(index, self._number)
        return Place(None, self._tail[index - 1 - self.first].number)

    # Inside.

    async def _index_after(self, number: int) -> int:
        """Tell the index of the first block behind the event of this number."""
        oldest = self._tail[0].number if self._tail else self._number
        if number >= oldest or self.first == 0 or self.key is None:
            return self.first + bisect_right(self._tail, number, key=lambda block: block.number)
        return await self._store.index_after(self.key, number)

    def _deliver(self, data: bytes, count: int) -> None:
        for live in list(self._live):
            if live.sink.paused:  # it reads on by itself once it can
                self._live.discard(live)
                live.wake()
            else:
                live.sink.write(data)
                live.index += count

    def _deliver_http_chunk(self, http_chunk: bytes, size: int, now: float) -> None:
        """Deliver one block in the HTTP chunk that brought it."""
        for live in list(self._live):
            if live.sink.paused:
                self._live.discard(live)
                live.wake()
            else:
                live.sink.write_http_chunk(http_chunk, size, now)
                live.index += 1

    def _forget_stored(self, stored: int) -> None:
        """Let go of blocks that the store has, but for the last few."""
        self._stored = stored
        drop = 0
        while self.first + drop < stored and self._tail_bytes > _TAIL_BYTES:
            self._tail_bytes -= len(self._tail[drop].raw)
            drop += 1
        if drop:
            del self._tail[:drop]
            self.first += drop

    def _wake_all(self) -> None:
        """Let every follower look again."""
        for live in list(self._live):
            live.wake()
