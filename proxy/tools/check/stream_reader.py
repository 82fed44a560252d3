"""One stream as it is read: its events, how it ended, how long nothing came."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING

import httpx

from proxy.core.event import parse_event
from proxy.core.event_stream import EventStreamDecoder
from proxy.core.responses import is_done_marker, judge, may_be_terminal, read_payload
from proxy.tools.check.report import NotAskedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from proxy.core.event import Event
    from proxy.core.responses import Terminal

__all__ = ["Ending", "StreamReader"]

_MOST_BYTES = 16 * 1024 * 1024


class Ending(StrEnum):
    """How a stream stopped."""

    CLEAN = "clean"
    CUT = "cut"
    SILENT = "silent"  # still open, and nothing came for as long as was waited


class StreamReader:
    """Reads one event stream with patience that has an end.

    ``blocks`` are the events so far; blocks without data and ``[DONE]`` are none.  ``behind``
    counts those that came after the first terminal event.  ``ending`` is None while more may come.
    Comments, such as a proxy's signs of life, do not count as news.
    """

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._decoder = EventStreamDecoder(_MOST_BYTES)
        self._size = 0
        self.blocks: list[bytes] = []
        self.terminals: list[Terminal] = []
        self.behind = 0
        self.response_id: str | None = None
        self.ending: Ending | None = None

    @property
    def terminal(self) -> Terminal | None:
        """The first terminal event, if one has come."""
        return self.terminals[0] if self.terminals else None

    async def read(
        self, silence_s: float, *, until: Callable[[StreamReader], bool] = lambda _: False
    ) -> None:
        """Read on until the stream stops, ``until`` holds, or no event came for ``silence_s``."""
        if self.ending is not None or until(self):
            return
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(silence_s) as limit:
                async for chunk in self._chunks:
                    if self._take(chunk):
                        limit.reschedule(loop.time() + silence_s)
                    if until(self):
                        return
            self.ending = Ending.CLEAN
        except TimeoutError:
            self.ending = Ending.SILENT
        except httpx.TransportError:
            self.ending = Ending.CUT

    async def read_to_end(self, silence_s: float, ending_s: float) -> None:
        """Read all: up to the terminal event with one patience, and from there with another."""
        await self.read(silence_s, until=lambda reader: bool(reader.terminals))
        await self.read(ending_s)

    def _take(self, chunk: bytes) -> bool:
        """Take a chunk and tell whether it brought an event."""
        self._size += len(chunk)
        if self._size > _MOST_BYTES:
            raise NotAskedError(f"the stream is longer than {_MOST_BYTES >> 20} MiB")
        news = False
        for block in self._decoder.feed(chunk):
            event = parse_event(block)
            if event.data:
                self._look_at(block, event)
                news = True
        return news

    def _look_at(self, block: bytes, event: Event) -> None:
        if is_done_marker(event):
            return
        if self.terminals:
            self.behind += 1
        terminal = judge(block) if may_be_terminal(block) else None
        if terminal is not None:
            self.terminals.append(terminal)
        if self.response_id is None:
            payload = read_payload(event.payload())
            self.response_id = payload.response_id if payload is not None else None
        self.blocks.append(block)
