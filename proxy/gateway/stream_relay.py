"""One corrected event stream on its way: upstream's chunks in, whole events to the client.

Each chunk goes from upstream's socket through the corrector into the client's transport in
one callback; no task is woken for it.  What ends the stream is decided here: the terminal
event, or the loss of upstream.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import httpx

from proxy.core.content_coding import PIECE_BYTES, InflateError, Inflater
from proxy.core.corrector import Corrector, Mode
from proxy.core.outcome import Outcome, outcome_of
from proxy.gateway.heartbeat import Heartbeat
from proxy.gateway.large_events import LargeEvents
from proxy.settings import OnLostUpstream
from proxy.upstream.client import lost_message
from proxy.upstream.silence import SilenceLimit

if TYPE_CHECKING:
    from proxy.core.held_bytes import HeldBytes
    from proxy.core.progress import Seen
    from proxy.gateway.downstream import Downstream
    from proxy.settings import Settings
    from proxy.upstream.transport import UpstreamStream

__all__ = ["StreamRelay"]

# After the terminal event: how long the client's body stays open for a [DONE] or a CR's LF,
# and how much of what upstream still sends is read to keep its connection.
END_WAIT_S = 0.2
DRAIN_S = 1.0
DRAIN_BYTES = 64 * 1024


class StreamRelay:
    """Relay one event stream to one client.

    ``corrector`` tells afterwards what was seen, ``outcome`` how it ended and ``lost`` what broke
    it; ``first_event_at`` is the loop's time of upstream's first bytes.
    """

    __slots__ = (
        "_broken_off",
        "_down",
        "_drained",
        "_end_timer",
        "_ends_itself",
        "_heartbeat",
        "_large_events",
        "_loop",
        "_on_lost",
        "_outcome",
        "_silence",
        "_stop_reason",
        "_stream",
        "_time",
        "_write",
        "_writer",
        "corrector",
        "first_event_at",
        "lost",
    )

    def __init__(
        self,
        down: Downstream,
        stream: UpstreamStream,
        *,
        mode: Mode,
        settings: Settings,
        held: HeldBytes,
    ) -> None:
        self._down = down
        self._writer = down.writer
        self._write = down.writer.write
        self._stream = stream
        self._on_lost = settings.on_lost_upstream
        self._stop_reason: str | None = None
        self._ends_itself = mode is Mode.ON
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._silence = SilenceLimit(settings.upstream_idle_s, held_back=self._is_held_back)
        self._end_timer: asyncio.TimerHandle | None = None
        self._drained = 0
        self.lost: Exception | None = None
        self.corrector = Corrector(
            mode, max_event_bytes=settings.max_event_bytes, share=held.share()
        )
        self._large_events = LargeEvents(
            self.corrector,
            deliver=self._take_seen,
            again=self._judge,
            hold=stream.pause,
            go_on=self._go_on,
            give_up=partial(self._silence.end_after, 0),
            share=held.share(),
        )
        self._broken_off = False
        self._outcome: Outcome | None = None  # until the end is reached
        self.first_event_at: float | None = None
        self._heartbeat = Heartbeat(
            self._writer,
            self.corrector,
            every_s=settings.heartbeat_s if mode is Mode.ON else 0,
            kind=settings.heartbeat_kind,
        )

    @property
    def outcome(self) -> Outcome:
        """How the stream ended; what the proxy wrote at its end does not count."""
        return self._outcome or outcome_of(self.corrector.terminal) or Outcome.CLIENT_GONE

    async def run(self, *, coding: bytes = b"") -> None:
        """Relay until the stream has ended, one way or the other; the client's body is ended.

        ``coding`` is the compression to be undone, if there is one.
        """
        try:
            async with self._silence:
                with self._heartbeat:
                    if coding:
                        await self._pull_compressed(coding)
                    else:
                        await self._down.pipe(self._stream, self._take, self._take_http_chunk)
                    await self._large_events.settled()
        except (TimeoutError, httpx.TransportError, InflateError) as error:
            await self._large_events.settled()  # it may be the end that is looked at
            if not (self.corrector.ended and self._ends_itself):
                self.lost = error
            self._broken_off = isinstance(error, httpx.TransportError)
        finally:
            if self._end_timer is not None:
                self._end_timer.cancel()
        self._finish()

    def close(self) -> None:
        """Hold nothing more of the stream; harmless when repeated."""
        self._large_events.close()
        self.corrector.close()

    def stop(self, reason: str) -> None:
        """End the stream now, as one that was lost, and tell the client why."""
        self._stop_reason = reason
        self._silence.end_after(0)

    async def _pull_compressed(self, coding: bytes) -> None:
        inflater = Inflater(coding)
        async for chunk in self._stream:
            for piece in inflater.feed(chunk):
                self._take(piece)
                await self._large_events.settled()
                await self._writer.drain()
                if len(piece) == PIECE_BYTES:
                    await asyncio.sleep(0)  # there is more: the others' turn
                if not self.corrector.between_events:
                    inflater.refuse_bomb()

    def _take(self, chunk: bytes) -> None:
        """Take one chunk from upstream's socket."""
        self._silence.heard_at = now = self._time()
        if self.first_event_at is None:
            self.first_event_at = now
        if self.corrector.take_plain(chunk) is not None:
            self._write(chunk)
            return
        if not self._ends_itself:  # observed: the bytes pass as they came
            self._write(chunk)
        self._judge(chunk)

    def _judge(self, chunk: bytes) -> None:
        if self.corrector.terminal is None:
            self._large_events.take(chunk)
        else:
            self._take_after_end(chunk)

    def _take_seen(self, seen: list[Seen]) -> None:
        """Take what the corrector made of a chunk, at once or after a long look."""
        self._silence.heard_at = self._time()
        self._deliver(seen)
        # What is only observed has no end of ours.
        if self._ends_itself and self.corrector.terminal is not None:
            self._take_end()

    def _deliver(self, seen: list[Seen]) -> None:
        if not self._ends_itself:
            return
        if len(seen) == 1:
            self._write(seen[0].raw)
        else:
            self._write(b"".join([one.raw for one in seen]))

    def _take_http_chunk(self, http_chunk: bytes) -> int:
        """Take a read that is one whole HTTP chunk, as most are, or leave it to the parser."""
        size = self.corrector.take_http_chunk(http_chunk)
        if size:
            time = self._time  # a local: Python calls what lies in a slot the slow way
            self._silence.heard_at = now = time()
            self._writer.write_http_chunk(http_chunk, size, now)
        return size

    def _is_held_back(self) -> bool:
        return self._writer.paused or self._large_events.looking

    def _go_on(self) -> None:
        if not self._writer.paused:
            self._stream.resume()

    def _take_end(self) -> None:
        """Note that the terminal event was written: the client's body ends soon."""
        self._end_timer = self._loop.call_later(END_WAIT_S, self._writer.end)
        self._silence.end_after(END_WAIT_S + DRAIN_S)
        if self.corrector.done:
            self._writer.end()

    def _take_after_end(self, chunk: bytes) -> None:
        """Take what comes behind the terminal event."""
        if self._writer.ended:
            self._drained += len(chunk)
            if self._drained > DRAIN_BYTES:  # upstream sends on and on
                self._silence.end_after(0)
            return
        self._deliver(self.corrector.feed_blocks(chunk))
        if self._ends_itself and self.corrector.done:
            self._writer.end()

    @property
    def _is_empty_replay(self) -> bool:
        """Whether this was a replay from behind the last event, which is empty and ends well."""
        return self._down.method == "GET" and self.lost is None and not self.corrector.events

    @property
    def _failed_and_cut(self) -> bool:
        """Whether upstream, another Lastword, ended a lost stream in the way of ``failed_cut``."""
        terminal = self.corrector.terminal
        return self._broken_off and terminal is not None and terminal.name == "response.failed"

    @property
    def _without_terminal(self) -> Outcome:
        """How a stream ended whose terminal event upstream has not sent."""
        if self._is_empty_replay:
            return Outcome.COMPLETED
        return Outcome.LOST if self._stop_reason is None else Outcome.STOPPED

    def _finish(self) -> None:
        """End the client's body as the stream ended."""
        corrector = self.corrector
        if self.lost is None:
            self._writer.write(corrector.finish())
        self._outcome = outcome_of(corrector.terminal) or self._without_terminal
        if not self._ends_itself:  # observed: the end is upstream's own
            if self.lost is None:
                self._writer.end()
            else:
                self._writer.cut()
        elif self._failed_and_cut:
            self._writer.cut()
        elif corrector.ended or self._is_empty_replay:
            self._writer.end()
        elif self._on_lost is OnLostUpstream.ABORT:
            self._writer.cut()
        else:
            failure = corrector.fail(self._stop_reason or lost_message(self.lost))
            self._writer.write(failure)
            if failure and self._on_lost is OnLostUpstream.FAILED:
                self._writer.end()
            else:
                self._writer.cut()
