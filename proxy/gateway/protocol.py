"""uvicorn's HTTP protocol with what a relay needs beside ASGI.

ASGI's ``send`` wakes a task for every piece of a body.  ``BodyWriter`` lets the relay write
straight into the client's transport from the callback that got the bytes from upstream, be
told of backpressure and of the client's leaving, and cut a connection without a clean end.
It is offered as the ASGI extension ``lastword``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from proxy.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = ["EXTENSION", "BodyWriter", "LastwordProtocol"]

EXTENSION = "lastword"
_JOINED_BYTES = 64 * 1024


class BodyWriter:
    """The body of one response, written straight into the client's transport.

    The head goes by ASGI's ``http.response.start`` first.  ``target`` is the request target
    as it came.  ``on_pause`` and ``on_resume`` are called when the client's side is full and
    when it drains, ``on_gone`` once when the connection is lost before the response is whole.
    """

    __slots__ = ("_cycle", "_protocol", "on_gone", "on_pause", "on_resume", "target")

    def __init__(
        self, protocol: LastwordProtocol, cycle: RequestResponseCycle, target: bytes
    ) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self.target = target
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
    def paused(self) -> bool:
        """Whether the client's side takes no more at the moment."""
        return self._cycle.flow.write_paused

    async def drain(self) -> None:
        """Wait until the client's side takes more, or is gone."""
        await self._cycle.flow.drain()

    def write(self, data: bytes) -> None:
        """Write one piece of the body; nothing happens once the client is gone."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete or not data:
            return
        if cycle.scope["method"] == "HEAD":
            return
        if not cycle.chunked_encoding:
            cycle.transport.write(data)
        elif len(data) < _JOINED_BYTES:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            cycle.transport.writelines((b"%x\r\n" % len(data), data, b"\r\n"))

    def end(self) -> None:
        """End the body properly; the connection serves the next request if it may."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete:
            return
        if cycle.chunked_encoding and cycle.scope["method"] != "HEAD":
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
        cycle.transport.close()


class LastwordProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, with a ``BodyWriter`` for every request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
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
        for writer in list(self.writers):
            if not writer.ended and writer.on_gone is not None:
                writer.on_gone()
        self.writers.clear()

    def pause_writing(self) -> None:
        """Hold upstream back while the client does not read."""
        super().pause_writing()
        for writer in self.writers:
            if writer.on_pause is not None:
                writer.on_pause()

    def resume_writing(self) -> None:
        """Let upstream go on."""
        super().resume_writing()
        for writer in self.writers:
            if writer.on_resume is not None:
                writer.on_resume()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in OpenAI's shape."""
        body = error_body(400, msg)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[400] + head % len(body) + body)
        self.transport.close()
