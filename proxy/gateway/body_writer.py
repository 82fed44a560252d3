"""The body of one response, written straight into the client's transport.

ASGI's ``send`` wakes a task for every piece of a body.  ``BodyWriter`` lets the relay write
straight into the client's transport from the callback that got the bytes from upstream, be
told of backpressure and of the client's leaving, and cut a connection without a clean end.
It is offered as the ASGI extension ``lastword``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.http_chunk import TAIL_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from proxy.gateway.protocol import LastwordProtocol

__all__ = ["EXTENSION", "BodyWriter"]

EXTENSION = "lastword"
_JOINED_BYTES = 64 * 1024


class BodyWriter:
    """The body of one response, written straight into the client's transport.

    The head goes by ASGI's ``http.response.start`` first.  ``target`` is the request target
    as it came.  ``on_pause`` and ``on_resume`` are called when the client's side is full and
    when it drains, ``on_gone`` once when the connection is lost before the response is whole.
    """

    __slots__ = (
        "_chunked",
        "_cycle",
        "_has_length",
        "_now",
        "_protocol",
        "_takes",
        "_write",
        "on_gone",
        "on_pause",
        "on_resume",
        "target",
        "written_at",
    )

    def __init__(
        self, protocol: LastwordProtocol, cycle: RequestResponseCycle, target: bytes
    ) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.target = target
        self._has_length = False
        self._chunked = False
        self._takes = cycle.scope["method"] != "HEAD"  # until the response is whole
        self._now = protocol.loop.time
        self._write = cycle.transport.write
        self.written_at = self._now()
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self.on_gone: Callable[[], object] | None = None

    @property
    def gone(self) -> bool:
        """Whether the client has left, or was cut off, before the response was whole."""
        return self._cycle.disconnected

    @property
    def request_whole(self) -> bool:
        """Whether all of the request has come, read or not."""
        return not self._cycle.more_body

    @property
    def started(self) -> bool:
        """Whether the head was sent."""
        return self._cycle.response_started

    @property
    def ended(self) -> bool:
        """Whether the response is whole."""
        return self._cycle.response_complete

    @property
    def awaits_continue(self) -> bool:
        """Whether the client waits for a 100 before it sends its body."""
        cycle = self._cycle
        return cycle.waiting_for_100_continue and cycle.more_body and not cycle.body

    @property
    def _ends_with_connection(self) -> bool:
        """Whether a closed connection is a proper end to the client: HTTP/1.0 without a length."""
        return not self._chunked and not self._has_length

    @property
    def paused(self) -> bool:
        """Whether the client's side takes no more at the moment."""
        return self._cycle.flow.write_paused

    def read_on(self) -> None:
        """Read from the client again: uvicorn leaves it paused behind a large request body.

        Else nobody would see the client leave.
        """
        self._cycle.flow.resume_reading()

    async def drain(self) -> None:
        """Wait until the client's side takes more, or is gone."""
        await self._cycle.flow.drain()

    def start(self, *, has_length: bool) -> None:
        """Take note that the head was sent: it says how the body is framed."""
        self._has_length = has_length
        self._chunked = bool(self._cycle.chunked_encoding)

    def lose(self) -> None:
        """Take note that the connection is lost."""
        self._takes = False
        if not self.ended and self.on_gone is not None:
            self.on_gone()

    def write(self, data: bytes) -> None:
        """Write one piece of the body; nothing happens once the client is gone."""
        size = len(data)
        if not (size and self._takes):
            return
        self.written_at = self._now()
        if not self._chunked:
            self._write(data)
        elif size < _JOINED_BYTES:
            self._write(b"%x\r\n%b\r\n" % (size, data))
        else:
            self._cycle.transport.writelines((b"%x\r\n" % size, data, b"\r\n"))

    def write_http_chunk(self, http_chunk: bytes, size: int, now: float) -> None:
        """Write one whole HTTP chunk of ``size`` bytes of data, with its framing if it needs one.

        ``now`` is the loop's time.
        """
        if not self._takes:
            return
        self.written_at = now
        write = self._write  # a local: Python calls what lies in a slot the slow way
        write(http_chunk if self._chunked else http_chunk[-TAIL_BYTES - size : -TAIL_BYTES])

    def end(self) -> None:
        """End the body properly; the connection serves the next request if it may."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete:
            return
        if self._chunked and self._takes:
            self._write(b"0\r\n\r\n")
        self._takes = False
        cycle.response_complete = True
        cycle.message_event.set()
        self._protocol.writers.discard(self)
        if not cycle.keep_alive:
            self._protocol.close_after_answer()
        cycle.on_response()

    def cut(self) -> None:
        """Flush what was written and close the connection without a proper end."""
        cycle = self._cycle
        if cycle.response_complete:
            return
        self._takes = False
        cycle.disconnected = True
        cycle.message_event.set()
        self._protocol.writers.discard(self)
        if cycle.response_started and self._ends_with_connection:
            self._protocol.reset_soon()
        else:
            self._protocol.close()
