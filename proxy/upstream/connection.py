"""One connection to upstream: a socket, and at most one request and its response on it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Final, cast

from proxy.upstream.head_limit import HeadLimit
from proxy.upstream.response_parser import ResponseParser
from proxy.upstream.sockets import acknowledge_later, lost_error, unread

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.upstream.body import ChunkSink, UpstreamStream
    from proxy.upstream.request_encoder import OutgoingRequest

# Up to here head and body go out in one write: one system call, one packet for small requests.
_JOINED_WRITE_BYTES: Final = 64 * 1024


class Connection(asyncio.Protocol):
    """The asyncio protocol of one upstream socket.

    `release(connection)` is called when it may carry another request, `forget(connection)` once
    its socket is gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        release: Callable[[Connection], None],
        forget: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._release = release
        self._forget = forget
        self._transport: asyncio.Transport | None = None
        self.lost = loop.create_future()
        self.answered = False  # a byte of an answer to the last request had come
        self._parser: ResponseParser | None = None
        self._stream: UpstreamStream | None = None
        self.sink: Callable[[bytes], None] = _nowhere
        self.chunk_sink: ChunkSink | None = None
        self._answer: asyncio.Future[ResponseParser] | None = None
        self._paused = False  # reading
        self._writable: asyncio.Future[None] | None = None
        self._write_paused = False
        self._write_failed = False
        self._request_written = False
        self._head_limit: HeadLimit | None = None

    @property
    def usable(self) -> bool:
        """Whether a request can be sent now."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and self._stream is None

    @property
    def request_sent(self) -> bool:
        """Whether the whole request has left this process (over TLS: at least that it may have)."""
        return self._request_written and not self._write_paused and not self._write_failed

    def begin(
        self,
        outgoing: OutgoingRequest,
        stream: UpstreamStream,
        *,
        max_head_bytes: int,
        head_timeout_s: float | None,
    ) -> asyncio.Future[ResponseParser]:
        """Send a request; the future is done at the final response's head, or with the error."""
        self._stream = stream
        self._parser = ResponseParser(head_only=outgoing.head_only, max_head_bytes=max_head_bytes)
        self.sink = stream.feed
        self._request_written = False
        answer = self._answer = self._loop.create_future()
        if head_timeout_s is not None:
            self._head_limit = HeadLimit(
                self._loop, head_timeout_s, unsent=self._unsent, fail=self.fail
            )
        payload = outgoing.payload
        if payload is None:
            self._write(outgoing.head)
            stream.sender = self._loop.create_task(self._send_body(outgoing))
        elif len(payload) <= _JOINED_WRITE_BYTES:
            self._write(outgoing.head + payload)
            self._on_request_written()
        else:
            self._write(outgoing.head)
            self._write(payload)
            self._on_request_written()
        if self._transport is None:  # lost before it was used: nothing else would say so
            self._on_eof()
        return answer

    def set_reading(self, reading: bool) -> None:  # noqa: FBT001 - the verb says what is true
        """Read from the socket, or leave its bytes to hold the sender back."""
        transport = self._transport
        if transport is None or self._paused is not reading:
            return
        self._paused = not reading
        if reading:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def fail(self, error: BaseException) -> None:
        """End the exchange, if there is one, with `error`, and close the connection."""
        stream, answer = self._stream, self._answer
        if stream is not None:
            self._detach()
            if answer is not None and not answer.done():
                answer.set_exception(error)
            stream.end(error)
        self.close()

    def close(self) -> None:
        """Close the socket now, whatever is still to be written."""
        if self._transport is not None:
            self._transport.abort()

    # The callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # Not asserted: uvloop's transports are none of asyncio's classes.
        self._transport = transport = cast("asyncio.Transport", transport)
        # With a high-water mark of zero, "writing is paused" says exactly "bytes are left", which
        # the repeat rule asks for and the transport forgets when it fails. asyncio's TLS layer
        # pauses at zero bytes if told zero, and never resumes.
        over_tls = transport.get_extra_info("sslcontext") is not None
        transport.set_write_buffer_limits(high=1 if over_tls else 0, low=0)
        acknowledge_later(transport)

    def data_received(self, data: bytes) -> None:
        """Hand the body bytes of one read to the sink, or a whole chunk as it is: the hot path."""
        parser = self._parser
        if parser is None:
            self.close()  # idle, and nothing was asked: whatever this is, it is no answer
            return
        chunk_sink = self.chunk_sink
        if chunk_sink is not None and not parser.in_chunk[0]:
            try:
                size = chunk_sink(data)
            except Exception as exc:  # noqa: BLE001 - as below
                self.fail(exc)
                return
            if size:
                parser.body_bytes += size
                return
        body = parser.feed(data)
        if body:
            try:
                self.sink(body)
            except Exception as exc:  # noqa: BLE001 - pipe_to raises it to the sink's owner
                self.fail(exc)
                return
        if parser.news:
            self._on_news(parser)

    def eof_received(self) -> None:
        """Upstream has ended its side; half-open connections are of no use here."""
        self._on_eof()
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchange, if it is still waiting, what became of its connection."""
        if exc is not None and not self.request_sent:
            self._read_rest()
        if exc is None:
            self._on_eof()
        else:
            self.fail(lost_error(exc, request_sent=self.request_sent))
        self._transport = None
        self._forget(self)
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        """Note that bytes are left to be written."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """Note that all bytes were taken by the kernel."""
        self._write_paused = False
        if self._head_limit is not None:
            self._head_limit.progress()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def _on_news(self, parser: ResponseParser) -> None:
        parser.news = False
        if parser is not self._parser:
            return  # the sink has ended the exchange
        answer = self._answer
        if parser.head_complete and answer is not None and not answer.done():
            self._stop_head_limit()
            answer.set_result(parser)
        if parser.error is not None:
            self.fail(parser.error)
        elif parser.complete:
            self._on_complete(parser)

    def _on_eof(self) -> None:
        if self._parser is not None:
            self._parser.feed_eof()
            self._on_news(self._parser)

    def _on_complete(self, parser: ResponseParser) -> None:
        stream = self._stream
        assert stream is not None  # noqa: S101 - a parser is there only with its stream
        # Read it before the stream ends: that cancels a sender which is not done.
        reusable = parser.keep_alive and self.request_sent
        self._detach()
        stream.end(None)
        if reusable:
            self.set_reading(True)
            self._release(self)
        else:
            self.close()

    def _detach(self) -> None:
        self._stop_head_limit()
        if self._parser is not None:
            self.answered = self._parser.started
            if self._stream is not None:
                self._stream.received = self._parser.body_bytes
            self._parser.release()
        self._parser = None
        self._stream = None
        self._answer = None
        self.sink = _nowhere
        self.chunk_sink = None

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            self._write_failed = True
            return
        transport.write(data)
        if transport.is_closing():
            self._write_failed = True  # no pause_writing comes from a write that fails at once

    async def _send_body(self, outgoing: OutgoingRequest) -> None:
        """Send a streamed body, one chunk in memory at a time; its owner is the stream."""
        try:
            async with aclosing(outgoing.frames()) as frames:
                async for frame in frames:
                    self._write(frame)
                    if self._write_failed:
                        return  # connection_lost says the rest
                    if outgoing.whole:
                        self._on_request_written()  # whatever the stream still does to end
                    if self._write_paused:
                        self._writable = self._loop.create_future()
                        await self._writable
                    else:
                        await asyncio.sleep(0)  # a body in memory must not keep the loop
            self._on_request_written()
        except Exception as exc:  # noqa: BLE001 - the request's caller gets it
            self.fail(exc)

    def _on_request_written(self) -> None:
        self._request_written = True
        if self._head_limit is not None:
            self._head_limit.progress()

    def _stop_head_limit(self) -> None:
        if self._head_limit is not None:
            self._head_limit.stop()
            self._head_limit = None

    def _unsent(self) -> tuple[int, bool]:
        """How many bytes wait to be taken, and whether the caller has more to send."""
        transport = self._transport
        size = 0 if transport is None else transport.get_write_buffer_size()
        return size, not self._request_written and not self._write_paused

    def _read_rest(self) -> None:
        """Read what upstream had answered before it stopped reading the request."""
        parser = self._parser
        if self._transport is None or parser is None:
            return
        for data in unread(self._transport):
            self.data_received(data)
            if self._parser is not parser:
                return


def _nowhere(_: bytes) -> None:
    """Take bytes that nobody waits for."""
