"""One request as the client sent it, and the way to answer it."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from proxy.errors import BadRequestError, FullError, RequestError
from proxy.gateway.body_writer import EXTENSION
from proxy.gateway.record import NAME_LENGTH, Record, trace_id
from proxy.gateway.request_coding import decoded
from proxy.gateway.upgrade import UPGRADE
from proxy.upstream.headers import values

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.types import Receive, Scope, Send

    from proxy.core.held_bytes import Share
    from proxy.gateway.body_writer import BodyWriter
    from proxy.gateway.request_coding import BodyDecoder
    from proxy.gateway.upgrade import Upgrade
    from proxy.upstream.body import ChunkSink
    from proxy.upstream.headers import Pairs
    from proxy.upstream.transport import UpstreamStream

__all__ = ["ClientGoneError", "Downstream"]


class ClientGoneError(Exception):
    """The client left before its request was whole."""


class Downstream:
    """The client's side of one exchange.

    ``headers`` are copied at once, since uvicorn appends trailers to the live list.  ``body`` is
    what ``read_body`` has read, until the response's head is sent.  ``upgrade`` is there if the
    client asks for a WebSocket.  ``record`` takes up what is to be told of the request at its end.
    """

    __slots__ = (
        "_receive",
        "_send",
        "_share",
        "body",
        "headers",
        "http_version",
        "method",
        "path",
        "peer",
        "record",
        "request_id",
        "upgrade",
        "writer",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._share: Share | None = None
        self.body = b""
        self.writer: BodyWriter = scope["extensions"][EXTENSION]
        self.upgrade: Upgrade | None = scope["extensions"].get(UPGRADE)
        self.method: str = scope["method"]
        self.http_version: str = scope["http_version"]
        self.path: str = scope["path"]
        self.headers: Pairs = list(scope["headers"])
        self.peer: str | None = scope["client"][0] if scope["client"] else None
        given = values(self.headers, b"x-request-id")
        self.request_id = given[0] if given else secrets.token_hex(16).encode()
        self.record = Record(
            self.method,
            self.request_id[:NAME_LENGTH].decode("latin-1"),
            trace_id(values(self.headers, b"traceparent")),
            asyncio.get_running_loop().time(),
        )

    @property
    def target(self) -> bytes:
        """The request target, byte for byte."""
        return self.writer.target

    @property
    def has_body(self) -> bool:
        """Whether the request's framing announces a body (RFC 9112, section 6.3)."""
        return bool(
            values(self.headers, b"transfer-encoding")
            or any(value != b"0" for value in values(self.headers, b"content-length"))
        )

    def check_length(self, limit: int) -> None:
        """Refuse a body that says it is longer than ``limit``: ``BadRequestError`` (413)."""
        if any(int(value) > limit for value in values(self.headers, b"content-length")):
            raise _too_large(limit)

    async def chunks(self, limit: int) -> AsyncIterator[bytes]:
        """Yield the request's body as it comes.

        Raises ``BadRequestError`` (413) as soon as it is longer than ``limit``,
        and ``ClientGoneError`` if it breaks off.
        """
        taken = 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            more = message.get("more_body", False)
            chunk = message.get("body", b"")
            taken += len(chunk)
            if taken > limit:
                raise _too_large(limit)
            if not more:
                self.writer.read_on()
            if chunk:
                yield chunk

    async def upload(self, limit: int) -> bytes | AsyncIterator[bytes]:
        """Give the body to be sent on: its bytes if all have come already, else as they come."""
        if not self.has_body:
            return b""
        chunks = self.chunks(limit)
        return b"".join([one async for one in chunks]) if self.writer.request_whole else chunks

    async def read_body(self, limit: int, share: Share, decoder: BodyDecoder | None) -> None:
        """Read the whole body, decoded; never more than ``limit`` bytes of it are held.

        Raises like ``chunks``, ``BadRequestError`` (400) for a body that cannot be decoded, and
        ``FullError`` (503) as soon as ``share`` has no room for it.
        """
        self._share = share
        chunks = self.chunks(limit)
        body: bytes | bytearray = b""
        async for chunk in chunks if decoder is None else decoded(chunks, decoder):
            if len(body) + len(chunk) > limit:
                raise _too_large(limit)
            if not share.ask(len(chunk)):
                raise FullError("max_buffered_bytes")
            if not body:
                body = chunk
            elif isinstance(body, bytearray):
                body += chunk
            else:  # a list of chunks could cost forty times what they hold
                body = bytearray(body + chunk)
        self.body = bytes(body)

    async def start(self, status: int, headers: Pairs) -> None:
        """Send the response's head; whoever may read on for hours needs the body no more.

        A client that waited for a 100 may now send its body or not (RFC 9110, section 10.1.1), and
        nobody could tell it from a next request: the connection ends.
        """
        self.body = b""
        if self._share is not None:
            self._share.close()
        if self.writer.awaits_continue and _CLOSE not in headers:
            headers = [*headers, _CLOSE]
        self.record.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.writer.start(has_length=bool(values(headers, b"content-length")))

    async def answer(self, status: int, headers: Pairs, body: bytes) -> None:
        """Send a whole response; ``headers`` come without a length."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        self.record.bytes = len(body)
        self.writer.write(body)
        self.writer.end()

    async def answer_json(self, status: int, body: bytes) -> None:
        """Send a JSON body of the proxy's own."""
        head = [(b"content-type", b"application/json"), (b"x-request-id", self.request_id)]
        await self.answer(status, head, body)

    async def refuse(self, error: RequestError) -> None:
        """Answer with an error of the proxy's own, or cut what was begun already."""
        if self.writer.gone or self.writer.ended:
            return
        if self.writer.started:
            self.writer.cut()
            return
        body = error.body()
        head = [
            (b"content-type", b"application/json"),
            (b"x-request-id", self.request_id),
            *error.headers,
        ]
        if not self.writer.request_whole and not values(head, b"connection"):
            head.append(_CLOSE)  # what is left of the body is not read
        await self.answer(error.status, head, body)

    async def pipe(
        self,
        stream: UpstreamStream,
        sink: Callable[[bytes], None],
        chunk_sink: ChunkSink | None = None,
    ) -> None:
        """Hand upstream's body to the sinks as it comes, held back while the client is full."""
        self.writer.on_pause = stream.pause
        self.writer.on_resume = stream.resume
        if self.writer.paused:
            stream.pause()
        try:
            await stream.pipe_to(sink, chunk_sink)
        finally:
            self.writer.on_pause = self.writer.on_resume = None

    async def while_here(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Do ``work`` and return True, or stop it when the client leaves and return False."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request is served by a task")
        self.writer.on_gone = task.cancel
        try:
            if self.writer.gone:
                return False
            await work()
        except asyncio.CancelledError:
            if not self.writer.gone:
                raise
            task.uncancel()
            return False
        finally:
            self.writer.on_gone = None
        return True


_CLOSE = (b"connection", b"close")


def _too_large(limit: int) -> BadRequestError:
    return BadRequestError(
        413, f"The request body is larger than the {limit} bytes that this proxy takes."
    )
