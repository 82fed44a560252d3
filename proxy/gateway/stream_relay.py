"""One corrected event stream on its way: upstream's chunks in, whole events to the client.

Each chunk goes from upstream's socket through the corrector into the client's transport in
one callback; no task is woken for it.  What ends the stream is decided here: the terminal
event, or the loss of upstream.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx

from proxy.core.content_coding import InflateError, Inflater
from proxy.core.corrector import Corrector, Mode
from proxy.settings import OnLostUpstream
from proxy.upstream.client import lost_message

if TYPE_CHECKING:
    from proxy.gateway.downstream import Downstream
    from proxy.upstream.transport import UpstreamStream

__all__ = ["StreamRelay"]

# After the terminal event: how long the client's body stays open for a [DONE] or a CR's LF,
# and how much of what upstream still sends is read to keep its connection.
END_WAIT_S = 0.2
DRAIN_S = 1.0
DRAIN_BYTES = 64 * 1024


class _DrainedEnoughError(Exception):
    """Upstream sends on and on after the terminal event."""


class StreamRelay:
    """Relay one event stream to one client; ``corrector`` tells afterwards what was seen."""

    def __init__(
        self,
        down: Downstream,
        stream: UpstreamStream,
        *,
        mode: Mode,
        max_event_bytes: int,
        idle_s: float,
        on_lost: OnLostUpstream,
    ) -> None:
        self._down = down
        self._writer = down.writer
        self._stream = stream
        self._on_lost = on_lost
        self._ends_itself = mode is Mode.ON
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._limit = asyncio.timeout(None)
        self._idle_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._drained = 0
        self.lost: Exception | None = None
        self.corrector = Corrector(mode, max_event_bytes=max_event_bytes)

    async def run(self, *, compressed: bool = False) -> None:
        """Relay until the stream has ended, one way or the other; the client's body is ended."""
        if self._idle_s:
            self._idle_timer = self._loop.call_later(self._idle_s, self._check_idle)
        try:
            async with self._limit:
                if compressed:
                    await self._pull_compressed()
                else:
                    await self._down.pipe(self._stream, self._take)
        except (TimeoutError, httpx.TransportError, InflateError) as error:
            self.lost = error
        except _DrainedEnoughError:
            pass
        finally:
            for timer in (self._idle_timer, self._end_timer):
                if timer is not None:
                    timer.cancel()
        self._finish()

    async def _pull_compressed(self) -> None:
        inflater = Inflater()
        async for chunk in self._stream:
            for piece in inflater.feed(chunk):
                self._take(piece)
                await self._writer.drain()

    def _take(self, chunk: bytes) -> None:
        """Take one chunk from upstream's socket."""
        self._heard_at = self._loop.time()
        corrector = self.corrector
        if self._writer.ended:
            self._drained += len(chunk)
            if self._drained > DRAIN_BYTES:
                raise _DrainedEnoughError
            return
        self._writer.write(corrector.feed(chunk))
        if corrector.terminal is not None and self._ends_itself:
            if corrector.done:
                self._writer.end()
            elif self._end_timer is None:
                self._end_timer = self._loop.call_later(END_WAIT_S, self._writer.end)
                self._limit.reschedule(self._heard_at + END_WAIT_S + DRAIN_S)

    def _check_idle(self) -> None:
        """Give upstream up if it has been silent too long; a client that is full is no silence."""
        now = self._loop.time()
        if self._writer.paused:
            self._heard_at = now
        if self.corrector.ended and self._ends_itself:
            return
        due = self._heard_at + self._idle_s
        if due <= now:
            self._limit.reschedule(now)
        else:
            self._idle_timer = self._loop.call_at(due, self._check_idle)

    def _finish(self) -> None:
        """End the client's body as the stream ended."""
        corrector = self.corrector
        if self.lost is None or corrector.ended:
            self._writer.write(corrector.finish())
        if not self._ends_itself:  # observed: the end is upstream's own
            if self.lost is None:
                self._writer.end()
            else:
                self._writer.cut()
        elif corrector.ended:
            self._writer.end()
        elif self._on_lost is OnLostUpstream.ABORT:
            self._writer.cut()
        else:
            failure = corrector.fail(lost_message(self.lost))
            self._writer.write(failure)
            if failure and self._on_lost is OnLostUpstream.FAILED:
                self._writer.end()
            else:
                self._writer.cut()
