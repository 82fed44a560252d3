"""The fake's side of one TCP connection: reads requests exactly as they came.

It parses by hand and strictly, so that a test of the proxy's framing does not lean on the parser
that the proxy uses.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.waiting import Signal

Header = tuple[bytes, bytes]
"""A header as on the wire: the name in its own case, the value without the spaces around it."""


class HungUp(ConnectionError):  # noqa: N818 -- what happened, not whose fault it was
    """The proxy closed the connection while the script still had something to say."""


class Owner(Protocol):
    """What a connection needs of the fake that accepted it."""

    accept: Literal["serve", "close", "reset"]
    send_buffer: int | None
    connections: int
    open: set[Connection]
    failures: list[Exception]
    signal: Signal

    def begin(self, connection: Connection, request: Request) -> None:
        """Start a script for a request whose head is complete."""


@dataclass
class Request:
    """One request as it arrived; body and trailers grow while they come in."""

    connection: int
    """Which connection of the fake it came on, counted from 1."""
    number: int
    """Which request on that connection it is, counted from 1."""
    raw_head: bytes
    method: str
    target: bytes
    headers: list[Header]
    body: bytearray = field(default_factory=bytearray)
    trailers: bytes = b""
    complete: bool = False

    def values(self, name: str) -> list[bytes]:
        """All values of a header, in the order in which they came."""
        return values(self.headers, name)

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection outlives this request."""
        return b"close" not in [value.lower() for value in self.values("connection")]

    def json(self) -> Any:
        """Decode the body."""
        return json.loads(self.body)


class Connection(asyncio.Protocol):
    """One accepted connection: reads requests one after another, runs a script for each."""

    transport: asyncio.Transport

    def __init__(self, owner: Owner) -> None:
        self.closed = False
        self._owner = owner
        self._buffer = bytearray()
        self._request: Request | None = None
        self._requests = 0
        self._number = 0
        self._body_left: int | None = 0  # None: chunked
        self._lost = False
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def unsent(self) -> int:
        """Count the bytes that the kernel has not taken yet."""
        return 0 if self._lost else self.transport.get_write_buffer_size()

    @property
    def closing(self) -> bool:
        """Whether either side has given the connection up."""
        return self.closed or self.transport.is_closing()

    @property
    def _socket(self) -> socket.socket:
        return cast("socket.socket", self.transport.get_extra_info("socket"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, or turn the connection away."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=0)  # drain means: the kernel has it
        self._owner.connections += 1
        self._number = self._owner.connections
        self._owner.open.add(self)
        if self._owner.send_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._owner.send_buffer)
        if self._owner.accept == "close":
            self.close()
        elif self._owner.accept == "reset":
            self.reset()
        self._owner.signal.notify()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        self._buffer += data
        try:
            self._parse()
        except ValueError as error:  # not HTTP: the proxy's fault, told when the fake is left
            self._owner.failures.append(error)
            self.reset()
        self._owner.signal.notify()

    def eof_received(self) -> bool:
        """Note that the proxy hung up; a running script decides what becomes of the rest."""
        self.closed = True
        self._owner.signal.notify()
        return self._request is not None

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that both directions are gone."""
        self.closed = self._lost = True
        self._owner.open.discard(self)
        self._writable.set()
        self._owner.signal.notify()

    def pause_writing(self) -> None:
        """Hold the script: the kernel takes no more."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let the script go on: the kernel has everything."""
        self._writable.set()

    async def write(self, data: bytes) -> None:
        """Write, and wait until the kernel has it all."""
        if self.closing:
            raise HungUp
        self.transport.write(data)
        await self._writable.wait()
        for _ in range(3):  # let a proxy on this loop read it before the next piece is written
            await asyncio.sleep(0)
        if self._lost:
            raise HungUp

    def close(self) -> None:
        """Send what is left, then FIN."""
        self.transport.close()

    def reset(self) -> None:
        """Send RST."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def next_request(self) -> None:
        """Go on to the next request, once the script of this one is done."""
        self._request = None
        self._parse()

    def _parse(self) -> None:
        """Take from the buffer what belongs to the request that is being read."""
        if self._request is None:
            end = self._buffer.find(b"\r\n\r\n") + 4
            if end < 4:
                return
            raw_head = bytes(self._buffer[:end])
            del self._buffer[:end]
            self._begin(raw_head)
        request = self._request
        if request is None or request.complete:
            return
        if self._body_left is None:
            self._parse_chunks(request)
        else:
            piece = self._buffer[: self._body_left]
            del self._buffer[: len(piece)]
            self._body_left -= len(piece)
            request.body += piece
            request.complete = self._body_left == 0

    def _begin(self, raw_head: bytes) -> None:
        first, *lines = raw_head[:-4].split(b"\r\n")
        method, target, _ = first.split(b" ")
        headers = [
            (name, value.strip(b" \t")) for name, _, value in (x.partition(b":") for x in lines)
        ]
        self._requests += 1
        request = Request(self._number, self._requests, raw_head, method.decode(), target, headers)
        lengths, codings = request.values("content-length"), request.values("transfer-encoding")
        if len(lengths) + len(codings) > 1 or codings not in ([], [b"chunked"]):
            raise ValueError(f"ambiguous framing: {raw_head!r}")
        self._body_left = None if codings else int((lengths or [b"0"])[0])
        request.complete = self._body_left == 0
        self._request = request
        self._owner.begin(self, request)

    def _parse_chunks(self, request: Request) -> None:
        while not request.complete:
            start = self._buffer.find(b"\r\n") + 2
            if start < 2:
                return
            size = int(self._buffer[: start - 2].split(b";")[0], 16)
            if size == 0:  # the last chunk; trailers and an empty line follow
                end = self._buffer.find(b"\r\n\r\n", start - 2)
                if end < 0:
                    return
                request.trailers = bytes(self._buffer[start : end + 2])
                del self._buffer[: end + 4]
                request.complete = True
            elif len(self._buffer) < start + size + 2:
                return
            else:
                request.body += self._buffer[start : start + size]
                del self._buffer[: start + size + 2]


def values(headers: Iterable[Header], name: str) -> list[bytes]:
    """All values of a header among pairs, in their order."""
    return [value for key, value in headers if key.lower() == name.encode().lower()]
