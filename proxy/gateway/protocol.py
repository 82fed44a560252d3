"""uvicorn's HTTP protocol with what a relay needs beside ASGI.

ASGI's ``send`` wakes a task for every piece of a body.  ``BodyWriter`` lets the relay write
straight into the client's transport from the callback that got the bytes from upstream, be
told of backpressure and of the client's leaving, and cut a connection without a clean end.
It is offered as the ASGI extension ``lastword``.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from proxy.errors import error_body

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = ["EXTENSION", "BodyWriter", "LastwordProtocol"]

EXTENSION = "lastword"
_JOINED_BYTES = 64 * 1024
_RESET_AFTER_S = 0.1


class BodyWriter:
    """The body of one response, written straight into the client's transport.

    The head goes by ASGI's ``http.response.start`` first.  ``target`` is the request target
    as it came.  ``on_pause`` and ``on_resume`` are called when the client's side is full and
    when it drains, ``on_gone`` once when the connection is lost before the response is whole.
    """

    __slots__ = (
        "_cycle",
        "_is_head",
        "_now",
        "_protocol",
        "_write",
        "has_length",
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
        self.has_length = False
        self._now = protocol.loop.time
        self._write = cycle.transport.write
        self._is_head = cycle.scope["method"] == "HEAD"
        self.written_at = self._now()
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self.on_gone: Callable[[], object] | None = None

    @property
    def gone(self) -> bool:
        """Whether the client has left, or was cut off, before the response was whole."""
        return self._cycle.disconnected

    @property
    def started(self) -> bool:
        """Whether the head was sent."""
        return self._cycle.response_started

    @property
    def ended(self) -> bool:
        """Whether the response is whole."""
        return self._cycle.response_complete

    @property
    def _ends_with_connection(self) -> bool:
        """Whether a closed connection is a proper end to the client: HTTP/1.0 without a length."""
        return not self._cycle.chunked_encoding and not self.has_length

    @property
    def paused(self) -> bool:
        """Whether the client's side takes no more at the moment."""
        return self._cycle.flow.write_paused

    async def drain(self) -> None:
        """Wait until the client's side takes more, or is gone."""
        await self._cycle.flow.drain()

    def write(self, data: bytes) -> None:
        """Write one piece of the body; nothing happens once the client is gone."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete or not data or self._is_head:
            return
        self.written_at = self._now()
        size = len(data)
        if not cycle.chunked_encoding:
            self._write(data)
        elif size < _JOINED_BYTES:
            self._write(b"%x\r\n%b\r\n" % (size, data))
        else:
            cycle.transport.writelines((b"%x\r\n" % size, data, b"\r\n"))

    def end(self) -> None:
        """End the body properly; the connection serves the next request if it may."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete:
            return
        if cycle.chunked_encoding and not self._is_head:
            cycle.transport.write(b"0\r\n\r\n")
        cycle.response_complete = True
        cycle.message_event.set()
        self._protocol.writers.discard(self)
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    def cut(self) -> None:
        """Flush what was written and close the connection without a proper end."""
        cycle = self._cycle
        if cycle.response_complete:
            return
        cycle.disconnected = True
        cycle.message_event.set()
        self._protocol.writers.discard(self)
        if cycle.response_started and self._ends_with_connection:
            self._protocol.reset_soon()
        else:
            cycle.transport.close()


class LastwordProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, with a ``BodyWriter`` for every request.

    A client that takes nothing for ``write_stall_s`` seconds is cut off.
    """

    def __init__(self, *args: Any, write_stall_s: float = 300.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write_stall_s = write_stall_s
        self._stall_timer: asyncio.TimerHandle | None = None
        self._stalled_bytes = 0
        self._give_up_at = 0.0
        self.writers: set[BodyWriter] = set()
        self._in_head = False

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, and drop trailers: uvicorn would append them to the head's."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Give the request its writer; HTTP/1.0 clients get bodies that end with the connection."""
        self._in_head = False
        previous = self.cycle
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is previous:  # an upgrade: no request was begun
            return
        if self.parser.get_http_version() == "1.0":
            cycle.chunked_encoding = False
        writer = BodyWriter(self, cycle, self.url)
        self.writers.add(writer)
        self.scope["extensions"] = {EXTENSION: writer}  # type: ignore[dict-item]

    def on_response_complete(self) -> None:
        """Forget the writers of responses that went out by ASGI's ``send``."""
        self.writers = {writer for writer in self.writers if not writer.ended}
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the requests that are still running that their client has left."""
        super().connection_lost(exc)
        self._unset_stall_timer()
        for writer in list(self.writers):
            if not writer.ended and writer.on_gone is not None:
                writer.on_gone()
        self.writers.clear()

    def pause_writing(self) -> None:
        """Hold upstream back while the client does not read."""
        super().pause_writing()
        self._watch_stall()
        for writer in self.writers:
            if writer.on_pause is not None:
                writer.on_pause()

    def resume_writing(self) -> None:
        """Let upstream go on."""
        super().resume_writing()
        self._unset_stall_timer()
        for writer in self.writers:
            if writer.on_resume is not None:
                writer.on_resume()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send events at once: asyncio leaves Nagle's algorithm on for sockets made by hand."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def reset_soon(self) -> None:
        """Break the connection (RST) once the client's machine has taken what was written."""
        self._give_up_at = self.loop.time() + self._write_stall_s
        self.loop.call_later(_RESET_AFTER_S, self._reset)

    def _reset(self) -> None:
        connection = self.transport.get_extra_info("socket")
        if connection is not None and not self.transport.is_closing():
            if self._untaken(connection) and self.loop.time() < self._give_up_at:
                self.loop.call_later(_RESET_AFTER_S, self._reset)
                return
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _untaken(self, connection: socket.socket) -> int:
        """How many bytes an RST would destroy: ours, and the kernel's where it can be asked."""
        unsent = self.transport.get_write_buffer_size()
        if sys.platform == "linux":
            queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
            unsent += int.from_bytes(queued, sys.byteorder)
        return unsent

    def _watch_stall(self) -> None:
        """Look again in ``write_stall_s`` whether the client has taken anything."""
        self._stalled_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._write_stall_s, self._check_stall)

    def _check_stall(self) -> None:
        if self.transport.get_write_buffer_size() < self._stalled_bytes:
            self._watch_stall()
        else:
            self.transport.abort()

    def _unset_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in OpenAI's shape."""
        body = error_body(400, msg)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[400] + head % len(body) + body)
        self.transport.close()
